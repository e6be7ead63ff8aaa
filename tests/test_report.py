"""A trace added up and drawn: sums, labels, what is escaped, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

import pyinfer
from pyinfer import InputError
from pyinfer.cli import main
from pyinfer.observe import ChromeTrace, PhaseProfile
from pyinfer.observe.draw import COLOURS, Box, log_ticks, page, place, text_width, ticks
from pyinfer.observe.markup import tag
from pyinfer.observe.phases import BUCKETS
from pyinfer.observe.report import Bucket, report, running_median, spans
from pyinfer.schedule import Pool

DOWNGRADE = {"requested": "Pool(3)", "used": "Pool(1)", "reason": "1 thread"}
NO_TRACES = ([], {}, 3, None, {"traceEvents": []}, {"traceEvents": [], "otherData": {}})
NO_TIMES = ({"dur": -1}, {"dur": None}, {"ts": math.nan}, {"args": []})


def complete(cat: str, name: str, ts: float, dur: float, phase: str, **args: Any) -> dict[str, Any]:
    return {
        **{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 0},
        "args": {"phase": phase, **args},
    }


def op(
    name: str, ts: float, dur: float, phase: str, bucket: str = "", n: int = 0, macs: int = 0, **more: Any
):
    outer = {"bucket": bucket, "bytes": n, "macs": macs} if bucket else {}
    args = {"shapes": "1x2 -> 1x2", "dtype": "f32", "leaf": True} | outer | more
    return complete("op", name, ts, dur, phase, **args)


def small() -> dict[str, Any]:
    """Two tokens of a prompt, then two decoded; one op of the decoding is made of another."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            **{"model": "a <b>bold</b> & model", "backend": "simd", "threads": 1, "kv_cache": "paged, f16"},
            **{"tensor_types": {"Q8_0": 2, "F32": 1}, "kernels": {"add": "avx2", "mul": "avx2"}},
            "limits": {"read_gb": 10.0, "int8_gmac": 200.0, "f32_gmac": 50.0},
        },
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "pyinfer"}},
            complete("region", "region", -900.0, 100.0, "prefill"),
            complete("forward", "prefill 2", 0.0, 100.0, "prefill", tokens=2, before=0),
            complete("layer", "layer 0", 10.0, 60.0, "prefill"),
            op("matmul ffn_up", 10.0, 40.0, "prefill", "mlp", 4000, 8000, layer=0),
            op("rms_norm ffn_norm", 50.0, 20.0, "prefill", "norm", 100, layer=0),
            complete("sample", "sample", 110.0, 10.0, "prefill"),
            op("softmax_rows", 112.0, 5.0, "prefill", "sample"),
            complete("forward", "decode 1", 200.0, 50.0, "decode", tokens=1, before=2),
            op("matmul ffn_up", 205.0, 20.0, "decode", "mlp", 4000, 4000, layer=0),
            op("swiglu", 230.0, 10.0, "decode", "mlp", leaf=False, layer=0),
            op("silu", 231.0, 4.0, "decode", layer=0),
            complete("sample", "sample", 260.0, 8.0, "decode"),
            complete("forward", "decode 1", 300.0, 25.0, "decode", tokens=1, before=3),
            op("matmul ffn_up", 305.0, 15.0, "decode", "mlp", 4000, 4000, layer=0),
            complete("sample", "sample", 330.0, 6.0, "decode"),
            {"ph": "C", "name": "tokens/s", "ts": 330.0, "pid": 1, "tid": 0, "args": {"decode": 1.0}},
            *(
                {"ph": "i", "name": "schedule downgraded", "cat": "schedule", "s": "p", "pid": 1, "tid": 0}
                | {"ts": 5.0 + layer, "args": {**DOWNGRADE, "layer": layer}}
                for layer in (0, 1, 2)
            ),
        ],
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PhaseProfile]:
    """A trace of a tiny model, and the profile of the same run."""
    folder = tmp_path_factory.mktemp("report")
    path, profile = write_tiny(folder / "tiny.gguf", "qwen3", type="Q8_0"), PhaseProfile()
    observers = [ChromeTrace(folder / "trace.json"), profile]
    with pyinfer.load(path, backend="simd", schedule=Pool(3), observers=observers) as model:
        model.generate([3, 5, 7, 11, 13], max_tokens=12)
    return folder / "trace.json", profile


# ---- sums --------------------------------------------------------------------------------------------------


def test_sums():
    r = report(small())
    assert [(p.name, p.tokens, p.us) for p in r.phases] == [("prefill", 2, 110.0), ("decode", 2, 89.0)]
    assert r.phases[0].buckets == [
        *(Bucket("mlp", 1, 40.0, 4000, 8000), Bucket("python", 1, 40.0, 0, 0)),
        *(Bucket("norm", 1, 20.0, 100, 0), Bucket("sample", 1, 10.0, 0, 0)),
    ]
    assert r.phases[1].buckets == [
        *(
            Bucket("mlp", 3, 45.0, 8000, 8000),
            Bucket("python", 2, 30.0, 0, 0),
            Bucket("sample", 2, 14.0, 0, 0),
        ),
    ]
    assert (r.tokens_in, r.tokens_out, r.first_ms) == (2, 3, 0.11)
    assert r.rate == pytest.approx(2 / 75e-6)


def test_ops_are_the_leaves():
    found = {o.label: (o.bucket, o.us, dict(o.calls)) for o in report(small()).ops}
    assert found == {
        "matmul ffn_up": ("mlp", 75.0, {"prefill": 1, "decode": 2}),
        "rms_norm ffn_norm": ("norm", 20.0, {"prefill": 1}),
        "softmax_rows": ("sample", 5.0, {"prefill": 1}),
        "silu": (None, 4.0, {"decode": 1}),
    }
    assert [o.label for o in report(small()).ops] == list(found)
    assert report(small()).ops[0].mean_us == 25.0


def test_rates():
    b = Bucket("mlp", 1, 40.0, 4000, 8000)  # in 40 us
    assert (b.gb, b.gmac, b.intensity) == (0.1, 0.2, 2.0)
    assert Bucket("rope", 1, 0.0).gmac == 0


def test_peaks():
    r = report(small())
    assert [r.peak(b) for b in ("mlp", "attn.fused_compute")] == [200.0, 50.0]
    floats = small()
    floats["otherData"]["tensor_types"] = {"F16": 3, "F32": 1}
    assert report(floats).peak("mlp") == 50.0
    floats["otherData"]["limits"] = None
    assert report(floats).peak("mlp") is None


def test_steps():
    steps = report(small()).steps
    assert [(s.context, s.rate) for s in steps] == [(3, 20_000.0), (4, 40_000.0)]
    assert steps[0].median == 30_000.0
    assert running_median([5, 1, 9, 3, 7], 3) == [3, 5, 3, 7, 5]
    (one,) = spans(steps, 1)
    assert (one.first, one.last, one.least, one.most, one.median) == (3, 4, 20_000, 40_000, 30_000)
    assert [(s.first, s.last) for s in spans(steps, 8)] == [(3, 3), (4, 4)]


def test_slowest():
    r = report(small())
    assert [(s.us, s.median_us, s.phase, s.layer) for s in r.slowest[:3]] == [
        *((40.0, 40.0, "prefill", 0), (20.0, 20.0, "prefill", 0), (20.0, 17.5, "decode", 0)),
    ]
    trace = small()
    trace["traceEvents"] += [op("swiglu", 310.0, 50.0 + i, "decode", "mlp") for i in range(9)]
    assert [s.us for s in report(trace).slowest[:4]] == [58.0, 57.0, 56.0, 40.0]


def test_downgrades():
    (d,) = report(small()).downgrades
    assert (d.requested, d.used, d.reason, d.layers, d.times, d.at_ms) == (
        *("Pool(3)", "Pool(1)", "1 thread", "0 to 2", 3, 0.005),
    )


def test_as_the_profile_of_the_same_run(real):
    path, profile = real
    r = report(json.loads(path.read_text()))
    loading = {("prefill", "rope"), ("prefill", "python")}  # rope_tables runs once, before the first forward
    found = {k: b for p in r.phases for b in p.buckets if (k := (p.name, b.name)) not in loading}
    assert {k: b.calls for k, b in found.items()} == {
        k: n for k, n in profile.calls.items() if n and k[0] and k not in loading
    }
    for k, b in found.items():
        assert b.us == pytest.approx(profile.ns[k] / 1e3, abs=0.5)
    assert len(r.steps) == 11
    assert r.downgrades
    assert r.limits is None


# ---- the page ----------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Keeps what is open, all attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, name, attributes):
        self.seen.append((name, dict(attributes)))
        if name not in ("meta", "br"):
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def check_page(text: str) -> Tags:
    tags = Tags(text)
    assert tags.open == []
    assert not re.search(r"https?:|//|@import|url\(", text)
    names = {name for name, _ in tags.seen}
    assert not names & {"script", "link", "img", "iframe", "object", "image", "use"}
    keys = {key for _, a in tags.seen for key in a}
    assert not [key for key in keys if key in ("src", "href", "xlink:href") or key.startswith("on")]
    assert "nan" not in {v for _, a in tags.seen for v in a.values()}
    return tags


def without(trace: dict[str, Any], *phases: str) -> dict[str, Any]:
    kept = [e for e in trace["traceEvents"] if e["args"].get("phase") not in phases]
    return trace | {"traceEvents": kept}


def unmeasured(trace: dict[str, Any], **limits: Any) -> dict[str, Any]:
    return trace | {"otherData": trace["otherData"] | {"limits": limits or None}}


@pytest.mark.parametrize(
    "trace",
    [
        *(small(), without(small(), "prefill"), without(small(), "decode"), unmeasured(small())),
        unmeasured(small(), read_gb=10.0, int8_gmac=None, f32_gmac=None),
        small() | {"otherData": {"backend": "reference"}},
    ],
    ids=["all", "decode", "prefill", "no limits", "no peaks", "no facts"],
)
def test_page(trace):
    check_page(page(report(trace)))


def test_page_of_a_real_trace(real):
    tags = check_page(page(report(json.loads(real[0].read_text()))))
    assert tags.text["h2"] == [
        *("Time by phase", "Calls by op", "Tokens per second over context length"),
        *("Beside what the machine could do", "Slowest single ops", "Schedules that could not be had"),
    ]
    dots = [a for name, a in tags.seen if name == "circle" and a.get("class") == "dot"]
    assert len(dots) == 2 * 11  # a point for each step, in the wide picture and in the narrow one


def test_text_is_escaped():
    trace = small()
    evil = "</title><script>alert(1)</script>\"'&"
    trace["otherData"] |= {"model": evil, "backend": evil, "kv_cache": evil, "threads": evil}
    trace["otherData"] |= {"kernels": {"x": evil}, "tensor_types": {evil: evil}, "machine": {"cpu": evil}}
    for e in trace["traceEvents"]:
        args = e["args"]
        args |= {k: evil for k in ("shapes", "bucket", "requested", "used", "reason") if k in args}
        args |= {"phase": evil} if args.get("phase") == "decode" else {}
        e["name"] = f"{evil} {evil}"
    tags = check_page(page(report(trace)))
    assert tags.text["h1"] == [evil]


def test_tag_escapes_all_but_markup():
    made = tag("td", "<", tag("b", "&"), None, 1.5, a_b='"', class_="x", id=None)
    assert made == '<td a-b="&quot;" class="x">&lt;<b>&amp;</b>1.5</td>'


def test_bars_are_parts_of_the_largest():
    tags = check_page(page(report(without(small(), "decode"))))
    widths = [a["width"] for name, a in tags.seen if name == "rect" and str(a.get("width")).endswith("%")]
    assert widths[:4] == ["100.00%", "100.00%", "50.00%", "25.00%"]


@pytest.mark.parametrize("width", [300, 800])
def test_labels_do_not_collide(width):
    area = Box(0, 0, width, 300)
    points = [(60 + 3 * (i % 2), 100.0 + 9 * (i // 2)) for i in range(10)] + [(width - 4, 150.0)]
    texts = [*BUCKETS[:10], "attn.fused_compute"]
    line = Box(0, 60, width, 6)
    boxes = place(points, texts, [line], area)
    assert [b.width for b in boxes] == [text_width(t) for t in texts]
    assert all(b.within(area) and not b.meets(line) for b in boxes)
    assert not [pair for pair in combinations(boxes, 2) if pair[0].meets(pair[1])]
    assert not [1 for b in boxes for x, y in points if b.x < x < b.x + b.width and b.y < y < b.y + b.height]


def test_ticks():
    assert ticks(123.0, 5) == [0, 50, 100]
    assert ticks(1079, 4, 961) == [1000, 1050]
    assert ticks(0.9, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert log_ticks(0.4, 30, 12) == pytest.approx([0.5, 1, 2, 5, 10, 20])
    assert log_ticks(0.4, 3000, 6) == pytest.approx([1, 10, 100, 1000])


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return math.fsum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_show_on_both_pages():
    """WCAG asks for a contrast of 3 for graphics."""
    assert list(COLOURS) == list(BUCKETS)
    assert len(set(COLOURS.values())) == len(BUCKETS)
    for colour in COLOURS.values():
        assert 1.05 / (luminance(colour) + 0.05) >= 3
        assert (luminance(colour) + 0.05) / (luminance("#15181c") + 0.05) >= 3


# ---- the command -------------------------------------------------------------------------------------------


def test_command(real, tmp_path, capsys):
    path = tmp_path / "a.trace.json"
    path.write_bytes(real[0].read_bytes())
    assert main(["trace-view", str(path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.trace.html'}\n"
    assert main(["trace-view", str(path), "-o", str(tmp_path / "b.html")]) == 0
    text = (tmp_path / "b.html").read_text(encoding="utf-8")
    assert text == (tmp_path / "a.trace.html").read_text(encoding="utf-8")
    check_page(text)


def test_a_name_that_is_no_unicode(tmp_path):
    trace = small()
    trace["otherData"]["model"] = "\ud800 µ"
    (tmp_path / "t.json").write_text(json.dumps(trace))
    assert main(["trace-view", str(tmp_path / "t.json")]) == 0
    assert "<h1>&#55296; µ</h1>" in (tmp_path / "t.html").read_text(encoding="utf-8")


def changed(**args: Any) -> dict[str, Any]:
    trace = small()
    trace["traceEvents"][2]["args"] |= args
    return trace


def timed(**given: Any) -> dict[str, Any]:
    trace = copy.deepcopy(small())
    trace["traceEvents"][4] |= given
    return trace


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *(("{", "is no JSON"), (b"\xff\xfe\xfa", "is no JSON"), ("[" * 100_000, "is no JSON")),
        *((x, "is no trace of pyinfer") for x in NO_TRACES),
        ({"traceEvents": [{"ph": "X"}], "otherData": {"backend": "simd"}}, "is no trace of pyinfer"),
        *((changed(**{k: "x"}), "is no trace of pyinfer") for k in ("tokens", "before")),
        (changed(phase=3), "is no trace of pyinfer"),
        *((timed(**t), "is no trace of pyinfer") for t in NO_TIMES),
        *((unmeasured(small(), **v), "is no trace of pyinfer") for v in ({"read_gb": -1}, {"int8_gmac": 1})),
        (small() | {"traceEvents": []}, "is empty"),
        (small() | {"traceEvents": small()["traceEvents"][:2]}, "is empty"),
    ],
)
def test_refused(content, words, tmp_path, capsys):
    path = tmp_path / "t.json"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["trace-view", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("pyinfer: error: ")
    assert str(path) in err
    assert words in err
    assert list(tmp_path.iterdir()) == [path]


def test_refused_files(tmp_path, capsys):
    path = tmp_path / "t.json"
    assert main(["trace-view", str(path)]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["trace-view", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    path.write_text(json.dumps(small()))
    nowhere = tmp_path / "no" / "x.html"
    for out, words in ((nowhere, "no folder"), (tmp_path, "a folder"), (path, "the trace itself")):
        assert main(["trace-view", str(path), "-o", str(out)]) == 1
        assert words in capsys.readouterr().err
    assert json.loads(path.read_text()) == small()


def test_errors_are_typed():
    with pytest.raises(InputError, match="the trace is empty"):
        report(small() | {"traceEvents": []})

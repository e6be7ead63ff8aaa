"""What observers see of a run: lines, phases, traces, plans, and where two runs part."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_tiny

import pyinfer
from pyinfer import InputError, backend
from pyinfer.backend.base import Backend
from pyinfer.backend.native import NativeBackend
from pyinfer.backend.tracing import OPS, TracingBackend
from pyinfer.gguf_file import GGUFFile
from pyinfer.observe import ChromeTrace, Observer, OpRecord, PhaseProfile, compare, plan
from pyinfer.observe.phases import BUCKETS
from pyinfer.observe.plan import RULES
from pyinfer.schedule import Pool

PROMPT = [3, 5, 7, 11, 13]
LAYERS = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("observe") / "tiny.gguf", "qwen3", type="Q8_0")


class Seen(Observer):
    """All calls; a replay's too, as the base class tells them."""

    def __init__(self) -> None:
        self.calls, self.spans, self.closed = [], [], 0

    def call(self, call):
        if call.phase:  # else it is of loading
            self.calls.append(call)

    def span(self, span):
        self.spans.append((span, len(self.calls)))

    def close(self):
        self.closed += 1


class OpByOp(Seen):
    replays = False


def generate(path: Path, *observers: Observer, n: int = 4, **options: Any) -> list[int]:
    with pyinfer.load(path, observers=observers, **{"backend": "simd", **options}) as model:
        return model.generate(PROMPT, max_tokens=n).tokens


# ---- the wrapper -------------------------------------------------------------------------------------------


def test_nothing_is_wrapped_unless_asked(path):
    with pyinfer.load(path) as model:
        assert type(model._ops) is NativeBackend
    with pyinfer.load(path, observers=[Seen()]) as model:
        assert type(model._ops) is TracingBackend


@pytest.mark.parametrize("kv", ["positional", "append", "paged", "sliding:4"])
@pytest.mark.parametrize("name", ["reference", "simd", "parallel"])
def test_watching_moves_no_byte(name, kv, path):
    options = {"backend": name, "kv": kv}
    with pyinfer.load(path, **options) as model:
        plain = model.digest(PROMPT, 3)
    for observer in (Seen(), OpByOp(), PhaseProfile(), OpRecord()):
        with pyinfer.load(path, observers=[observer], **options) as model:
            assert model.digest(PROMPT, 3) == plain


@pytest.mark.parametrize("name", ["simd", "parallel"])
def test_a_replayed_token_is_told_as_if_op_by_op(name, path):
    found = []
    for observer in (Seen(), OpByOp()):
        generate(path, observer, backend=name)
        found.append([replace(c, start=0, end=0) for c in observer.calls])
        at = 0
        for span, end in observer.spans:
            inside, at = observer.calls[at:end], end
            assert all(span.start <= c.start <= c.end <= span.end for c in inside)
            assert all(a.end <= b.start for a, b in pairwise(inside))
    assert found[0] == found[1]


def test_spans(path):
    seen = Seen()
    generate(path, seen, n=3, chunk=2)
    assert [(s.kind, s.phase, s.tokens, s.before) for s, _ in seen.spans] == [
        *(("forward", "prefill", n, before) for n, before in ((2, 0), (2, 2), (1, 4))),
        ("sample", "prefill", 0, 0),
        *(("forward", "decode", 1, 5), ("sample", "decode", 0, 0)),
        *(("forward", "decode", 1, 6), ("sample", "decode", 0, 0)),
    ]


def test_layers_and_weights(path):
    seen = Seen()
    generate(path, seen, n=1)
    assert [(c.layer, c.label) for c in seen.calls[:6]] == [
        (None, "gather_rows token_embd"),
        (0, "rms_norm attn_norm"),
        (0, "matmul_many attn_q attn_k attn_v"),
        (0, "rms_norm_heads attn_q_norm"),
        (0, "apply_rope"),
        (0, "rms_norm_heads attn_k_norm"),
    ]
    assert seen.calls[-1].layer is None
    assert seen.calls[-1].label == "matmul token_embd"
    assert seen.calls[2].weights[0].type == "Q8_0"
    assert {c.layer for c in seen.calls} == {None, *range(LAYERS)}


def test_calls_of_a_default_are_parts_of_it(path):
    seen = Seen()
    generate(path, seen, n=2, unfused=["swiglu"])
    silu = [c for c in seen.calls if c.op == "silu"]
    swiglu = [c for c in seen.calls if c.op == "swiglu"]
    assert len(silu) == len(swiglu) == 2 * LAYERS
    assert not any(c.outer for c in silu)
    assert all(c.outer and not c.leaf for c in swiglu)
    assert all(a.start <= b.start and b.end <= a.end for a, b in zip(swiglu, silu, strict=True))


def test_closed_once(path):
    seen = Seen()
    model = pyinfer.load(path, observers=[seen])
    model.close()
    model.close()
    assert seen.closed == 1
    other = Seen()
    pyinfer.load(path, observers=[other])  # let go without a close
    gc.collect()
    assert other.closed == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observers": [print]}, "no pyinfer.observe.Observer"),
        ({"unfused": ["matmul"]}, "no coarse op 'matmul'"),
    ],
)
def test_refused(options, words, path):
    with pytest.raises(InputError, match=words):
        pyinfer.load(path, **options)


def test_unfused_moves_no_byte(path):
    with pyinfer.load(path) as fused, pyinfer.load(path, unfused=["all"]) as plain:
        assert fused.digest(PROMPT, 2) == plain.digest(PROMPT, 2)


# ---- lines -------------------------------------------------------------------------------------------------


def test_call_log(path, caplog):
    with caplog.at_level(5, "pyinfer.ops"):
        tokens = generate(path, n=2)  # the level is all that it takes
    lines = [r.getMessage() for r in caplog.records if r.name == "pyinfer.ops"]
    at = next(i for i, line in enumerate(lines) if line.startswith("[SIMD] op invocation counts"))
    calls, counts = lines[:at], lines[at:]
    form = re.compile(
        r"\[SIMD\] [a-z_0-9]+( [a-z_]+)* ([\dx]+ )*-> [\dx()]+ (f32|f16)? ?\d+\.\d us "
        r"(load|prefill|decode)( layer \d)?"
    )
    assert [line for line in calls if not form.fullmatch(re.sub("  +", " ", line))] == []
    assert counts[0] == f"[SIMD] op invocation counts (total {len(calls)}):"
    found = Counter(line.split()[1] for line in calls)
    assert counts[1:] == [f"  {op}: {n}" for op, n in sorted(found.items())]
    assert (
        sum(" decode" in line for line in calls) == (len(calls) - 2) / 2
    )  # but for rope's tables, a copy of a row
    assert len(tokens) == 2
    assert generate(path, n=2) == tokens


def test_the_logger_is_off_by_default(path, caplog):
    with caplog.at_level(logging.DEBUG):
        generate(path)
    assert not [r for r in caplog.records if r.name == "pyinfer.ops"]


# ---- phases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["positional", "append"])
@pytest.mark.parametrize("observer", [PhaseProfile, type("Slow", (PhaseProfile,), {"replays": False})])
def test_profile(observer, kv, path):
    profile, seen = observer(), Seen()
    generate(path, profile, seen, n=4, kv=kv)
    prefill = {b: profile.calls["prefill", b] for b in BUCKETS}
    assert prefill == {
        **{"embed": 1, "norm": 4 * LAYERS + 1, "qkv": LAYERS, "rope": 2 * LAYERS, "o_proj": LAYERS},
        **{"attn.kvcache": (1 if kv == "positional" else 2) * LAYERS, "attn.fused_compute": LAYERS},
        **{"attn.fused_copy": 0, "mlp": 3 * LAYERS, "head": 2, "sample": 1, "python": 1},
    }
    decode = {b: profile.calls["decode", b] for b in BUCKETS}
    copies = 0 if kv == "positional" else 2 * 3 * LAYERS
    assert decode == {b: 3 * n for b, n in prefill.items()} | {"attn.fused_copy": copies, "head": 3}
    for phase in ("prefill", "decode"):  # nothing is lost, and nothing counted twice
        spans = sum(s.end - s.start for s, _ in seen.spans if s.phase == phase)
        assert sum(ns for (p, _), ns in profile.ns.items() if p == phase) == pytest.approx(spans, abs=2e4 * 8)
    assert all(ns >= 0 for ns in profile.ns.values())


def test_profile_report():
    profile = PhaseProfile()
    for phase, name, calls, ns in (
        *(("prefill", "qkv", 2, 3_000_000), ("prefill", "python", 1, 1_000_000)),
        *(("decode", "qkv", 20, 6_000_000), ("decode", "sample", 9, 2_000_000)),
    ):
        profile._add(phase, name, calls, ns)
    assert profile.report().splitlines() == [
        "profile:",
        "                        prefill calls         ms   share   decode calls         ms   share",
        "  qkv                               2       3.00   75.0%             20       6.00   75.0%",
        "  sample                            0       0.00    0.0%              9       2.00   25.0%",
        "  python                            1       1.00   25.0%              0       0.00    0.0%",
        "  total                             3       4.00  100.0%             29       8.00  100.0%",
    ]


# ---- traces ------------------------------------------------------------------------------------------------


def check_trace(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Holds a trace to the rules of Google's "Trace Event Format"; gives its complete events."""
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    stacks: dict[tuple[int, int], list[float]] = defaultdict(list)
    complete, named = [], set()
    for e in content["traceEvents"]:
        assert isinstance(e["name"], str)
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        assert isinstance(e["args"], dict)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name")
            assert isinstance(e["args"]["name"], str)
            named.add((e["name"], e["tid"]))
            continue
        assert e["ts"] >= 0
        match e["ph"]:
            case "X":
                assert e["dur"] >= 0
                complete.append(e)
                stack, end = stacks[e["pid"], e["tid"]], e["ts"] + e["dur"]
                while stack and stack[-1] <= e["ts"] + 1e-6:
                    stack.pop()
                assert not stack or end <= stack[-1] + 1e-6, f"{e['name']} is not inside of what it began in"
                stack.append(end)
                assert ("thread_name", e["tid"]) in named
            case "C":
                assert e["args"]
                assert all(isinstance(v, int | float) for v in e["args"].values())
            case "i":
                assert e["s"] in ("g", "p", "t")
            case other:
                pytest.fail(f"an event of phase {other}")
    return complete


@pytest.mark.parametrize("name", ["reference", "simd", "parallel"])
def test_trace(name, path, tmp_path):
    file = tmp_path / "trace.json"
    generate(path, ChromeTrace(file), backend=name, n=3)
    content = json.loads(file.read_text())
    complete = check_trace(content)
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for e in complete:
        by_kind[e["cat"]].append(e)
    assert [e["name"] for e in by_kind["forward"]] == ["prefill 5", "decode 1", "decode 1"]
    assert len(by_kind["sample"]) == 3
    assert [e["name"] for e in by_kind["layer"]] == ["layer 0", "layer 1"] * 3
    for inner, outer in (("layer", "forward"), ("op", "forward")):
        for e in by_kind[inner]:
            assert any(
                o["ts"] - 1e-6 <= e["ts"] and e["ts"] + e["dur"] <= o["ts"] + o["dur"] + 1e-6
                for o in by_kind[outer]
            )
    counters = [(e["name"], e["args"]) for e in content["traceEvents"] if e["ph"] == "C"]
    assert [args["tokens"] for kind, args in counters if kind == "cache length"] == [5, 6, 7]
    assert all(rate > 0 for kind, args in counters if kind == "tokens/s" for rate in args.values())
    assert content["otherData"]["backend"] == name
    # Bytes: all matrices are read for each forward; of the embedding, tied, a token's row as well.
    with GGUFFile(path) as f:
        weights = sum(t.nbytes for t in f.tensors.values())
        row = f.tensors["token_embd.weight"].nbytes // 269
    decode = [e for e in by_kind["op"] if e["args"]["phase"] == "decode" and "bytes" in e["args"]]
    read = sum(e["args"]["bytes"] for e in decode if e["args"]["bucket"] != "attn.fused_compute")
    assert read == 2 * (weights + row)
    kv = [e["args"]["bytes"] for e in decode if e["args"]["bucket"] == "attn.fused_compute"]
    assert kv == [2 * 2 * 2 * 32 * n for n in (6, 7) for _ in range(LAYERS)]  # K and V, 2 heads of 32, f16


def test_trace_has_the_pool(path, tmp_path):
    """A forked region shows what each thread did, inside of the op that forked it."""
    file = tmp_path / "trace.json"
    with pyinfer.load(path, backend="parallel", threads=2, observers=[ChromeTrace(file)]) as model:
        model.logits(list(range(100)))
    content = json.loads(file.read_text())
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert {"model"} < set(names.values()) <= {"model", "pool 0", "pool 1"}
    complete = check_trace(content)
    ops = [e for e in complete if e["cat"] == "op"]
    regions = [e for e in complete if e["cat"] == "region"]
    assert regions
    for r in regions:
        assert any(
            o["name"] == r["name"] and o["ts"] - 1 <= r["ts"] and r["ts"] + r["dur"] <= o["ts"] + o["dur"] + 1
            for o in ops
        )


def test_trace_has_schedule_events(path, tmp_path):
    file = tmp_path / "trace.json"
    generate(path, ChromeTrace(file), backend="simd", schedule=Pool(3))
    (event, *_) = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "i"]
    assert event["args"]["requested"] == "Pool(3)"
    assert "1 thread" in event["args"]["reason"]


def test_the_pools_notes_have_an_end():
    ops = backend.create("parallel", 2)
    assert isinstance(ops, NativeBackend)
    assert len(ops.workers(3)) == 0
    x = ops.tensor(np.ones((64, 4096), np.float32))
    for _ in range(20):
        ops.silu(x)
    spans = ops.workers(0)  # no more than there was room for, and none from now on
    assert spans.shape == (3, 3)
    assert (spans[:, 0] < 2).all()
    assert (spans[:, 2] >= spans[:, 1]).all()
    ops.silu(x)
    assert len(ops.workers(0)) == 0


# ---- plans -------------------------------------------------------------------------------------------------


def test_plan(path):
    with GGUFFile(path) as file:
        lines = plan(file, backend.create("scalar"), prompt=3, n_ctx=8)
    assert lines == (Path(__file__).parent / "golden" / "plan.txt").read_text().splitlines()


@pytest.mark.parametrize("unfused", [(), ("fused_attention",), ("all",)])
@pytest.mark.parametrize("kv", ["positional", "append"])
@pytest.mark.parametrize("name", ["reference", "simd"])
def test_plan_is_what_runs(name, kv, unfused, path):
    """The same calls with the same shapes, by planning and by running."""
    seen = Seen()
    generate(path, seen, backend=name, n=2, kv=kv, unfused=unfused)
    ran = [(c.label, c.shapes, c.layer) for c in seen.calls]
    found, module = [], importlib.import_module("pyinfer.observe.plan")

    class Keep(module._Forwards):
        def call(self, call):
            if call.phase:
                found.append((call.label, call.shapes, call.layer))
            super().call(call)

    ops = backend.create(name)
    ops = backend.unfused(ops, *unfused) if unfused else ops
    with GGUFFile(path) as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_Forwards", Keep)
        plan(file, ops, prompt=len(PROMPT), kv=kv, n_ctx=16)
    assert found == ran


# ---- where runs part ---------------------------------------------------------------------------------------


def recorded(path: Path, prompt: list[int] = PROMPT, n: int = 3, **options: Any) -> dict[str, Any]:
    record = OpRecord()
    with pyinfer.load(path, observers=[record], **{"backend": "simd", **options}) as model:
        found = model.digest(prompt, n)
    return json.loads(json.dumps(found | {"record": record.as_dict()}))


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 2},
        {"kv": "append"},
        {"backend": "reference"},
        {"unfused": ["all"]},
        {"backend": "parallel", "threads": 2},
    ],
)
def test_runs_that_are_the_same(options, path):
    lines = compare(recorded(path), recorded(path, **options))
    assert lines == ["all ops gave the same bytes at the 8 positions of both"]


def reordered(x: np.ndarray) -> np.ndarray:
    """A sum of squares from the last value to the first: one other order, as a tuned kernel might have."""
    ss = np.float32(0)
    for v in x[::-1]:
        ss += v * v
    return ss


def test_the_reordered_addition_is_named(tmp_path, monkeypatch):
    """A wrong rms_norm in layer 1, from position 2 on."""
    path = write_tiny(tmp_path / "f32.gguf", "qwen3")  # no quantisation that might hide it
    good = recorded(path)
    right, calls = NativeBackend.rms_norm, Counter()

    def wrong(self, x, weight, eps):
        y = right(self, x, weight, eps)
        calls["all"] += 1
        if calls["all"] == 3:  # attn_norm 0, ffn_norm 0, attn_norm 1
            v = self.numpy(x)[2]
            r = np.float32(1) / np.sqrt(reordered(v) / np.float32(len(v)) + np.float32(eps))
            rows = self.numpy(y)
            rows[2] = v * r * self.numpy(weight)[0]
            return self.tensor(rows)
        return y

    monkeypatch.setattr(NativeBackend, "rms_norm", wrong)
    bad = recorded(path)
    lines = compare(good, bad)
    level = backend.create("simd").kernels()["rms_norm"]
    assert lines[0].startswith("the logits differ: ") or lines[0].startswith("the tokens part")
    assert "bytes part first at position 2, layer 1, op rms_norm attn_norm" in lines
    assert f"  kernels: rms_norm {level} (simd), and rms_norm {level} (simd)" in lines
    good.pop("record")
    assert compare(good, bad)[-1].endswith("record both runs with --record ops")


def test_digests_that_differ(path):
    good = recorded(path)
    other = recorded(path, prompt=[3, 5, 8])
    lines = compare(good, other)
    assert lines[0] == "the tokens part at position 2: 7 and 8"
    assert lines[-1] == "all ops gave the same bytes at the 2 positions of both"
    lines = compare({**good, "numerics": 0, "model_sha256": "ab"}, good)
    assert lines[0] == f"versions of the numerics differ: 0 and {pyinfer.NUMERICS}"
    assert lines[1].startswith("the models differ: ab and ")


def test_compare_dtypes(path):
    """Another dtype of the cache shows first in attention, of the second token: the first has weight 1."""
    lines = compare(recorded(path), recorded(path, kv_dtype="f32"))
    (line,) = [line for line in lines if line.startswith("bytes part first")]
    assert "op fused_attention" in line


@pytest.mark.parametrize("bad", [[], {}, {"numerics": 1}, "x", None])
def test_no_digest(bad, path):
    with pytest.raises(InputError, match="A is no digest"):
        compare(bad, recorded(path))
    with pytest.raises(InputError, match="B is no digest"):
        compare(recorded(path), bad)


@pytest.mark.parametrize(
    "broken", [None, {}, {"points": [], "positions": ["ab"], "backend": "x"}, {"points": 3}, 7]
)
def test_a_record_that_is_not_whole(broken, path):
    good = recorded(path)
    with pytest.raises(InputError, match="the record of B is not whole"):
        compare(good, {**good, "record": broken})


def test_every_coarse_op_is_named():
    assert set(backend.COARSE) == set(OPS) - Backend.__abstractmethods__
    assert set(RULES) | {"kv_write"} == set(OPS)

"""`pyinfer bench` on a small random model: what it counts, what it prints, what it refuses."""

import builtins
import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import synth
from tiny import write_tiny

from pyinfer import backend, cache
from pyinfer.bench import Bench, Plan, Work, python_seconds, tokens
from pyinfer.cli import main
from pyinfer.engine import Session
from pyinfer.errors import BackendError, InputError
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry

SHORT = ["-p", "8", "-n", "4", "-r", "2", "-t", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(synth.write(tmp_path_factory.mktemp("synth") / "m.gguf", "tiny", "Q8_0"))


def test_json(model, capsys):
    assert main(["bench", model, "-p", "8", "-n", "4", "-r", "3", "-t", "1,2", "-d", "0,20", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [(r["threads"], r["test"], r["depth"]) for r in found["results"]] == [
        (t, test, d) for t in (1, 2) for d in (0, 20) for test in ("pp8", "tg4")
    ]
    for r in found["results"]:
        assert len(r["samples"]) == 3
        assert min(r["samples"]) <= r["median"] <= max(r["samples"])
        assert r["spread"] >= 0
        assert (r["python"] is None) if r["test"] == "pp8" else (r["python"] > 0)
        assert r["of_read"] == pytest.approx(r["gb"] / found["limits"][str(r["threads"])]["read_gb"])
    decode = found["results"][1]
    config_macs = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256) + 769 * 256
    assert decode["gmac"] * 1e9 / decode["median"] == pytest.approx(config_macs + 2 * 2 * 4 * 64 * 2.5)
    assert "tg4 @ 20: " in err


def test_tables(model, capsys):
    assert main(["bench", model, model, *SHORT, "--no-limits"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2].split()[:7] == ["model", "type", "MB", "threads", "test", "tokens/s", "spread"]
    assert [line.split()[5] for line in out[3:]] == ["pp8", "tg4"] * 2
    assert main(["bench", model, *SHORT, "-p", "0", "--markdown"]) == 0
    out = capsys.readouterr().out.splitlines()
    (rule,) = (i for i, line in enumerate(out) if line.startswith("| --"))
    assert out[rule - 2] == ""
    assert {line.count("|") for line in out[rule - 1 :]} == {13}
    assert len(out) == rule + 2
    assert all(line.startswith("- ") for line in out[: rule - 2])


def test_work_counts_the_output_once_per_forward(model):
    with GGUFFile(model) as file:
        ops = backend.create("parallel", 1)
        config = registry.load(file, ops).config
        work = Work(file, config, "f16")
        matrices = [i for i in file.tensors.values() if len(i.shape) == 2]
        assert work.weight_bytes == sum(i.nbytes for i in file.tensors.values())  # tied
        assert (work.type, work.quantised) == ("Q8_0", True)
        n_bytes, macs = work.of(600, 0, True)  # two chunks
        inner, head = sum(prod(i.shape) for i in matrices[1:]), 769 * 256
        assert macs == 600 * inner + 2 * head + 2 * 2 * 4 * 64 * 600 * 601 // 2
        assert n_bytes == 2 * work.weight_bytes + cache.n_bytes(config, 1200, "f16")


def test_python_share_leaves_the_session_as_it_was(model):
    with GGUFFile(model) as file:
        decoder = registry.load(file, backend.create("parallel", 1))
        kv = cache.create("positional", decoder.ops, decoder.config, 32, "f16")
        session = Session(decoder, kv)
        with pytest.raises(InputError, match="decoded nothing"):
            python_seconds(session, 1)
        (before,) = session.run([1, 2, 3])
        list(session.run([4]))
        step = session.step
        assert 0 < python_seconds(session, 5) < 1
        assert (session.cache.length, session.step) == (4, step)
        (after,) = session.run([6])
        fresh = Session(decoder, cache.create("positional", decoder.ops, decoder.config, 32, "f16"))
        (want,) = fresh.run([1, 2, 3, 4, 6])
        assert after.tobytes() == want.tobytes()
        assert before.shape == want.shape


def test_the_same_tokens_for_any_length():
    assert tokens(4, 1000, 1) == tokens(9, 1000, 1)[:4]
    assert all(0 <= t < 5 for t in tokens(100, 5))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"prompt": 0, "generate": 0}, InputError, "both 0"),
        ({"prompt": -1}, InputError, "prompt=-1"),
        ({"depths": []}, InputError, "depths: give at least one"),
        ({"depths": [0, 1.5]}, InputError, "depths=1.5"),
        ({"repeats": 0}, InputError, "repeats=0"),
        ({"threads": [1, 999]}, BackendError, "threads=999"),
        ({"kv_dtype": "f8"}, InputError, "kv_dtype='f8'"),
    ],
)
def test_plans_that_are_refused(how, error, message):
    with pytest.raises(error, match=message):
        Plan(**how)


def test_a_dtype_that_the_model_cannot_have(tmp_path):
    path = write_tiny(tmp_path / "odd.gguf", "llama", head_dim=40, n_layers=1)
    with pytest.raises(InputError, match="this model's heads have 40"):
        Bench(measure_limits=False).check(path, Plan(4, 2, kv_dtype="q8_0"))


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (
            "-d 600",
            1,
            "m.gguf was trained for 512 tokens, and the longest test has 608; give a smaller depth",
        ),
        ("-p 0 -n 0", 1, "nothing is left to measure"),
        ("-t 1,999", 1, "threads=999: give a whole number from 1 to 256"),
        ("--plot x.doc", 1, "--plot x.doc: the name must end in one of .png, .svg, .pdf"),
        ("--plot no/where.png", 1, "there is no folder no"),
        ("-t 0", 2, "argument -t: '0' is not a whole number at least 1"),
        ("-d 1,", 2, "argument -d: '' is not a whole number at least 0"),
        ("--json --markdown", 2, "not allowed with"),
    ],
)
def test_errors(model, capsys, args, code, message):
    try:
        got = main(["bench", model, *SHORT, *args.split()])
    except SystemExit as leave:
        got = leave.code
    out, err = capsys.readouterr()
    assert (got, out) == (code, "")
    assert message in err
    assert "loading" not in err  # before anything is measured


def test_all_models_are_looked_at_first(model, capsys):
    assert main(["bench", "-r", "1", model, "no.gguf"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no.gguf" in err


def test_a_missing_matplotlib(model, capsys, monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    assert main(["bench", model, "--plot", "x.png"]) == 1
    assert capsys.readouterr().err == (
        "pyinfer: error: --plot needs matplotlib: pip install 'pyinfer[plot]'\n"
    )


class Axes:
    """Records what is drawn."""

    def __init__(self, drawn):
        self.drawn = drawn

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.drawn.append((name, args, kwargs))


@pytest.mark.parametrize(("depths", "kind", "n"), [([0], "bar", 2), ([0, 8], "plot", 2)])
def test_the_picture(model, depths, kind, n):
    from pyinfer.cli.bench import draw

    results = list(Bench(measure_limits=False).run(Path(model), Plan(8, 4, depths, [1], 2)))
    drawn, saved = [], []
    figure = SimpleNamespace(tight_layout=lambda: None, savefig=lambda file, dpi: saved.append(file))
    axes = Axes(drawn)
    pyplot = SimpleNamespace(
        subplots=lambda rows, cols, **how: (figure, [[axes] * cols]), close=lambda figure: None
    )
    draw(pyplot, results, "x.png")
    assert saved == ["x.png"]
    assert sum(name == kind for name, *_ in drawn) == n  # prefill and decoding

"""One model, one sequence, every way to run it: the logits of every position are the same bytes.

The NumPy reference runs each model once, in one piece. A setting may differ from it in backend,
instruction-set level, threads, cache, chunks of the prompt and fusion; its bytes may not. At the end the same
check is shown backends that are right to six digits and wrong in the order law: it has to catch each of them.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from tiny import write_tiny

import pyinfer
from pyinfer import backend, cache
from pyinfer.backend import native
from pyinfer.backend.base import COARSE, Backend
from pyinfer.backend.native import NativeBackend
from pyinfer.backend.reference import exp, fold, fold_sum
from pyinfer.engine import Session
from pyinfer.errors import BackendError
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry
from pyinfer.model.config import SUPPORTED_TYPES

LEVELS = [level for level, runs in native.levels().items() if runs]
PROMPT, STEPS = 23, 4  # tokens run at once, and one by one behind them


# ---- models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A tiny model. Together: 1 to 6 query heads to a KV head; head_dims below, between and above vectors."""

    arch: str
    type: str
    kv_dtype: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    d_ff: int
    n_vocab: int
    n_layers: int = 2
    n_ctx: int = 64
    tied: bool = True
    rope_freqs: bool = False
    types: tuple[tuple[str, str], ...] = ()  # of some tensors, by the last part of their names

    @property
    def name(self) -> str:
        types = "+".join(dict.fromkeys([self.type, *(kind for _, kind in self.types)]))
        return f"{self.arch}-{types}-kv_{self.kv_dtype}"

    def write(self, path: Path) -> Path:
        other = ("arch", "type", "types", "kv_dtype")
        shape = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in other}
        return write_tiny(path, self.arch, type=self.type, types=dict(self.types), tokenizer=False, **shape)


CASES = [
    Case("llama", "F32", "f32", 3, 1, 18, d_model=50, d_ff=70, n_vocab=61),
    Case("llama", "F16", "f16", 4, 2, 40, d_model=96, d_ff=90, n_vocab=131, rope_freqs=True),
    Case("llama", "Q8_0", "f32", 5, 1, 32, d_model=96, d_ff=160, n_vocab=101, tied=False),
    Case("llama", "Q4_1", "f16", 6, 6, 16, d_model=64, d_ff=224, n_vocab=67),
    Case("qwen3", "F32", "f16", 6, 1, 10, d_model=33, d_ff=45, n_vocab=37, tied=False),
    Case("qwen3", "F16", "f32", 2, 1, 72, d_model=77, d_ff=55, n_vocab=89),
    Case("qwen3", "Q8_0", "f16", 4, 2, 32, d_model=96, d_ff=160, n_vocab=269),
    Case("qwen3", "Q4_1", "f32", 4, 1, 24, d_model=160, d_ff=96, n_vocab=103, tied=False),
]
LONG = Case("qwen3", "Q4_1", "f16", 2, 1, 16, d_model=64, d_ff=96, n_vocab=61, n_layers=1, n_ctx=128)
# Over 256 positions, where rope makes its second table; with a second block of tokens in ffn_down's matmul.
LONGER = Case("llama", "Q8_0", "f16", 2, 1, 16, d_model=64, d_ff=1024, n_vocab=67, n_ctx=512)
LENGTHS = {LONG: 100, LONGER: 270}
# The other weight types, which touch no operation but matmul and gather_rows: fewer settings.
SMALL = {
    "n_heads": 3,
    "n_kv_heads": 1,
    "head_dim": 32,
    "d_model": 96,
    "d_ff": 160,
    "n_vocab": 101,
    "n_layers": 1,
}
WIDE = {
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "d_model": 256,
    "d_ff": 512,
    "n_vocab": 83,
    "n_layers": 1,
}
TYPE_CASES = [
    *(Case("llama", type, "f16", **SMALL) for type in ("Q4_0", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")),
    Case("qwen3", "BF16", "f16", 3, 1, 18, d_model=50, d_ff=70, n_vocab=61, n_layers=1),
    *(Case("qwen3", type, "f16", **WIDE) for type in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")),
    Case(
        "llama",
        "Q4_K",
        "f32",
        **WIDE,
        types=(("attn_v", "Q6_K"), ("ffn_down", "Q6_K"), ("token_embd", "Q6_K")),
    ),
    Case(
        "llama",
        "Q3_K",
        "f32",
        **WIDE,
        types=(("attn_q", "Q2_K"), ("ffn_up", "Q5_K"), ("token_embd", "IQ4_XS")),
    ),
]


def tokens_of(case: Case, n: int = PROMPT + STEPS) -> list[int]:
    return [int(t) for t in np.random.RandomState(7).randint(0, case.n_vocab, n)]


def session(ops: Backend, path: Path, kv: str, kv_dtype: str, chunk: int | None = None) -> Session:
    decoder = registry.load(GGUFFile(path), ops)
    return Session(
        decoder, cache.create(kv, ops, decoder.config, decoder.config.n_ctx_train, kv_dtype), chunk=chunk
    )


def rows(seq: Session, *parts: Sequence[int]) -> np.ndarray:
    """Logits of every position of `parts`, run one after the other."""
    return np.concatenate([logits for part in parts for logits in seq.run(part, all_logits=True)])


def prompt_then_steps(tokens: Sequence[int]) -> list[Sequence[int]]:
    return [tokens[:PROMPT], *([t] for t in tokens[PROMPT:])]


Reference = Callable[[Case], tuple[Path, list[int], np.ndarray]]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The file, the tokens and the reference's logits of a case, made once."""
    made: dict[Case, tuple[Path, list[int], np.ndarray]] = {}

    def get(case: Case) -> tuple[Path, list[int], np.ndarray]:
        if case not in made:
            path = case.write(tmp_path_factory.mktemp("parity") / "tiny.gguf")
            tokens = tokens_of(case, LENGTHS.get(case, PROMPT + STEPS))
            ops = backend.create("reference")
            if (
                case is LONGER
            ):  # half a minute for the reference: its stand-in is held to it by the other cases
                ops = backend.unfused(backend.create("scalar"), *COARSE)
            made[case] = path, tokens, rows(session(ops, path, "append", case.kv_dtype), tokens)
        return made[case]

    return get


# ---- the check ---------------------------------------------------------------------------------------------


def first_difference(got: np.ndarray, want: np.ndarray) -> str | None:
    """Where two arrays of float32 logits (positions, n_vocab) first differ in a bit, or None."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"shape {got.shape} of {got.dtype}, not {want.shape} of {want.dtype}"
    a, b = (np.ascontiguousarray(x).view(np.uint32) for x in (got, want))
    differ = np.argwhere(a != b)
    if not len(differ):
        return None
    at = tuple(differ[0])
    return (
        f"position {at[0]}, token {at[1]}: {a[at]:#010x} ({got[at]!r}), not {b[at]:#010x} ({want[at]!r}); "
        f"{len(differ)} of {a.size} logits differ"
    )


def test_first_difference_sees_one_bit():
    want = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert first_difference(want.copy(), want) is None
    got = want.copy()
    got[1, 2] = np.nextafter(got[1, 2], np.float32(9))
    said = first_difference(got, want)
    assert said is not None
    assert said.startswith("position 1, token 2: 0x40c00001 (")
    assert "not 0x40c00000 (" in said
    assert said.endswith("1 of 12 logits differ")
    got = want.copy()
    got[0, 0] = -0.0  # equal as a number
    assert "0x80000000" in (first_difference(got, want) or "")
    assert first_difference(want[:2], want)
    assert first_difference(want.astype(np.float64), want)


@pytest.mark.parametrize("case", CASES + TYPE_CASES, ids=lambda c: c.name)
def test_reference_says_something(case, reference):
    """Logits that were all zero, or the same at every position, would be equal however they are run."""
    _, tokens, want = reference(case)
    assert want.shape == (len(tokens), case.n_vocab)
    assert np.isfinite(want).all()
    assert len(np.unique(want)) > 0.9 * want.size
    assert want.std() > 0.1


# ---- settings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One way to run a model; PYINFER_CPU is `level`."""

    backend: str = "simd"
    level: str | None = None
    threads: int | None = None
    kv: str = "positional"
    chunk: int | None = None  # None: the whole prompt
    unfused: tuple[str, ...] = ()

    def __str__(self) -> str:
        unfused = "all" if self.unfused == COARSE else "+".join(self.unfused)
        more = {"level": self.level, "threads": self.threads, "chunk": self.chunk, "unfused": unfused}
        return "-".join(
            [self.backend, self.kv, *(f"{name}_{value}" for name, value in more.items() if value)]
        )

    def create(self, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.delenv("PYINFER_CPU", raising=False)
        if self.level:
            monkeypatch.setenv("PYINFER_CPU", self.level)
        ops = backend.create(self.backend, self.threads)
        assert ops.name == self.backend
        assert ops.threads == (self.threads or 1)
        assert ops.level == ("ref" if self.backend == "scalar" else self.level or LEVELS[-1])
        return backend.unfused(ops, *self.unfused) if self.unfused else ops


ATTENTION = ("fused_attention",)
SETTINGS = [
    # one axis at a time
    Setting("scalar"),
    *(Setting(level=level) for level in LEVELS),
    *(Setting("parallel", threads=n) for n in (1, 2, 3)),
    *(Setting(kv=kv) for kv in ("append", "paged", "sliding:1000")),
    *(Setting(chunk=n) for n in (1, 7, 16, 17)),
    *(Setting(unfused=(op,)) for op in COARSE),
    # several
    Setting("scalar", kv="append", chunk=7),
    Setting("scalar", unfused=COARSE),
    *(Setting(level=level, kv="append", chunk=16) for level in LEVELS),
    *(Setting(level=level, unfused=COARSE) for level in LEVELS),
    *(Setting("parallel", level=level, threads=2, chunk=17) for level in LEVELS),
    Setting("parallel", threads=3, kv="paged", chunk=7),
    Setting(kv="paged", unfused=COARSE),
    Setting("parallel", threads=3, kv="append", chunk=7),
    Setting("parallel", threads=2, kv="append", chunk=1, unfused=ATTENTION),
    Setting("parallel", threads=3, unfused=COARSE),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_setting(case, setting, reference, monkeypatch):
    path, tokens, want = reference(case)
    seq = session(setting.create(monkeypatch), path, setting.kv, case.kv_dtype, setting.chunk)
    got = rows(seq, *prompt_then_steps(tokens))
    assert (difference := first_difference(got, want)) is None, difference


TYPE_SETTINGS = [
    Setting("scalar"),
    *(Setting(level=level, chunk=7) for level in LEVELS),
    Setting("parallel", threads=3),
    Setting("parallel", threads=2, chunk=17, unfused=COARSE),
]


@pytest.mark.parametrize("setting", TYPE_SETTINGS, ids=str)
@pytest.mark.parametrize("case", TYPE_CASES, ids=lambda c: c.name)
def test_type(case, setting, reference, monkeypatch):
    test_setting(case, setting, reference, monkeypatch)


def test_all_types_are_there():
    assert {case.type for case in CASES + TYPE_CASES} == {kind.name for kind in SUPPORTED_TYPES}


@pytest.mark.parametrize(
    ("case", "kv"), [(CASES[0], "append"), (CASES[4], "positional")], ids=["append", "positional"]
)
def test_reference_in_pieces(case, kv, reference):
    path, tokens, want = reference(case)
    got = rows(session(backend.create("reference"), path, kv, case.kv_dtype, 7), *prompt_then_steps(tokens))
    assert (difference := first_difference(got, want)) is None, difference


LONG_SETTINGS = [
    Setting("scalar"),
    *(Setting(level=level) for level in LEVELS),
    *(Setting(level=level, kv="append") for level in LEVELS),
    *(Setting("parallel", threads=n) for n in (2, 3)),
    Setting("parallel", threads=2, chunk=17),
    Setting("parallel", threads=3, kv="append", chunk=64),
    Setting("parallel", threads=2, kv="paged", chunk=17),
]


@pytest.mark.parametrize("in_steps", [False, True], ids=["whole", "steps"])
@pytest.mark.parametrize("setting", LONG_SETTINGS, ids=str)
@pytest.mark.parametrize("case", LENGTHS, ids=["100", "270"])
def test_long_sequence(case, setting, in_steps, reference, monkeypatch):
    """Tokens around 64 keys, where attention starts to fork, and the last, over 256 positions, go singly."""
    path, tokens, want = reference(case)
    seq = session(setting.create(monkeypatch), path, setting.kv, case.kv_dtype, setting.chunk)
    parts = [tokens[:61], *([t] for t in tokens[61:67]), tokens[67:-20], *([t] for t in tokens[-20:])]
    assert [t for part in parts for t in part] == tokens
    got = rows(seq, *(parts if in_steps else [tokens]))
    assert (difference := first_difference(got, want)) is None, difference


@pytest.mark.parametrize("kv", cache.KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
class TestSessions:
    def test_only_the_last_logits(self, case, kv, reference):
        path, tokens, want = reference(case)
        (got,) = session(backend.create("simd"), path, kv, case.kv_dtype, 10).run(tokens)
        assert (difference := first_difference(got, want[-1:])) is None, difference

    @pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 22])
    def test_prefix_reused(self, case, kv, kept, reference):
        path, tokens, want = reference(case)
        seq = session(backend.create("simd"), path, kv, case.kv_dtype)
        other = [(t + 1) % case.n_vocab for t in tokens[kept:]]
        rows(seq, tokens[:kept], other[:-2], *([t] for t in other[-2:]))
        for parts in ([tokens[kept:]], [[t] for t in tokens[kept:]]):  # at once, and singly
            seq.cache.truncate(kept)
            assert seq.cache.length == kept
            got = rows(seq, *parts)
            assert (difference := first_difference(got, want[kept:])) is None, difference

    def test_after_an_interrupt(self, case, kv, reference):
        """In the second layer of the second chunk: the first chunk stays."""
        path, tokens, want = reference(case)
        ops = backend.create("simd")
        seq = session(ops, path, kv, case.kv_dtype, 8)
        calls, swiglu = iter(range(1000)), ops.swiglu

        def interrupted(gate, up):
            if next(calls) == 3:
                raise KeyboardInterrupt
            return swiglu(gate, up)

        ops.swiglu = interrupted
        with pytest.raises(KeyboardInterrupt):
            rows(seq, tokens)
        assert seq.cache.length == 8
        got = rows(seq, tokens[8:])
        assert (difference := first_difference(got, want[8:])) is None, difference


# ---- levels ------------------------------------------------------------------------------------------------


def test_levels_that_ran(capsys):
    with capsys.disabled():
        print(f"\nlevels run: {', '.join(LEVELS)} of {', '.join(native.levels())}")
    assert LEVELS[0] == "ref"
    assert {s.level for s in SETTINGS} >= set(LEVELS)
    if platform.machine() in ("x86_64", "AMD64") and sys.platform == "linux":
        flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
        assert ("avx2" in LEVELS) == ({"avx2", "fma", "f16c"} <= flags)
        avx512 = {f"avx512{x}" for x in ("f", "bw", "dq", "vl")}
        assert ("avx512" in LEVELS) == (avx512 | {"avx2", "fma", "f16c"} <= flags)
        # With kernels/emulate_vnni.h this level runs without the CPU's help.
        assert "avx512vnni" in LEVELS or not avx512 | {"avx512_vnni"} <= flags


@pytest.mark.parametrize("name", ["simd", "parallel"])
@pytest.mark.parametrize("level", LEVELS)
def test_forced_level_runs(name, level, tmp_path, monkeypatch):
    monkeypatch.setenv("PYINFER_CPU", level)
    with pyinfer.load(write_tiny(tmp_path / "tiny.gguf", "llama", type="Q8_0"), backend=name) as model:
        kernels = model.describe()["kernels"]
        assert model._ops.level == level
    assert kernels["matmul_q8_0"] == kernels["matmul_q4_1"] == level  # every level has its own of these two
    below = LEVELS[: LEVELS.index(level) + 1]
    assert set(kernels.values()) <= set(below)
    assert kernels.keys() >= {"quantize", "scores_f16", "context_f32", "softmax", "rms_norm", "exp"}
    if level != "ref":
        assert "ref" not in kernels.values()


def test_scalar_is_ref_whatever_is_forced(monkeypatch):
    monkeypatch.setenv("PYINFER_CPU", LEVELS[-1])
    assert set(backend.create("scalar").kernels().values()) == {"ref"}


def test_best_level_unless_forced(monkeypatch):
    monkeypatch.delenv("PYINFER_CPU", raising=False)
    assert backend.create("simd").level == backend.create("parallel").level == LEVELS[-1]
    monkeypatch.setenv("PYINFER_CPU", "")
    assert backend.create("simd").level == LEVELS[-1]


@pytest.mark.parametrize("name", ["simd", "parallel"])
def test_unknown_and_unavailable_levels(name, monkeypatch):
    monkeypatch.setenv("PYINFER_CPU", "sse9")
    with pytest.raises(BackendError, match=r"PYINFER_CPU='sse9' is no level of this build; it has ref, "):
        backend.create(name)
    for level in native.levels().keys() - set(LEVELS):
        monkeypatch.setenv("PYINFER_CPU", level)
        with pytest.raises(BackendError, match=f"PYINFER_CPU='{level}' cannot run on this CPU; it runs ref"):
            backend.create(name)
    # As on a CPU that lacks the best level.
    monkeypatch.setattr(native, "levels", lambda: {"ref": True, LEVELS[-1]: False})
    monkeypatch.setenv("PYINFER_CPU", LEVELS[-1])
    with pytest.raises(BackendError, match=f"PYINFER_CPU='{LEVELS[-1]}' cannot run"):
        backend.create(name)


def test_unknown_level_from_a_shell(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf", "llama", type="Q8_0")
    code = "import sys, pyinfer\ntry: pyinfer.load(sys.argv[1])\nexcept pyinfer.BackendError as e: print(e)"
    env = {**os.environ, "PYINFER_CPU": "sse9", "PYTHONPATH": str(Path(pyinfer.__file__).parents[1])}
    said = subprocess.check_output([sys.executable, "-c", code, str(path)], env=env, text=True)
    assert said.startswith("PYINFER_CPU='sse9' is no level")


@pytest.mark.parametrize(
    ("name", "threads", "message"),
    [
        ("gpu", None, "there is no backend 'gpu'; there are auto, reference, scalar, simd, parallel"),
        ("parallel", 0, "threads=0: give a whole number from 1 to 256"),
        ("parallel", 257, "threads=257"),
        ("parallel", "2", "threads='2': give a whole number"),
        ("simd", 2, "backend simd runs on one thread"),
    ],
)
def test_no_such_backend(name, threads, message):
    with pytest.raises(BackendError, match=message):
        backend.create(name, threads)


# ---- positive controls -------------------------------------------------------------------------------------


class Plain(NativeBackend):
    """Attention in NumPy by the order law: equal. Each subclass breaks the law in one line."""

    def fused_attention(self, q, view, n_heads, scale):
        keys, values = (self.numpy(x).reshape(-1, view.n_kv_heads, view.head_dim) for x in self.kv_rows(view))
        queries = self.numpy(q).reshape(-1, n_heads, view.head_dim)
        out = np.empty_like(queries)
        for t, h in np.ndindex(queries.shape[:2]):
            n, kv = view.length - len(queries) + t + 1, h // (n_heads // view.n_kv_heads)
            out[t, h] = self.attend(self.dot(queries[t, h], keys[:n, kv]) * np.float32(scale), values[:n, kv])
        return self.tensor(out.reshape(q.shape))

    def dot(self, q, keys):
        return fold(keys, q)

    def attend(self, scores, values):
        e = exp(scores - scores.max())
        return fold(e / fold_sum(e), values.T)


class FourLanes(Plain):
    lanes = 4

    def dot(self, q, keys):
        return fold_sum(
            np.stack([fold(keys[:, i :: self.lanes], q[i :: self.lanes]) for i in range(self.lanes)], -1)
        )


class EightLanes(FourLanes):
    lanes = 8


class Backwards(Plain):
    def dot(self, q, keys):
        return fold(keys[:, ::-1], q[::-1])


class NumpyExp(Plain):
    def attend(self, scores, values):
        e = np.exp(scores - scores.max())
        return fold(e / fold_sum(e), values.T)


class DivideLast(Plain):
    def attend(self, scores, values):
        e = exp(scores - scores.max())
        return fold(e, values.T) / fold_sum(e)


@pytest.mark.parametrize("control", [FourLanes, EightLanes, Backwards, NumpyExp, DivideLast])
def test_check_catches(control, reference):
    case = CASES[0]
    path, tokens, want = reference(case)
    got = rows(
        session(control("scalar", "ref", 1), path, "positional", case.kv_dtype), *prompt_then_steps(tokens)
    )
    assert np.abs(got - want).max() < 1e-4, "the control is wrong by more than an order of additions"
    assert re.match(r"position \d+, token \d+: 0x", first_difference(got, want) or "")


def test_check_passes_the_plain_control(reference):
    case = CASES[0]
    path, tokens, want = reference(case)
    got = rows(
        session(Plain("scalar", "ref", 1), path, "positional", case.kv_dtype), *prompt_then_steps(tokens)
    )
    assert first_difference(got, want) is None

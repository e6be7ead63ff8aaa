"""The Metal backend: each kernel and whole models give the bytes of plain C. Runs where the extension is
built: on a Mac, and against the stand-in of metal_host/.

Every op runs on the GPU here, however small, and a test of ordinary values fails if it ran in C after all.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import digests
from kernels.harness import BLOCK, check, raw_weight, values
from tiny import write_tiny

import pyinfer
from pyinfer import _metal, backend, cache
from pyinfer.backend import metal
from pyinfer.backend.base import Backend
from pyinfer.backend.kv import KVBufferView
from pyinfer.backend.native import CTensor, NativeBackend
from pyinfer.engine import Session
from pyinfer.errors import BackendError
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry

GOLDEN = json.loads(digests.FILE.read_text())
KINDS = ("random", "mixed", "cancel", "signed_zeros", "subnormal", "zeros", "ties", "tiny", "large")
ORDINARY = ("random", "signed_zeros", "zeros", "ties")  # no list is to be made again in C


def spread(kind: str) -> str:
    """The kind for a softmax: these lie so far apart that results are subnormal."""
    return "" if kind == "ties" else kind


SOURCE = _metal.ffi.string(_metal.lib.pi_gpu_source()).decode()


@pytest.fixture(autouse=True)
def all_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal, "SMALL_WORK", 0)


@pytest.fixture(params=["kept", "flushed"])
def subnormals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the stand-in does with subnormals; a GPU does as it does."""
    monkeypatch.setenv("METAL_HOST_FTZ", str(int(request.param == "flushed")))
    return str(request.param)


class Both:
    """A call on both backends, and the comparison."""

    def __init__(self) -> None:
        self.gpu = metal.MetalBackend(1, small_work=0)
        self.plain = NativeBackend("scalar", "ref", 1)

    def check(self, kernel: str, kind: str, shape: Any, call: Any) -> None:
        of, ran, repeated = self.gpu.gpu, self.gpu.gpu.encoded[kernel], self.gpu.gpu.repeated
        with np.errstate(all="ignore"):
            got, want = (ops.numpy(call(ops)) for ops in (self.gpu, self.plain))
        assert of.encoded[kernel] > ran, f"{kernel} did not run"
        assert kind not in ORDINARY or of.repeated == repeated, f"{kernel}: {kind} values were computed in C"
        check(kernel, "metal", 0, (kind, shape), got, want)


@pytest.fixture(scope="module")
def both() -> Both:
    return Both()


# ---- kernels ---------------------------------------------------------------------------------------------


def test_names(both: Both) -> None:
    assert backend.backends()["metal"] == "available"
    assert set(metal.CHECKS) == set(metal.KERNELS) - {"guard", "quantize"}  # which others call
    assert both.gpu.kernels()["rms_norm"] == "metal"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["add", "hadamard", "silu", "swiglu"])
def test_kernel_elements(op: str, kind: str, both: Both, subnormals: str) -> None:
    for n in (1, 31, 256, 513):
        inputs = [values(kind, (1, n), seed) for seed in range(1 if op == "silu" else 2)]
        both.check(op, kind, n, lambda ops, inputs=inputs: getattr(ops, op)(*map(ops.tensor, inputs)))


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_rows(kind: str, both: Both, subnormals: str) -> None:
    for rows, n in ((1, 1), (3, 31), (2, 257), (1, 1024), (2, 1030)):
        x, w = values(kind, (rows, n), 3), values("random", (1, n), 4)
        both.check(
            "rms_norm", kind, x.shape, lambda ops, x=x, w=w: ops.rms_norm(ops.tensor(x), ops.tensor(w), 1e-5)
        )
        both.check("softmax", spread(kind), x.shape, lambda ops, x=x: ops.softmax_rows(ops.tensor(x)))
    far = np.linspace(-110, 0, 300, dtype=np.float32).reshape(1, -1)  # with results that are subnormal
    both.check("softmax", "far", far.shape, lambda ops: ops.softmax_rows(ops.tensor(far)))


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_rope(kind: str, both: Both, subnormals: str) -> None:
    for dim, rot, neox, tokens in (
        (2, 2, True, 1),
        (40, 18, False, 3),
        (64, 64, True, 2),
        (600, 520, True, 1),
    ):
        x = values(kind, (tokens, 2 * dim), 5)

        def call(ops: Any, x: Any = x, dim: int = dim, rot: int = rot, neox: bool = neox) -> CTensor:
            tables = ops.rope_tables(1000, 5, rot, 1e4, 1.0, None)
            return ops.apply_rope(ops.tensor(x), *tables, 1, dim, neox)

        both.check("rope", kind, (tokens, dim, rot), call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stem", metal.STEMS.values())
def test_kernel_weights(stem: str, kind: str, both: Both) -> None:
    """Rows about 16 and 32, tokens about 8 and 32, blocks about the chunk of 32."""
    number = next(number for number, name in metal.STEMS.items() if name == stem)
    block, type_ = (35 if stem in metal.FLOATS else BLOCK[stem.upper()]), stem.upper()
    odd = {"subnormal": "subnormal", "large": "extreme"}.get(kind, "random")
    for rows, blocks, tokens in (
        (1, 1, 1),
        (33, 2, 2),
        (17, 3, 8),
        (65, 1, 33),
        (3, 33 if block < 256 else 5, 1),
    ):
        w = raw_weight(type_, odd, rows, block * blocks, 6)
        x, residual = values(kind, (tokens, block * blocks), 7), values("random", (tokens, rows), 8)
        kernel = f"matvec_{stem}" if tokens < 8 and stem not in metal.FLOATS else f"matmul_{stem}"
        gpu_weights = kind != "subnormal" or stem != "f32"  # such weights stay with C

        def call(ops: Any, w: Any = w, x: Any = x, add: Any = residual, rows: int = rows) -> CTensor:
            weight = ops.weight(number, rows, x.shape[1], w)
            return ops.matmul_add(ops.tensor(x), weight, ops.tensor(add))

        if gpu_weights:
            both.check(kernel, "" if odd != "random" else kind, (rows, blocks, tokens), call)
            both.check(
                f"gather_{stem}",
                kind,
                (rows, blocks),
                lambda ops, w=w, x=x, n=rows: ops.gather_rows(
                    ops.weight(number, n, x.shape[1], w), [n - 1, 0]
                ),
            )


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_attention(kind: str, dtype: str, both: Both, subnormals: str) -> None:
    """Over several blocks; one query and several; 1 to 9 heads to a KV head; windows; over 256 keys."""
    for dim, heads, window, block, lengths in (
        (20, 1, 0, 32, (1, 1, 17)),
        (32, 9, 21, 16, (33, 1, 2)),
        (64, 3, 0, 256, (270, 1)),
    ):
        parts = [[values(kind, (n, 2 * dim), 9 + i) for i in (0, 1)] for n in lengths]
        queries = [values("random", (n, 2 * heads * dim), 11) for n in lengths]

        @partial(partial, dim=dim, window=window, block=block, heads=heads, parts=parts, queries=queries)
        def call(
            ops: Any, dim: int, window: int, block: int, heads: int, parts: Any, queries: Any
        ) -> CTensor:
            blocks = -(-sum(len(q) for q in queries) // block)
            memory = ops.zeros((blocks, 2, 2 * block * dim), dtype)
            k, v = ([ops.part(memory, (b, i), (2 * block * dim,)) for b in range(blocks)] for i in (0, 1))
            of = KVBufferView(k, v, "tiles", dtype, 2, dim, 0, block * blocks, block, window=window)
            outs = []
            for (new_k, new_v), q in zip(parts, queries, strict=True):
                ops.kv_write(of, ops.tensor(new_k), ops.tensor(new_v))
                outs.append(ops.fused_attention(ops.tensor(q), of, 2 * heads, dim**-0.5))
            seen = [ops.numpy(out).reshape(-1) for out in outs]
            return ops.tensor(np.concatenate([*seen, ops.numpy(memory).reshape(-1).astype(np.float32)]))

        both.check(
            f"attention_{dtype}", "" if dtype == "f32" else spread(kind), (dim, heads, window, lengths), call
        )


@pytest.mark.parametrize("bytes_at_once", [metal.SCORE_BYTES, 4096])
def test_kernel_attention_of_several(bytes_at_once: int, both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of their own lengths and queries; their scores in one piece of memory, or in several."""
    monkeypatch.setattr(metal, "SCORE_BYTES", bytes_at_once)
    sequences, dim, heads = ((1, 1), (40, 30), (70, 1)), 32, 3
    q = values("random", (sum(n for _, n in sequences), 2 * heads * dim), 12)

    def call(ops: Any) -> CTensor:
        views = []
        for length, _ in sequences:
            memory = ops.zeros((2, 2 * 80 * dim), "f16")
            k, v = ([ops.part(memory, (i,), (2 * 80 * dim,))] for i in (0, 1))
            views.append(KVBufferView(k, v, "tiles", "f16", 2, dim, 0, 80, 80))
            ops.kv_write(
                views[-1], *(ops.tensor(values("random", (length, 2 * dim), length + i)) for i in (0, 1))
            )
        return ops.batched_attention(ops.tensor(q), views, [n for _, n in sequences], 2 * heads, dim**-0.5)

    both.check("attention_f16", "random", sequences, call)


# ---- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    "name", ["qwen3-Q8_0", "llama-F32", "llama-F16", "llama-Q4_1", "llama-Q4_K_M", "qwen3-Q4_0"]
)
def test_tiny_model(name: str, kv_dtype: str, tmp_path: Path, subnormals: str) -> None:
    gpu = metal.shared_gpu()
    runs, repeated = gpu.runs, gpu.repeated
    got = digests.tiny(name, tmp_path, kv_dtype, backend="metal", threads=1)
    assert got == GOLDEN["models"][f"{name}-kv_{kv_dtype}"]
    assert gpu.runs - runs == 5, "one list to a forward"
    assert gpu.repeated == repeated


def test_smollm2() -> None:
    """One prompt and one more token. The list is as long as a real model's."""
    n = 2
    assert digests.smollm2(n, backend="metal", threads=1) == GOLDEN["smollm2"][str(n)]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", "qwen3", type="Q8_0", tokenizer=False)


def logits_of(ops: Backend, path: Path, kind: str, dtype: str) -> np.ndarray:
    decoder = registry.load(GGUFFile(path), ops)
    seq = Session(decoder, cache.create(kind, ops, decoder.config, 128, dtype), chunk=None)
    tokens = [int(t) for t in np.random.RandomState(7).randint(0, 200, 40)]
    parts = [tokens[:30], *([t] for t in tokens[30:34]), tokens[34:]]
    return np.concatenate([logits for part in parts for logits in seq.run(part)])


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("kind", ["positional", "paged", "sliding:20", "append"])
def test_caches(kind: str, dtype: str, both: Both, tiny_path: Path) -> None:
    """Also those that no kernel reads, which C then does in between."""
    if (kind, dtype) == ("append", "q8_0"):
        dtype = "f32"
    check(
        "logits",
        "metal",
        0,
        kind,
        *(logits_of(ops, tiny_path, kind, dtype) for ops in (both.gpu, both.plain)),
    )


# ---- the list --------------------------------------------------------------------------------------------


def chain(ops: Any, x: np.ndarray) -> np.ndarray:
    """Ops whose memory is given back on the way."""
    y, w = ops.tensor(x), ops.tensor(values("random", x.shape, 1))
    for _ in range(4):
        y = ops.rms_norm(ops.add(ops.swiglu(y, w), y), w, 1e-5)
    return np.asarray(ops.numpy(y))


def test_a_list_is_made_again_in_c_where_values_are_too_small(both: Both, subnormals: str) -> None:
    x = values("random", (1, 300), 2).copy()
    x[0, 7] = 2.0**-130
    gpu = both.gpu.gpu
    repeated, runs = gpu.repeated, gpu.runs
    check("chain", "metal", 0, x.shape, chain(both.gpu, x), chain(both.plain, x))
    assert (gpu.repeated - repeated, gpu.runs - runs) == (1, 1)


def test_memory_from_before_the_list_stays_until_it_has_run(both: Both) -> None:
    """Its first call reads it again, though the tensor is gone."""

    def call(ops: Any) -> np.ndarray:
        x, small = ops.tensor(values("random", (1, 300), 1)), ops.tensor(values("subnormal", (1, 300), 2))
        before = ops.add(x, x)
        ops.numpy(ops.add(x, x))  # runs the list
        y = ops.add(before, small)
        del before
        again = [ops.add(y, x) for _ in range(3)]
        return np.concatenate([ops.numpy(t) for t in (y, *again)])

    repeated = both.gpu.gpu.repeated
    check("add", "metal", 0, 300, call(both.gpu), call(both.plain))
    assert both.gpu.gpu.repeated == repeated + 1


def test_memory_is_given_back(both: Both, tmp_path: Path) -> None:
    gpu = metal.shared_gpu()
    gc.collect()
    arenas, weights = len(gpu.arenas), len(gpu.weights)
    with pyinfer.load(write_tiny(tmp_path / "m.gguf"), backend="metal", threads=1, progress=False) as model:
        model.digest([1, 2, 3], 1)
        assert len(gpu.weights) > weights
    del model
    gc.collect()
    assert (len(gpu.arenas), len(gpu.weights)) == (arenas, weights)
    assert not gpu.held
    assert not gpu.calls


def test_small_work_stays_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = metal.MetalBackend(1, small_work=1 << 10)
    runs = ops.gpu.runs
    small, large = (ops.tensor(values("random", (1, n), 1)) for n in (1 << 9, 1 << 10))
    ops.numpy(ops.add(small, small))
    assert ops.gpu.runs == runs
    y = ops.add(large, large)
    assert ops.gpu.open
    ops.add(small, small)  # behind something that is on the list
    assert ops.gpu.open
    ops.numpy(y)
    assert ops.gpu.runs == runs + 1


def test_threads_share_the_list(both: Both) -> None:
    inputs = [values("random", (1, 300), seed) for seed in range(4)]
    want = [chain(both.plain, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for got, right in zip(pool.map(lambda x: chain(both.gpu, x), inputs), want, strict=True):
                check("chain", "metal", 0, 300, got, right)


# ---- what must be caught ---------------------------------------------------------------------------------


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def make(old: str, new: str) -> metal.Gpu:
        assert old in SOURCE
        return metal.Gpu(SOURCE.replace(old, new))

    yield make
    gc.collect()


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        (  # lane-wise: two folds, then their sum
            "rms_norm",
            "for (uint i = 0; i < n; i++) ss = fma(chunk[i], chunk[i], ss);",
            "{ float odd = 0.0f; for (uint i = 0; i < n; i += 2u) ss = fma(chunk[i], chunk[i], ss);"
            " for (uint i = 1; i < n; i += 2u) odd = fma(chunk[i], chunk[i], odd); ss += odd; }",
        ),
        ("matvec_q4_0", "acc = fma(dots[from], steps[from], acc);", "acc = acc + dots[from] * steps[from];"),
        ("matmul_q4_1", "if (F::has_min) acc[t] =", "if (false) acc[t] ="),
        ("attention_f32", "score_step(rows[r * c.dim + d]", "score_step(rows[r * c.dim + (c.dim - 1u - d)]"),
    ],
)
def test_the_check_refuses_a_kernel_that_differs(kernel: str, old: str, new: str, altered: Any) -> None:
    with pytest.raises(BackendError, match=rf"kernel {kernel} does not compute on .* what plain C does"):
        metal.check(altered(old, new))


def test_the_check_refuses_kernels_that_flush_and_do_not_say_so(
    altered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_HOST_FTZ", "1")
    gpu = altered("if (any) atomic_store_explicit", "if (false) atomic_store_explicit")
    if gpu.name.startswith("Apple"):  # whose handling of subnormals is its own
        return
    with pytest.raises(BackendError, match="kernel add does not compute"):
        metal.check(gpu)


def test_a_source_that_does_not_compile() -> None:
    with pytest.raises(BackendError, match=r"the kernels do not compile: .*nonsense"):
        metal.Gpu("kernel void add() { nonsense; }")


def test_a_kernel_that_is_missing() -> None:
    with pytest.raises(BackendError, match="kernel swiglu: there is no kernel of this name"):
        metal.Gpu(SOURCE.replace("kernel void swiglu", "kernel void another"))

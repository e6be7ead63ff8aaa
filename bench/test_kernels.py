"""Speed of single ops, at every instruction-set level that this machine runs.

    pytest bench/ --benchmark-only [--threads N] [-k matmul]

Matrices are those of a feed-forward of Qwen3 0.6B, of every weight type that the kernel tests know; heads
those of SmolLM2 135M (9 query heads and 3 KV heads of 64) and of Qwen3 (16 and 8 of 128). `extra_info` of a
benchmark holds its rate: GMAC/s, GFMA/s of floats, where arithmetic is the work and GB/s where memory is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from kernels.harness import TYPES
from numpy.typing import NDArray
from synth import matrix

from pyinfer.backend.kv import KVBufferView, block_shapes, row_bytes
from pyinfer.backend.native import CTensor, CWeight, NativeBackend

Measure: TypeAlias = Callable[[Callable[[], Any], float, str], None]  # see conftest.py
pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=5)

ROWS, COLS = 3072, 1024
COLD_BYTES = 128 << 20  # the weights of a model are read once per token: more than the caches keep
HEADS = {"9q3kv64": (9, 3, 64), "16q8kv128": (16, 8, 128)}


@cache
def values(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@lru_cache(1)
def gguf_matrix(type: str) -> NDArray[np.uint8]:
    return matrix(type, ROWS, COLS).reshape(-1)


@lru_cache(1)  # of one type at a time; a packed matrix is the same at every level
def cold_weights(type: str) -> list[CWeight]:
    data, packer = gguf_matrix(type), NativeBackend("pack", None, 1)
    copies = -(-COLD_BYTES // data.nbytes)
    return [packer.weight(GGMLQuantizationType[type], ROWS, COLS, data) for _ in range(copies)]


def kv_view(ops: NativeBackend, layout: str, dtype: str, n_kv: int, dim: int, length: int) -> KVBufferView:
    room = -(-length // 16) * 16
    shapes = [(room, n_kv * dim)] * 2 if layout == "rows" else block_shapes(dtype, n_kv, dim, room)
    k, v = ([ops.zeros(shape, dtype)] for shape in shapes)
    view = KVBufferView(k, v, layout, dtype, n_kv, dim, 0, room, room)
    rows: CTensor = ops.tensor(values(length, n_kv * dim))
    ops.kv_write(view, rows, rows)
    return view


@pytest.mark.parametrize("tokens", [128, 1], ids=[f"prefill128x{ROWS}x{COLS}", f"decode1x{ROWS}x{COLS}"])
@pytest.mark.parametrize("type", TYPES)
def test_matmul(measure: Measure, ops: NativeBackend, type: str, tokens: int) -> None:
    """x (tokens, 1024) times a weight (3072, 1024): once with many tokens, and for one token through many
    weights.
    """
    x, weights = ops.tensor(values(tokens, COLS)), cold_weights(type)
    if tokens > 1:
        measure(lambda: ops.matmul(x, weights[0]), tokens * ROWS * COLS, "GMAC/s")
        return

    def decode() -> None:
        for w in weights:
            ops.matmul(x, w)

    measure(decode, len(weights) * gguf_matrix(type).nbytes, "GB/s")


@pytest.mark.parametrize("type", TYPES)
def test_gather_rows(measure: Measure, ops: NativeBackend, type: str) -> None:
    """128 rows of a weight (3072, 1024), dequantised."""
    w, ids = cold_weights(type)[0], list(range(0, 128 * 7, 7))
    measure(lambda: ops.gather_rows(w, ids), len(ids) * COLS * 4, "GB/s")


@pytest.mark.parametrize("shape", [(9, 64, 2048), (9, 2048, 64)], ids=["9x64x2048", "9x2048x64"])
def test_saxpy(measure: Measure, ops: NativeBackend, shape: tuple[int, int, int]) -> None:
    """a (m, k) times b (k, n), as rows of saxpy: the scores and the context of 9 heads, unfused."""
    m, k, n = shape
    a, b = ops.tensor(values(m, k)), ops.tensor(values(k, n))
    measure(lambda: ops.matmul(a, b), m * k * n, "GMAC/s")


STORES = [("tiles", "f32"), ("tiles", "f16"), ("tiles", "q8_0"), ("rows", "f32"), ("rows", "f16")]


@pytest.mark.parametrize(("layout", "dtype"), STORES)
@pytest.mark.parametrize("keys", [511, 2048, 8191])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_decode(
    measure: Measure, ops: NativeBackend, heads: str, keys: int, layout: str, dtype: str
) -> None:
    """One query over a cache of so many keys; the rate is of K and V bytes."""
    n_heads, n_kv, dim = HEADS[heads]
    view, q = kv_view(ops, layout, dtype, n_kv, dim, keys), ops.tensor(values(1, n_heads * dim))
    work = 2 * n_kv * keys * row_bytes(dtype, dim)
    measure(lambda: ops.fused_attention(q, view, n_heads, dim**-0.5), work, "GB/s")


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("keys", [511, 2048, 8191])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_prefill(measure: Measure, ops: NativeBackend, heads: str, keys: int, dtype: str) -> None:
    """The last 24 tokens of a prompt of so many; the rate is of multiply-adds."""
    (n_heads, n_kv, dim), tokens = HEADS[heads], 24
    view, q = kv_view(ops, "tiles", dtype, n_kv, dim, keys), ops.tensor(values(tokens, n_heads * dim))
    pairs = sum(range(keys - tokens + 1, keys + 1))  # of a query and a key
    measure(lambda: ops.fused_attention(q, view, n_heads, dim**-0.5), 2 * pairs * n_heads * dim, "GFMA/s")


@pytest.mark.parametrize("shape", [(1, 576), (128, 576)], ids=["1x576", "128x576"])
def test_rms_norm(measure: Measure, ops: NativeBackend, shape: tuple[int, int]) -> None:
    x, weight = ops.tensor(values(*shape)), ops.tensor(values(1, shape[1]))
    measure(lambda: ops.rms_norm(x, weight, 1e-5), 2 * x.array.nbytes, "GB/s")


@pytest.mark.parametrize("shape", [(9, 2048)], ids=["9x2048"])
def test_softmax(measure: Measure, ops: NativeBackend, shape: tuple[int, int]) -> None:
    x = ops.tensor(values(*shape))
    measure(lambda: ops.softmax_rows(x), 2 * x.array.nbytes, "GB/s")


@pytest.mark.parametrize("shape", [(1, 1536), (128, 1536)], ids=["1x1536", "128x1536"])
def test_swiglu(measure: Measure, ops: NativeBackend, shape: tuple[int, int]) -> None:
    gate, up = ops.tensor(values(*shape)), ops.tensor(values(*shape))
    measure(lambda: ops.swiglu(gate, up), 3 * gate.array.nbytes, "GB/s")


@pytest.mark.parametrize("op", ["silu", "add", "hadamard"])
def test_elementwise(measure: Measure, ops: NativeBackend, op: str) -> None:
    """On 128 rows of 1024 values."""
    args = [ops.tensor(values(128, COLS)) for _ in range(1 if op == "silu" else 2)]
    measure(lambda: getattr(ops, op)(*args), (len(args) + 1) * args[0].array.nbytes, "GB/s")


@pytest.mark.parametrize("neox", [False, True], ids=["norm", "neox"])
def test_rope(measure: Measure, ops: NativeBackend, neox: bool) -> None:
    """128 tokens of 16 heads of 128."""
    x, (cos, sin) = ops.tensor(values(128, 16 * 128)), ops.rope_tables(0, 128, 128, 1e6, 1.0, None)
    measure(lambda: ops.apply_rope(x, cos, sin, 0, 128, neox), 2 * x.array.nbytes, "GB/s")


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_kv_write(measure: Measure, ops: NativeBackend, dtype: str) -> None:
    """128 tokens of 8 KV heads of 128, into tiles."""
    view, rows = kv_view(ops, "tiles", dtype, 8, 128, 128), ops.tensor(values(128, 8 * 128))

    def write() -> None:
        view.length = 0
        ops.kv_write(view, rows, rows)

    measure(write, 2 * rows.array.nbytes, "GB/s")

"""The check itself: it must be able to fail, and its expectations must be right."""

from __future__ import annotations

import signal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from kernels.harness import (
    LEVELS,
    ROWS,
    STORED,
    TILES,
    Native,
    Out,
    Painted,
    View,
    attention,
    check,
    f32,
    in_child,
    values,
)

from pyinfer.backend import reference as ref
from pyinfer.backend.kv import KVBufferView, block_shapes


def lane_wise(x: np.ndarray, y: np.ndarray, lanes: int = 8) -> np.ndarray:
    """A dot product as a vectoriser splits it: partial sums in lanes, added at the end."""
    acc = np.zeros((*x.shape[:-1], lanes), f32)
    for i in range(0, x.shape[-1], lanes):
        acc = ref.fma(x[..., i : i + lanes], y[..., i : i + lanes], acc)
    return ref.fold_sum(acc)


def test_positive_control_a_split_fold_is_caught(native: Native) -> None:
    x = values("random", (64, 256), 1)
    got = native.op("pi_sum_squares", x, 64, 256, Out((64,)))
    check("sum_squares", native.level, 1, x.shape, got, ref.fold(x, x))
    with pytest.raises(AssertionError, match=rf"sum_squares level={native.level} seed=1 shape=\(64, 256\)"):
        check("sum_squares", native.level, 1, x.shape, got, lane_wise(x, x))


def test_a_difference_is_named() -> None:
    a, b = np.zeros((3, 4), f32), np.zeros((3, 4), f32)
    b[1, 2] = -0.0
    message = (
        r"op level=L seed=7 shape=\(3, 4\): 1 of 12 differ, first at \(1, 2\): got 0x00000000 .*0x80000000"
    )
    with pytest.raises(AssertionError, match=message):
        check("op", "L", 7, a.shape, a, b)


@pytest.mark.parametrize("side", [-1, 4])
def test_a_stray_write_is_caught(side: int) -> None:
    memory = Painted()
    y = memory.place(np.zeros(4, f32))
    assert y.ctypes.data % 64 == 4
    memory.verify("nothing yet")
    buffer, start, _ = memory.placed[0]
    buffer[start + 4 * side] ^= 1
    with pytest.raises(AssertionError, match="wrote"):
        memory.verify("op")


@pytest.mark.parametrize("where", ["end", "start"])
def test_a_stray_access_across_a_fence_ends_the_process(where: str) -> None:
    run = in_child("kernels.guarded", LEVELS[0], where, "stray")
    assert run.returncode == -signal.SIGSEGV or run.returncode == -signal.SIGBUS, run.stdout + run.stderr
    assert run.stdout.split()[-1] == "stray"


def exact(x: f32) -> Fraction:
    return Fraction(float(x))


def nearest(q: Fraction) -> Any:
    """q rounded to float32, ties to even; q is finite and in range."""
    if q == 0:
        return f32(0)
    guess = f32(float(q))
    around = [np.nextafter(guess, f32(-np.inf)), guess, np.nextafter(guess, f32(np.inf))]
    return f32(min(around, key=lambda c: (abs(exact(c) - q), int(np.asarray(c).view(np.uint32)) & 1)))


def test_the_reference_fma_rounds_once() -> None:
    rng = np.random.default_rng(2)
    n = 3000
    a, b = (rng.standard_normal(n).astype(f32) for _ in range(2))
    c = np.ldexp(rng.standard_normal(n), rng.integers(-50, 30, n)).astype(f32)
    c[::3] = (-a[::3] * b[::3]).astype(f32)  # all but the rounding error cancels
    a[1::3] = 1 + np.ldexp(rng.integers(0, 1 << 12, n // 3), -12)  # halfway cases and their neighbours
    b[1::3] = 1 + np.ldexp(rng.integers(0, 1 << 12, n // 3), -12)
    c[1::3] = np.ldexp(rng.choice([-1.0, 0.0, 1.0], n // 3), rng.integers(-90, -60, n // 3))
    tiny = np.ldexp(rng.standard_normal(n), rng.integers(-75, -70, n)).astype(f32)
    for x, y, z in ((a, b, c), (tiny, tiny[::-1].copy(), np.zeros(n, f32))):
        want = [nearest(exact(i) * exact(j) + exact(k)) for i, j, k in zip(x, y, z, strict=True)]
        check("fma", "reference", 2, x.shape, np.abs(ref.fma(x, y, z)), np.abs(np.array(want, f32)))


@pytest.mark.parametrize(("first", "window"), [(0, 0), (3, 0), (0, 4), (3, 4)])
def test_attention_at_once_is_the_reference_backends_attention(first: int, window: int) -> None:
    n, n_kv, dim, heads, tokens = 19, 2, 6, 6, 5
    k, v = (values("random", (n, n_kv, dim), s) for s in (3, 4))
    q = values("random", (tokens, heads, dim), 5)
    ops = ref.ReferenceBackend()
    blocks = [k.reshape(n, -1)], [v.reshape(n, -1)]
    view = KVBufferView(*blocks, "rows", "f32", n_kv, dim, n, n, n, first, window)
    want = ops.fused_attention(q.reshape(tokens, -1), view, heads, 0.3)
    starts, ends = np.array([view.sees(tokens, t) for t in range(tokens)]).T
    got = attention(q, k, v, 0.3, ends, starts)
    check("attention", "reference", 3, q.shape, got.reshape(tokens, -1), want)


@pytest.mark.parametrize("first", [0, 21])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("rows", "f32"), ("rows", "f16"), ("tiles", "f32"), ("tiles", "f16"), ("tiles", "q8_0")],
)
def test_a_view_puts_elements_where_the_reference_does(layout: str, dtype: str, first: int) -> None:
    n_kv, dim, capacity, block, tokens = 3, 32, 48, 16 if layout == "tiles" else 48, 25
    k, v = (values("random", (tokens, n_kv, dim), s) for s in (6, 7))
    mine = View({"rows": ROWS, "tiles": TILES}[layout], dtype, n_kv, dim, capacity, block=block)
    mine.write(k, v, first)
    shapes = [(block, n_kv * dim)] * 2 if layout == "rows" else block_shapes(dtype, n_kv, dim, block)
    empty = View(mine.layout, dtype, n_kv, dim, capacity, block=block)
    item = np.uint8 if dtype == "q8_0" else STORED[dtype]
    ks, vs = (
        [x.view(item).reshape(shape) for x in blocks if x is not None]
        for blocks, shape in zip((empty.k, empty.v), shapes, strict=True)
    )
    view = KVBufferView(ks, vs, layout, dtype, n_kv, dim, first, capacity, block)
    ref.ReferenceBackend().kv_write(view, k.reshape(tokens, -1), v.reshape(tokens, -1))
    assert view.length == mine.length
    for name, own, blocks in (("K", mine.k, ks), ("V", mine.v, vs)):
        for i, (x, y) in enumerate(zip(own, blocks, strict=True)):
            check(name, "reference", 6, (layout, dtype, "block", i), x, y.reshape(-1).view(x.dtype))

"""Each op on a few small inputs: for golden digests, and for tests of memory, FP environment and threads.

A case calls ops of the `Native` it is given and returns their results, in one order always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import numpy as np
from kernels.harness import (
    BLOCK,
    FLOATS,
    GROUP,
    HEAD,
    ROWS,
    SPLIT,
    TILES,
    TYPES,
    Native,
    Out,
    View,
    f32,
    raw_weight,
    values,
)

Case = Callable[[Native], Iterator[np.ndarray]]
CASES: dict[str, Case] = {}
EPS = float(f32(1e-5))
SCALE = float(f32(0.3))
FIRST_TYPES = ("F32", "F16", "Q4_1", "Q8_0")  # of the cases below that stand without a type in their name


def case(f: Case) -> Case:
    CASES[f.__name__] = f
    return f


@cache
def expected(name: str) -> list[np.ndarray]:
    """A case's results by the plain C."""
    return list(CASES[name](Native("ref")))


@case
def matmul(native: Native) -> Iterator[np.ndarray]:
    for type_, kind in product(FIRST_TYPES, ("random", "subnormal")):
        odd = 33 if type_ in ("F32", "F16") else 32
        for rows, cols, tokens in product((1, 17, 32), (odd, 64), (1, 2, 7)):
            w = native.weight(type_, raw_weight(type_, kind, rows, cols, 1), rows, cols)
            x = values("random", (tokens, cols), 2)
            for add in (None, values("random", (tokens, rows), 3)):
                yield native.op("pi_matmul", w, None, None, x, tokens, add, Out((tokens, rows)), None, None)


@case
def several_matrices(native: Native) -> Iterator[np.ndarray]:
    rows = (33, 5, 16)
    for types in (("Q4_1", "Q8_0", "F32"), ("F16", "F32", "Q8_0")):
        w = [
            native.weight(t, raw_weight(t, "random", n, 32, 4), n, 32)
            for t, n in zip(types, rows, strict=True)
        ]
        for tokens in (1, 9):
            x = values("random", (tokens, 32), 5)
            yield from native.op("pi_matmul", *w, x, tokens, None, *(Out((tokens, n)) for n in rows))


@case
def gather_rows(native: Native) -> Iterator[np.ndarray]:
    for type_, kind in product(FIRST_TYPES, ("random", "subnormal")):
        w = native.weight(type_, raw_weight(type_, kind, 19, 64, 6), 19, 64)
        yield native.op("pi_gather_rows", w, np.array([18, 0, 16], np.int32), 3, Out((3, 64)))


def of_type(type_: str) -> Case:
    """The same of one type, with its rows read back, and beside a Q8_0 matrix."""

    def f(native: Native) -> Iterator[np.ndarray]:
        block = max(BLOCK[type_], 32)
        for kind, more in product(("random", "extreme", "subnormal"), (0, block)):
            cols = block + more + (type_ in FLOATS)
            x = values("random", (7, cols), 20)
            for rows in (1, 17, 32):
                w = native.weight(type_, raw_weight(type_, kind, rows, cols, 21), rows, cols)
                for tokens in (1, 2, 7):
                    y = Out((tokens, rows))
                    yield native.op("pi_matmul", w, None, None, x[:tokens], tokens, None, y, None, None)
                yield native.op("pi_gather_rows", w, np.array([rows - 1, 0], np.int32), 2, Out((2, cols)))
        both = [native.weight(t, raw_weight(t, "random", 19, block, 22), 19, block) for t in (type_, "Q8_0")]
        for tokens in (1, 7):
            x, add = values("random", (tokens, block), 23), values("random", (tokens, 19), 24)
            outs = [Out((tokens, 19)), Out((tokens, 19))]
            yield from native.op("pi_matmul", *both, None, x, tokens, add, *outs, None)

    return f


CASES |= {f"matmul_{type_.lower()}": of_type(type_) for type_ in TYPES if type_ not in FIRST_TYPES}


@case
def matmul_rows(native: Native) -> Iterator[np.ndarray]:
    for m, k, n in product((1, 3), (1, 5), (1, 8, 15, 33)):
        yield native.op(
            "pi_matmul_rows", values("random", (m, k), 7), values("random", (k, n), 8), m, k, n, Out((m, n))
        )


@case
def elementwise(native: Native) -> Iterator[np.ndarray]:
    for kind, n in product(("random", "subnormal", "mixed"), (1, 7, 8, 9, 15, 16, 17, 31, 33)):
        a, b = values(kind, (n,), 9), values(kind, (n,), 10)
        for op in ("exp", "silu"):
            yield native.op(f"pi_{op}", a * f32(20), n, Out((n,)))
        for op in ("swiglu", "add", "hadamard"):
            yield native.op(f"pi_{op}", a, b, n, Out((n,)))
        half = native.op("pi_narrow_f16", a * f32(1e-4), n, Out((n,), np.float16))
        yield half
        yield native.op("pi_widen_f16", half, n, Out((n,)))


@case
def rows(native: Native) -> Iterator[np.ndarray]:
    for r, n in product((1, 3, 9), (1, 7, 8, 16, 17, 33)):
        x, w = values("random", (r, n), 11), values("random", (n,), 12)
        yield native.op("pi_softmax_rows", x * f32(30), r, n, Out((r, n)))
        yield native.op("pi_rms_norm", x, w, r, n, EPS, Out((r, n)))
        yield native.op("pi_sum_squares", values("subnormal", (r, n), 13), r, n, Out((r,)))
        yield native.op("pi_sum_squares", x, r, n, Out((r,)))


@case
def rope(native: Native) -> Iterator[np.ndarray]:
    for dim, rot, neox in ((2, 2, 0), (6, 6, 1), (40, 16, 1), (40, 18, 0), (64, 64, 1), (64, 64, 0)):
        tables = native.op(
            "pi_rope_table", 1000, 3, rot, 10000.0, 1.0, None, Out((3, rot // 2)), Out((3, rot // 2))
        )
        yield from tables
        x = values("random", (3, 2, dim), 14)
        yield native.op("pi_rope", x, 3, 2, dim, rot, neox, *tables, 3, 0, Out(x.shape))


@case
def caches(native: Native) -> Iterator[np.ndarray]:
    for layout, dtype, (dim, gap), first in product(
        (ROWS, TILES), ("f32", "f16"), ((2, 3), (20, 0), (64, 0)), (0, 7, 31)
    ):
        tokens = 10
        k, v = (values("random", (tokens, 2, dim), s) * f32(1e-3) for s in (15, 16))
        view = View(layout, dtype, 2, dim, 48, gap, first)
        yield from native.op("pi_kv_write", view, k, v, tokens)


@case
def attention(native: Native) -> Iterator[np.ndarray]:
    for layout, dtype, (dim, gap) in product((ROWS, TILES), ("f32", "f16"), ((2, 3), (20, 0), (64, 0))):
        for length, tokens, group in product((1, 16, 17, 70), (1, 2), (1, 2, 5)):
            if tokens <= length and (length < 70 or group < 5):
                k, v = (values("random", (length, 2, dim), s) for s in (17, 18))
                capacity = -(-length // 16) * 16
                view = View(layout, dtype, 2, dim, capacity, gap).write(k, v)
                q = values("random", (tokens, 2 * group, dim), 19)
                yield native.attention(q, view, tokens, SCALE)


@case
def caches_in_blocks(native: Native) -> Iterator[np.ndarray]:
    """Also with values that q8_0 rounds to nothing, or clips."""
    for dtype, (dim, gap), first in product(("f32", "f16", "q8_0"), ((32, 3), (64, 0)), (0, 7, 31)):
        for kind in ("random", "mixed", "subnormal", "zeros"):
            k, v = (values(kind, (40, 2, dim), s) for s in (25, 26))
            view = View(TILES, dtype, 2, dim, 80, gap, first, block=16)
            yield from native.op("pi_kv_write", view, k, v, 40)


@case
def attention_in_blocks(native: Native) -> Iterator[np.ndarray]:
    """Cache types, block sizes, tokens no longer held."""
    for dtype, (dim, gap), (block, first) in product(
        ("f32", "f16", "q8_0"), ((32, 3), (64, 0)), ((16, 0), (32, 21), (0, 5))
    ):
        for length, (tokens, group) in product((33, 70), ((1, 1), (1, 4), (17, 3))):
            if tokens <= length - first:
                k, v = (values("random", (length - first, 2, dim), s) for s in (27, 28))
                view = View(TILES, dtype, 2, dim, 80, gap, block=block, first=first).write(k, v, first)
                q = values("random", (tokens, 2 * group, dim), 29)
                yield native.attention(q, view, tokens, SCALE)


@case
def attention_in_windows(native: Native) -> Iterator[np.ndarray]:
    """Wider and narrower than the block of queries."""
    for (layout, dtype), window, first in product(
        ((ROWS, "f32"), (TILES, "f16"), (TILES, "q8_0")), (1, 15, 16, 17, 100), (0, 5)
    ):
        k, v = (values("random", (70 - first, 2, 32), s) for s in (30, 31))
        block = 32 if layout == TILES else 0
        view = View(layout, dtype, 2, 32, 96, first=first, window=window, block=block).write(k, v, first)
        for tokens in (1, 2, 40):
            q = values("random", (tokens, 6, 32), 32)
            yield native.attention(q, view, tokens, SCALE)


@case
def attention_of_several(native: Native) -> Iterator[np.ndarray]:
    """Sequences of their own lengths and counts of queries; each unit of work, and few tasks."""
    sequences = ((1, 1), (40, 3), (70, 1), (130, 26))
    for dtype, window in product(("f32", "f16", "q8_0"), (0, 20)):
        views = [
            View(TILES, dtype, 2, 32, 144, window=window, block=48).write(
                *(values("random", (length, 2, 32), length + s) for s in (1, 2))
            )
            for length, _ in sequences
        ]
        for one_each, units in ((False, (GROUP, HEAD)), (True, (GROUP, HEAD, SPLIT))):
            tokens = [1 if one_each else n for _, n in sequences]
            q = values("random", (sum(tokens), 6, 32), 33)
            for unit_of, tasks in product(units, (1, 2)):
                yield native.attention(q, views, tokens, SCALE, unit_of, tasks)

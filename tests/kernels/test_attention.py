"""Attention over both cache layouts, and writing into them, byte for byte. NUMERICS.md section 4."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kernels.harness import DTYPE, LEVELS, ROWS, TILES, Native, Out, View, attention, check, f32, values

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)
TOKENS = (1, 2, 17)
STEPS = [(n, t) for n in LENGTHS for t in TOKENS if t <= n]
VISIBLE = sorted({n - i for n, t in STEPS for i in range(t)})  # how many tokens a query may have to see
KV_HEADS = 2
GROUPS = {dim: (1, 2, 3, 4, 5) for dim in (2, 16, 40)} | {
    64: tuple(range(1, 17)),
    80: (1, 4),
    128: (1, 3),
    256: (1, 2),
}
ROWS_GROUPS = {1, 3, 16}  # over rows each head is on its own
LAYOUTS = {"rows": ROWS, "tiles": TILES}


@cache
def expected(dim: int, dtype: str, kind: str = "random") -> tuple[np.ndarray, ...]:
    """Queries, keys, values and results: a query for each count of visible tokens, the largest group."""
    group = max(GROUPS[dim])
    q = values(kind, (len(VISIBLE), KV_HEADS * group, dim), seed=dim)
    k, v = (
        values("random", (max(LENGTHS), KV_HEADS, dim), seed=dim + i).astype(DTYPE[dtype]) for i in (1, 2)
    )
    return q, k, v, attention(q, k, v, scale_of(dim), np.array(VISIBLE))


def scale_of(dim: int) -> float:
    return float(f32(1) / np.sqrt(f32(dim)))


def pick(x: np.ndarray, rows: list[int], group: int) -> np.ndarray:
    """The rows of x (queries, heads, dim), and of each KV head's query heads the first `group`."""
    heads = x.reshape(len(x), KV_HEADS, -1, x.shape[-1])[rows, :, :group]
    return np.ascontiguousarray(heads.reshape(len(rows), KV_HEADS * group, -1))


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", sorted(GROUPS))
def test_attention(native: Native, layout: str, dtype: str, dim: int) -> None:
    q, k, v, want = expected(dim, dtype)
    for length, tokens in STEPS:
        spare = 16 if length % 2 else 0
        capacity = -(-length // 16) * 16 + spare
        view = View.make(LAYOUTS[layout], dtype, KV_HEADS, dim, capacity, gap=spare // 4).write(
            k[:length], v[:length]
        )
        rows = [VISIBLE.index(n) for n in range(length - tokens + 1, length + 1)]
        for group in GROUPS[dim]:
            if (tokens == max(TOKENS) and group > 5) or (layout == "rows" and group not in ROWS_GROUPS):
                continue
            some, heads = pick(q, rows, group), KV_HEADS * group
            got = native.op("pi_attention", some, tokens, heads, view, scale_of(dim), Out(some.shape))
            where = (layout, dtype, dim, "group", group, "tokens", tokens, "length", length)
            check("attention", native.level, dim, where, got, pick(want, rows, group))


@pytest.mark.parametrize("kind", ["large", "subnormal", "zeros", "signed_zeros", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_unusual_queries(native: Native, layout: str, kind: str) -> None:
    with np.errstate(over="ignore"):
        q, k, v, want = expected(16, "f32", kind)
    for length in LENGTHS:
        view = View.make(LAYOUTS[layout], "f32", KV_HEADS, 16, -(-length // 16) * 16).write(
            k[:length], v[:length]
        )
        some = pick(q, [VISIBLE.index(length)], 5)
        got = native.op("pi_attention", some, 1, 10, view, scale_of(16), Out(some.shape))
        check(
            "attention", native.level, 16, (layout, kind, length), got, pick(want, [VISIBLE.index(length)], 5)
        )


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_on_threads(native: Native, layout: str, threads: int) -> None:
    many = Native(native.level, threads)
    q, k, v, want = expected(64, "f16")
    for length, tokens in STEPS:
        view = View.make(LAYOUTS[layout], "f16", KV_HEADS, 64, -(-length // 16) * 16).write(
            k[:length], v[:length]
        )
        rows = [VISIBLE.index(n) for n in range(length - tokens + 1, length + 1)]
        some = pick(q, rows, 3)
        got = many.op("pi_attention", some, tokens, 6, view, scale_of(64), Out(some.shape))
        check("attention", native.level, 64, (layout, threads, length, tokens), got, pick(want, rows, 3))


def test_levels_agree_on_a_long_cache() -> None:
    length, dim = 1043, 64
    k, v = (values("random", (length, KV_HEADS, dim), seed=s).astype(np.float16) for s in (1, 2))
    q, want = values("random", (2, 6, dim), seed=3), None
    for level in LEVELS:
        for layout in LAYOUTS.values():
            view = View.make(layout, "f16", KV_HEADS, dim, 1056).write(k, v)
            got = Native(level, 2).op("pi_attention", q, 2, 6, view, scale_of(dim), Out(q.shape))
            want = got if want is None else want
            check("attention", level, 1, (layout, length), got, want)


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_write(native: Native, layout: str, dtype: str) -> None:
    """Into a cache that holds something else: what lies before, behind and between stays."""
    for dim, threads, gap in ((2, 1, 0), (7, 1, 5), (64, 1, 0), (128, 3, 0)):
        many = native if threads == 1 else Native(native.level, threads)
        for first in (0, 1, 7, 15, 16, 17, 33):
            for tokens in (1, 2, 17, 40):
                k, v = (values("random", (tokens, 3, dim), seed=s) for s in (1, 2))
                view = View.make(LAYOUTS[layout], dtype, 3, dim, 80, gap, first)
                view.k[:], view.v[:] = (values("random", view.k.shape, seed=s) for s in (3, 4))
                got = many.op("pi_kv_write", view, k, v, tokens)
                view.write(k, v, first)
                for name, was, want in zip("KV", got, (view.k, view.v), strict=True):
                    check(f"kv_write {name}", native.level, 1, (layout, dtype, dim, first, tokens), was, want)


def test_kv_write_takes_no_tokens(native: Native) -> None:
    view = View.make(TILES, "f32", 2, 4, 16, length=16)
    k = values("random", (0, 2, 4), seed=1)
    got = native.op("pi_kv_write", view, k, k, 0)
    check("kv_write", native.level, 1, "no tokens", got[0], view.k)

"""Attention over every kind of cache, and writing into them, byte for byte. NUMERICS.md section 4.

What a query gives depends on the tokens from..to that it sees, and on nothing else. So each such pair is
computed once, by the reference, and serves all blocks of memory, batches, units and levels. Its query is the
one at to - 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random

import numpy as np
import pytest
from kernels.harness import (
    GROUP,
    HEAD,
    ROWS,
    SPLIT,
    STORED,
    TILES,
    Native,
    View,
    attention,
    check,
    f32,
    lib,
    values,
    widened,
)

KV_HEADS = 2
LAYOUTS = {"rows": ROWS, "tiles": TILES}
STORES = [("rows", "f32"), ("rows", "f16"), ("tiles", "f32"), ("tiles", "f16"), ("tiles", "q8_0")]
BLOCKS = (0, 16, 32, 48, 64)  # 0: one block
FILLS = (np.nan, 3e4)  # NaN spreads through every sum; a large value shows in a maximum, too
stores = pytest.mark.parametrize(("layout", "dtype"), STORES)


@dataclass(frozen=True)
class Step:
    """The last `tokens` of `length` tokens attend to those held, from `first` on, in their windows."""

    length: int
    tokens: int = 1
    window: int = 0
    first: int = 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """What each query sees: from, to."""
        ends = range(self.length - self.tokens + 1, self.length + 1)
        return [(max(self.first, end - self.window) if self.window else self.first, end) for end in ends]


class Material:
    """Queries, keys and values of `longest` positions, and what attention makes of them, pair by pair."""

    def __init__(self, dim: int, dtype: str, group: int, longest: int, kind: str = "random") -> None:
        self.dim, self.dtype, self.group = dim, dtype, group
        self.scale = float(f32(1) / np.sqrt(f32(dim)))
        self.q = values(kind, (longest, KV_HEADS * group, dim), seed=dim)
        self.k, self.v = (values("random", (longest, KV_HEADS, dim), seed=dim + i) for i in (1, 2))
        self.as_read = widened(self.k, dtype), widened(self.v, dtype)
        self.known: dict[tuple[int, int], np.ndarray] = {}

    def learn(self, steps: Iterable[Step]) -> None:
        """Computes what the pairs of these steps give, those of about one length together."""
        new = {pair for step in steps for pair in step.pairs} - set(self.known)
        todo = sorted(new, key=lambda pair: pair[1] - pair[0])
        while todo:
            most = 1.3 * (todo[0][1] - todo[0][0]) + 16
            some = [pair for pair in todo if pair[1] - pair[0] <= most]
            starts, ends = np.array(some).T
            out = attention(self.q[ends - 1], *self.as_read, self.scale, ends, starts)
            self.known.update(zip(some, out, strict=True))
            todo = todo[len(some) :]

    def of_group(self, x: np.ndarray, group: int) -> np.ndarray:
        """Of rows x (tokens, heads, dim), the first `group` query heads of each KV head."""
        heads = x.reshape(len(x), KV_HEADS, self.group, self.dim)[:, :, :group]
        return heads.reshape(len(x), KV_HEADS * group, self.dim)

    def queries(self, step: Step, group: int) -> np.ndarray:
        return self.of_group(self.q[step.length - step.tokens : step.length], group)

    def want(self, step: Step, group: int) -> np.ndarray:
        return self.of_group(np.stack([self.known[pair] for pair in step.pairs]), group)

    def view(self, step: Step, layout: str, block: int = 0, gap: int = 0, fill: float = np.nan) -> View:
        """What no query sees is not written, and where it would fill a block, the block does not exist."""
        seen, capacity = step.pairs[0][0], (step.length + 15 + gap) // 16 * 16
        block = block if layout == "tiles" else 0
        where = (LAYOUTS[layout], self.dtype, KV_HEADS, self.dim, capacity, gap)
        view = View(*where, first=seen, window=step.window, block=block, fill=fill)
        view.write(self.k[seen : step.length], self.v[seen : step.length], seen)
        view.first = step.first
        return view


@cache
def material(dim: int, dtype: str, group: int, longest: int, kind: str = "random") -> Material:
    return Material(dim, dtype, group, longest, kind)


def units(steps: Iterable[Step]) -> tuple[int, ...]:
    return (GROUP, HEAD, SPLIT) if all(step.tokens == 1 for step in steps) else (GROUP, HEAD)


def hold(
    native: Native, of: Material, layout: str, steps: list[Step], groups: Iterable[int], blocks: Iterable[int]
) -> None:
    """Each step, with its group, block size, unit and so on drawn from what there is, alike at all levels."""
    of.learn(steps)
    rng = Random(f"{of.dim} {of.dtype} {layout}")
    for step in steps:
        group, block = rng.choice(list(groups)), rng.choice(list(blocks))
        view = of.view(step, layout, block, gap=rng.choice((0, 4)), fill=rng.choice(FILLS))
        unit_of = rng.choice(units([step]))
        got = native.attention(of.queries(step, group), view, step.tokens, of.scale, unit_of)
        where = (layout, of.dtype, step, "group", group, "block", view.block, "unit", unit_of)
        check("attention", native.level, of.dim, where, got, of.want(step, group))


GROUPS = {dim: (1, 2, 3, 5) for dim in (16, 32, 40)} | {
    2: (1, 3, 26),  # more than rows of a unit
    7: (1, 2, 4),
    64: (1, 4, 7),
    80: (1, 4),
    96: (2, 3),
    128: (1, 2, 3),
    256: (1, 2),
}
LENGTHS = (1, 2, 15, 16, 17, 31, 64, 65, 130)
STEPS = [Step(n, t) for n, t in product(LENGTHS, (1, 1, 2, 17)) if t <= n]
STEPS += [Step(33, 3), Step(40, 24), Step(40, 25), Step(79, 49)]


@pytest.mark.parametrize("dim", sorted(GROUPS))
@stores
def test_attention(native: Native, layout: str, dtype: str, dim: int) -> None:
    if dtype != "q8_0" or dim % 32 == 0:
        groups = GROUPS[dim]
        of = material(dim, dtype, max(groups), max(LENGTHS))
        steps = STEPS if dim <= 64 else [step for step in STEPS if step.length <= 65 and step.tokens <= 3]
        hold(native, of, layout, steps, groups, BLOCKS)


def test_every_group_and_count_of_queries(native: Native) -> None:
    """Rows go through the kernels in blocks of several sizes."""
    of, groups = material(64, "f16", 16, 33), range(1, 17)
    steps = [Step(33, t) for t in (1, 2, 3, 5)]
    of.learn(steps)
    for step, group in product(steps, groups):
        got = native.attention(of.queries(step, group), of.view(step, "tiles", 32), step.tokens, of.scale)
        check("attention", native.level, 64, (step, "group", group), got, of.want(step, group))


CHUNK = 256  # keys, in csrc/attention.c


@stores
def test_chunks_of_keys(native: Native, layout: str, dtype: str) -> None:
    lengths = [CHUNK * i + d for i in (1, 2) for d in (-1, 0, 1, 15, 16, 17)] + [CHUNK * 3 + 5]
    steps = [Step(n, t) for n, t in product(lengths, (1, 1, 2))] + [Step(2 * CHUNK + 9, 26)]
    steps += [Step(n, 1, first=f) for n in (CHUNK + 20, 2 * CHUNK + 1) for f in (1, 250, CHUNK, CHUNK + 3)]
    hold(native, material(32, dtype, 3, max(lengths)), layout, steps, (1, 3), BLOCKS)


@stores
def test_windows(native: Native, layout: str, dtype: str) -> None:
    """Wider and narrower than a block of queries, than a tile, than what is held."""
    windows, firsts = (1, 2, 15, 16, 17, 40, 1000), (0, 0, 5, 16, 21, 95)
    steps = [
        Step(n, t, window, firsts[i % 6])
        for i, (n, t, window) in enumerate(product((40, 130, 300), (1, 2, 25, 40), windows))
        if firsts[i % 6] <= n - t
    ]
    hold(native, material(32, dtype, 3, 300), layout, steps, (1, 2, 3), BLOCKS)


@pytest.mark.parametrize("length", [21840, 21856])  # the scores of 48 rows of so many keys are 4 MiB, or more
def test_blocks_of_queries_have_fewer_rows_where_keys_are_many(native: Native, length: int) -> None:
    hold(native, material(2, "f32", 1, 21856), "tiles", [Step(length, 50)], (1,), (64,))


# ---- batches, units, threads -------------------------------------------------------------------------------

BATCHES = [
    [Step(1), Step(257), Step(64)],
    [Step(63, 1), Step(1, 1)],  # at the number of keys from which on threads take part
    [Step(62, 1), Step(1, 1)],
    [Step(40, 3), Step(1, 1), Step(300, 26), Step(17, 17)],
    [Step(300, 1, 40), Step(130, 1, 0, 21), Step(130, 1, 17, 100)],
    [Step(130, 40, 17), Step(5, 2, 1), Step(300, 25, 40, 21), Step(64, 1)],
]


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_batches(native: Native, batch: list[Step], threads: int) -> None:
    """Sequences in caches of several kinds at once, by each unit, by few and many tasks, in other orders."""
    many, rng = Native(native.level, threads), Random(threads)
    for dtype in ("f32", "f16", "q8_0"):
        material(32, dtype, 3, 300).learn(batch)
    for unit_of, tasks in product(units(batch), (1, 2, 100)):
        kinds = rng.choices(STORES, k=len(batch))
        ofs = [material(32, dtype, 3, 300) for _, dtype in kinds]
        views = [
            of.view(s, kind[0], rng.choice(BLOCKS)) for of, s, kind in zip(ofs, batch, kinds, strict=True)
        ]
        group, seed = rng.choice((1, 2, 3)), rng.choice((0, 1, 7, 2**32 - 1))
        lib.pi_ctx_scramble(many.ctx, seed)
        q, want = (
            np.concatenate([f(of, step, group) for of, step in zip(ofs, batch, strict=True)])
            for f in (Material.queries, Material.want)
        )
        got = many.attention(q, views, [step.tokens for step in batch], ofs[0].scale, unit_of, tasks)
        where = (batch, kinds, f"{unit_of=} {tasks=} {threads=} {group=} {seed=}")
        check("attention", native.level, 32, where, got, want)


@pytest.mark.parametrize("dim", [40, 64, 80, 256])
def test_split_over_dimensions(native: Native, dim: int) -> None:
    of, step = material(dim, "f16", max(GROUPS[dim]), max(LENGTHS)), Step(130)
    of.learn([step])
    for threads, group in product((1, 3), (min(GROUPS[dim]), max(GROUPS[dim]))):
        many = Native(native.level, threads)
        for layout in LAYOUTS:
            got = many.attention(of.queries(step, group), of.view(step, layout), 1, of.scale, SPLIT)
            check("attention", native.level, dim, (layout, threads, group), got, of.want(step, group))


@pytest.mark.parametrize("kind", ["large", "subnormal", "zeros", "signed_zeros", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unusual_queries(native: Native, layout: str, kind: str) -> None:
    with np.errstate(over="ignore"):
        hold(
            native,
            material(16, "f32", 5, 65, kind),
            layout,
            [Step(n, t) for n in LENGTHS if n <= 65 for t in (1, 9) if t <= n],
            (5,),
            (16,),
        )


@pytest.mark.parametrize("dtype", STORED)
def test_scores_far_apart(native: Native, dtype: str) -> None:
    """Shares of a sum from ones down to the least that there is."""
    of = Material(32, dtype, 2, 200)
    of.q = of.q * f32(40)
    steps = [Step(n, t) for n, t in product((40, 130, 200), (1, 7, 33))]
    hold(native, of, "tiles", steps, (1, 2), (64,))


# ---- writing -----------------------------------------------------------------------------------------------


@stores
def test_kv_write(native: Native, layout: str, dtype: str) -> None:
    """Into a cache that holds something else: what lies before, behind and between stays."""
    shapes = [(64, 1, 0, 16), (128, 3, 0, 0), (32, 2, 6, 48)]
    if dtype != "q8_0":
        shapes += [(2, 1, 0, 0), (7, 1, 5, 32)]
    for dim, threads, gap, block in shapes:
        many = native if threads == 1 else Native(native.level, threads)
        for first, tokens in product((0, 1, 15, 16, 17, 33), (1, 2, 17, 40)):
            k, v = (values("random", (tokens, 3, dim), seed=s) for s in (1, 2))
            block = block if layout == "tiles" else 0
            view = View(LAYOUTS[layout], dtype, 3, dim, 80, gap, first, block=block)
            for i, x in enumerate((*view.k, *view.v)):
                assert x is not None
                some = values("random", x.shape, seed=3 + i)
                x[:] = some if dtype != "q8_0" else some.view(np.uint32) >> 7
            got = many.op("pi_kv_write", view, k, v, tokens)
            view.write(k, v, first)
            for i, (was, want) in enumerate(zip(got, (*view.k, *view.v), strict=True)):
                assert want is not None
                where = (layout, dtype, dim, first, tokens, "block", i)
                check("kv_write", native.level, 1, where, was, want)


@pytest.mark.parametrize(
    "kind", ["random", "mixed", "large", "subnormal", "zeros", "signed_zeros", "limits", "ties"]
)
@pytest.mark.parametrize("dtype", STORED)
def test_kv_write_of_unusual_values(native: Native, dtype: str, kind: str) -> None:
    """q8_0: scales that overflow to infinity or round to zero, codes that are clipped."""
    k, v = (values(kind, (37, 2, 64), seed=s) for s in (1, 2))
    if kind == "random":  # each row of another size, from what rounds to nothing to what overflows
        k, v = (np.ldexp(x, np.arange(-40, 34, 2)[:, None, None]).astype(f32) for x in (k, v))
    if kind == "ties":  # halves of scales that are no powers of two: times 1 / d, not divided by d
        k, v = (x * (1 + np.arange(37, dtype=f32) / 64)[:, None, None] for x in (k, v))
    view = View(TILES, dtype, 2, 64, 48)
    got = native.op("pi_kv_write", view, k, v, 37)
    with np.errstate(all="ignore"):
        view.write(k, v)
    for name, was, want in zip("KV", got, (view.k[0], view.v[0]), strict=True):
        assert want is not None
        check(f"kv_write {name}", native.level, 1, (dtype, kind), was, want)


def test_kv_write_takes_no_tokens(native: Native) -> None:
    view = View(TILES, "f32", 2, 4, 16, length=16)
    k = values("random", (0, 2, 4), seed=1)
    got = native.op("pi_kv_write", view, k, k, 0)
    check("kv_write", native.level, 1, "no tokens", got[0], view.k[0])

"""matmul over packed weights, gather_rows and matmul_rows, byte for byte. NUMERICS.md section 3."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from kernels.harness import (
    BLOCK,
    LEVELS,
    Native,
    Out,
    Weight,
    check,
    f32,
    raw_weight,
    reference_weight,
    values,
)

from pyinfer.backend import reference as ref

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 31, 32, 37, 40)
COLS_OF_BLOCK = {1: (1, 7, 32, 33, 64, 96, 256), 32: (32, 64, 96, 288), 256: (256, 512, 768)}
COLS = {type_: COLS_OF_BLOCK[block] for type_, block in BLOCK.items()}
MATRICES = [(type_, cols) for type_ in COLS for cols in COLS[type_]]

# (weights, inputs): each pair on a few shapes; the first on all of them
PAIRS = [
    ("random", "random"),
    ("random", "mixed"),
    ("random", "large"),
    ("random", "cancel"),
    ("random", "signed_zeros"),
    ("random", "subnormal"),
    ("random", "zeros"),
    ("random", "codes"),
    ("random", "ties"),
    ("random", "tiny"),
    ("zeros", "random"),
    ("extreme", "codes"),  # int8 code -128 against 127 and -127: saturates what is not exact
    ("extreme", "same"),  # the largest sums: overflows narrow accumulators
    ("extreme", "random"),
    ("subnormal", "large"),
    ("subnormal", "subnormal"),
]


@cache
def matrix(type_: str, kind: str, cols: int) -> np.ndarray:
    return raw_weight(type_, kind, max(ROWS), cols, seed=cols)


@cache
def expected(type_: str, w_kind: str, x_kind: str, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (40, cols) and outputs (40, 48); any fewer rows and tokens are a corner of them."""
    x = values(x_kind, (max(TOKENS), cols), seed=cols + 1)
    return x, reference_weight(type_, matrix(type_, w_kind, cols)).matmul(x)


def run(native: Native, w: Weight, x: np.ndarray, add: Any = None) -> np.ndarray:
    y: np.ndarray = native.op("pi_matmul", w, None, None, x, len(x), add, Out((len(x), w.rows)), None, None)
    return y


def shapes(whole: bool) -> list[tuple[int, tuple[int, ...]]]:
    """Rows, each with its counts of tokens. Kernels tile groups of 16 rows by tokens: one, two and three
    groups take all counts; how many rows the last group has matters only when it is stored.
    """
    if not whole:
        return [(17, (3, 40)), (48, (1, 9))]
    return [(rows, TOKENS if rows in (16, 17, 48) else (1, 9)) for rows in ROWS]


@pytest.mark.parametrize(("type_", "cols"), MATRICES)
def test_matmul(native: Native, type_: str, cols: int) -> None:
    for w_kind, x_kind in PAIRS:
        x, want = expected(type_, w_kind, x_kind, cols)
        for rows, counts in shapes((w_kind, x_kind) == PAIRS[0]):
            w = native.weight(type_, matrix(type_, w_kind, cols)[:rows], rows, cols)
            for tokens in counts:
                got = run(native, w, x[:tokens])
                where = (type_, w_kind, x_kind, rows, cols, tokens)
                check("matmul", native.level, cols, where, got, want[:tokens, :rows])


@pytest.mark.parametrize("type_", COLS)
@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_matmul_adds_after_the_fold(native: Native, type_: str, kind: str) -> None:
    cols = max(64, BLOCK[type_])
    x, want = expected(type_, "random", "random", cols)
    for rows, tokens in ((1, 1), (17, 1), (17, 9), (33, 3), (48, 40)):
        add = values(kind, (tokens, rows), seed=rows)
        w = native.weight(type_, matrix(type_, "random", cols)[:rows], rows, cols)
        where, got = (type_, rows, cols, tokens), run(native, w, x[:tokens], add)
        check("matmul + add", native.level, rows, where, got, add + want[:tokens, :rows])


@pytest.mark.parametrize(
    "parts",
    [
        (("Q4_1", 17), ("Q8_0", 33)),
        (("Q8_0", 1), ("F32", 48)),
        (("F32", 5), ("F16", 16)),
        (("Q4_1", 48), ("Q4_1", 15), ("Q8_0", 15)),
        (("F16", 33), ("Q8_0", 2), ("F32", 17)),
        (("Q8_0", 16), ("F16", 1), ("Q4_1", 31)),
        (("Q4_0", 33), ("Q5_0", 16), ("BF16", 2)),
        (("IQ4_NL", 17), ("MXFP4", 48), ("Q5_1", 1)),
        (("Q4_K", 48), ("Q4_K", 16), ("Q6_K", 16)),
        (("Q6_K", 17), ("Q8_0", 31)),
        (("Q3_K", 16), ("Q5_K", 33), ("Q2_K", 5)),
        (("Q2_K", 31), ("IQ4_XS", 48), ("F16", 17)),
    ],
    ids=lambda parts: "+".join(f"{t}x{n}" for t, n in parts),
)
@pytest.mark.parametrize("threads", [1, 3])
def test_several_matrices_at_once(parts: tuple[tuple[str, int], ...], threads: int, native: Native) -> None:
    many = Native(native.level, threads)
    block = max(BLOCK[t] for t, _ in parts)
    for cols in (256, 512) if block == 256 else (32, 96):
        x = values("random", (max(TOKENS), cols), seed=cols + 1)
        weights = [many.weight(t, matrix(t, "random", cols)[:n], n, cols) for t, n in parts]
        padding = [None] * (3 - len(parts))
        for tokens in (1, 2, 8, 9, 40):
            for add in (None, values("random", (tokens, parts[0][1]), seed=tokens)):
                outs = [Out((tokens, n)) for _, n in parts]
                args = [*weights, *padding, x[:tokens], tokens, add, *outs, *padding]
                for i, (got, (t, n)) in enumerate(zip(many.op("pi_matmul", *args), parts, strict=True)):
                    want = expected(t, "random", "random", cols)[1][:tokens, :n]
                    want = want if add is None or i else add + want
                    check("matmul", native.level, cols, (parts, i, tokens), got, want)


@pytest.mark.parametrize("type_", COLS)
@pytest.mark.parametrize(("rows", "cols", "tokens"), [(161, 4096, 53), (97, 512, 203)])
def test_blocks_of_tokens_and_threads_agree_across_levels(
    type_: str, rows: int, cols: int, tokens: int
) -> None:
    """More tokens than one block holds (192 quantised ones), more chunks than threads, more groups than are
    packed at a time of an unpacked matrix."""
    raw, x = raw_weight(type_, "random", rows, cols, seed=8), values("random", (tokens, cols), seed=9)
    want = None
    for level in LEVELS:
        for threads in (1,) if level == "ref" else (1, 2, 3):
            for pack in (True, False):
                native = Native(level, threads)
                w = native.weight(type_, raw, rows, cols, pack=pack)
                got = run(native, w, x)
                want = got if want is None else want
                check("matmul", level, 8, (type_, rows, cols, tokens, threads, pack), got, want)
                check(
                    "matmul", level, 8, (type_, rows, cols, 1, threads, pack), run(native, w, x[:1]), want[:1]
                )


@cache
def rows_of(type_: str, kind: str, cols: int) -> np.ndarray:
    return np.asarray(reference_weight(type_, matrix(type_, kind, cols)).rows(range(max(ROWS))))


@pytest.mark.parametrize(("type_", "cols"), MATRICES)
@pytest.mark.parametrize("kind", ["random", "extreme", "subnormal", "zeros"])
def test_gather_rows(native: Native, type_: str, cols: int, kind: str) -> None:
    raw = matrix(type_, kind, cols)
    for rows in (1, 17, 48):
        w = native.weight(type_, raw[:rows], rows, cols)
        for ids in ([0], [rows - 1], [rows // 2, 0, rows - 1, 0]):
            got = native.op("pi_gather_rows", w, np.array(ids, np.int32), len(ids), Out((len(ids), cols)))
            want = rows_of(type_, kind, cols)[ids]
            check("gather_rows", native.level, cols, (type_, kind, rows, ids), got, want)
        unpacked = native.weight(type_, raw[:rows], rows, cols, pack=False)
        got = native.op("pi_gather_rows", unpacked, np.array(ids, np.int32), len(ids), Out((len(ids), cols)))
        check("gather_rows", native.level, cols, (type_, kind, rows, "unpacked"), got, want)


def test_every_scale_of_mxfp4(native: Native) -> None:
    """Row e has the scale 2^(e - 128), from subnormals to where codes times it are infinite."""
    raw = raw_weight("MXFP4", "random", 256, 32, seed=1).copy()
    raw[:, 0] = np.arange(256)
    w, reference = native.weight("MXFP4", raw, 256, 32), reference_weight("MXFP4", raw)
    rows = native.op("pi_gather_rows", w, np.arange(256, dtype=np.int32), 256, Out((256, 32)))
    check("gather_rows", native.level, 1, "MXFP4", rows, reference.rows(range(256)))
    for power in (-80, 0, 40):  # of the inputs; their products with the largest scales are finite at -80
        x = np.ldexp(values("random", (9, 32), seed=2), power)
        with np.errstate(over="ignore"):
            want = reference.matmul(x)
        finite = np.isfinite(want).all(axis=0)
        assert finite.all() == (power == -80)
        for tokens in (1, 9):
            got = run(native, w, x[:tokens])
            check("matmul", native.level, power, "MXFP4", got[:, finite], want[:tokens, finite])


@pytest.mark.parametrize("kind", ["random", "mixed", "cancel", "signed_zeros", "subnormal", "zeros"])
@pytest.mark.parametrize("threads", [1, 3])
def test_matmul_rows(native: Native, kind: str, threads: int) -> None:
    many = Native(native.level, threads)
    a, b = values(kind, (17, 33), seed=1), values("random", (33, 130), seed=2)
    for k in (1, 5, 32, 33):
        want = ref.fold(a[:, None, :k], b.T[None, :, :k])
        for m in (1, 3, 17):
            for n in (1, 7, 8, 9, 15, 16, 17, 33, 130):
                got = many.op("pi_matmul_rows", a[:m, :k].copy(), b[:k, :n].copy(), m, k, n, Out((m, n)))
                check("matmul_rows", native.level, 1, (kind, m, k, n), got, want[:m, :n])
    check(
        "matmul_rows",
        native.level,
        1,
        "k = 0",
        many.op("pi_matmul_rows", a, b, 3, 0, 5, Out((3, 5))),
        np.zeros((3, 5), f32),
    )

"""Elementwise ops and ops by row, byte for byte. NUMERICS.md sections 1 and 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from kernels.harness import KINDS, MAX, Native, Out, check, f32, values

from pyinfer.backend import reference as ref

REFERENCE = ref.ReferenceBackend()
SIZES = (*range(1, 41), 63, 64, 65, 1000)
LONG = 40_003  # more than one range of the pool

Op = Callable[..., np.ndarray]
ELEMENTWISE: dict[str, tuple[int, Op]] = {
    "exp": (1, ref.exp),
    "silu": (1, REFERENCE.silu),
    "swiglu": (2, REFERENCE.swiglu),
    "add": (2, REFERENCE.add),
    "hadamard": (2, REFERENCE.hadamard),
}


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """Overflow and underflow are among the cases."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("kind", [*KINDS, "limits"])
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise(native: Native, op: str, kind: str) -> None:
    operands, reference = ELEMENTWISE[op]
    args = [values(kind, (1000,), seed=i) for i in range(operands)]
    want = reference(*args)
    for n in SIZES:
        got = native.op(f"pi_{op}", *(a[:n] for a in args), n, Out((n,)))
        check(op, native.level, 0, (kind, n), got, want[:n])


@pytest.mark.parametrize("op", ELEMENTWISE)
@pytest.mark.parametrize("threads", [2, 3])
def test_elementwise_in_ranges(native: Native, op: str, threads: int) -> None:
    operands, reference = ELEMENTWISE[op]
    args = [values("random", (LONG,), seed=i) for i in range(operands)]
    got = Native(native.level, threads).op(f"pi_{op}", *args, LONG, Out((LONG,)))
    check(op, native.level, 0, (LONG, threads), got, reference(*args))


# ---- by row ------------------------------------------------------------------------------------------------

ROW_COUNTS = (1, 2, 3, 4, 7, 8, 9, 10, 11, 16, 17)  # about those whose folds run side by side
ROW_SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 130)
EPS = float(f32(1e-5))


def row_op(native: Native, op: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    rows, n = x.shape
    tail = {
        "softmax_rows": (Out((rows, n)),),
        "sum_squares": (Out((rows, 1)),),
        "rms_norm": (EPS, Out((rows, n))),
    }[op]
    y: np.ndarray = native.op(f"pi_{op}", x, *((w,) if op == "rms_norm" else ()), rows, n, *tail)
    return y


def row_reference(op: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    if op == "softmax_rows":
        return REFERENCE.softmax_rows(x)
    return REFERENCE.rms_norm(x, w[None], EPS) if op == "rms_norm" else REFERENCE.sum_squares_axis(x)


@cache
def narrow(op: str, kind: str, n: int) -> tuple[np.ndarray, ...]:
    x, w = values(kind, (max(ROW_COUNTS), n), seed=n), values("random", (n,), seed=n + 1)
    return x, w, row_reference(op, x, w)


@pytest.mark.parametrize("kind", [*KINDS, "limits"])
@pytest.mark.parametrize("op", ["softmax_rows", "rms_norm", "sum_squares"])
def test_rows(native: Native, op: str, kind: str) -> None:
    for n in ROW_SIZES:
        x, w, want = narrow(op, kind, n)
        for rows in ROW_COUNTS:
            check(op, native.level, n, (kind, rows, n), row_op(native, op, x[:rows], w), want[:rows])


@cache
def wide(op: str, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    x, w = values("random", shape, seed=5), values("random", shape[1:], seed=6)
    return x, w, row_reference(op, x, w)


@pytest.mark.parametrize("op", ["softmax_rows", "rms_norm"])
@pytest.mark.parametrize("shape", [(70, 600), (3, 9000), (131, 1025)])
@pytest.mark.parametrize("threads", [2, 3])
def test_rows_in_ranges(native: Native, op: str, shape: tuple[int, int], threads: int) -> None:
    x, w, want = wide(op, shape)
    got = row_op(Native(native.level, threads), op, x, w)
    check(op, native.level, 5, (shape, threads), got, want)


@cache
def steep() -> tuple[np.ndarray, np.ndarray]:
    """Rows whose shares are ones over sums of every size, of exponentials down to 0."""
    rng = np.random.default_rng(9)
    x = -rng.uniform(0, 110, (2000, 48)).astype(f32)
    x[np.arange(48) < rng.integers(1, 40, (2000, 1))] = 0
    x[500:] = -rng.exponential(2, (1500, 48)).astype(f32)
    return x, REFERENCE.softmax_rows(x)


def test_softmax_divides_correctly(native: Native) -> None:
    """The vector levels make no division of most quotients."""
    x, want = steep()
    check("softmax_rows", native.level, 9, x.shape, row_op(native, "softmax_rows", x, x), want)


def test_softmax_may_work_in_place(native: Native) -> None:
    x = values("random", (3, 37), seed=1)
    y = x.copy()
    at = native.pointer(y)
    assert native.call("pi_softmax_rows", [native.ctx, at, 3, 37, at]) == 0
    check("softmax_rows", native.level, 1, "in place", y, REFERENCE.softmax_rows(x))


# ---- float16 -----------------------------------------------------------------------------------------------

ALL_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)


def check_but_nan(op: str, native: Native, got: np.ndarray, want: np.ndarray) -> None:
    """A NaN has no promised bits, but stays one."""
    nan = np.isnan(want)
    assert np.isnan(got[nan]).all()
    check(op, native.level, 0, want.shape, got[~nan], want[~nan])


def test_widen_every_half(native: Native) -> None:
    got = native.op("pi_widen_f16", ALL_HALVES, ALL_HALVES.size, Out(ALL_HALVES.shape))
    check_but_nan("widen_f16", native, got, ALL_HALVES.astype(f32))


def test_narrow_about_every_rounding_boundary(native: Native) -> None:
    up = ALL_HALVES[:0x7C00].astype(np.float64)  # from +0 to the largest, ascending
    after = np.append(up[1:], 65536.0)
    points = np.concatenate([up, (up + after) / 2]).astype(f32)  # halves and the ties between them: exact
    x = np.concatenate(
        [
            points,
            np.nextafter(points, f32(-1)),
            np.nextafter(points, f32(np.inf)),
            [MAX, np.inf, np.nan],
        ]
    )
    x = np.concatenate([x, -x]).astype(f32)
    got = native.op("pi_narrow_f16", x, x.size, Out(x.shape, np.float16))
    check_but_nan("narrow_f16", native, got, x.astype(np.float16))


@pytest.mark.parametrize("threads", [1, 3])
def test_halves_at_every_size(native: Native, threads: int) -> None:
    many = Native(native.level, threads)
    x = values("random", (LONG,), seed=3)
    for n in (*SIZES, LONG):
        half = many.op("pi_narrow_f16", x[:n], n, Out((n,), np.float16))
        check("narrow_f16", native.level, 3, n, half, x[:n].astype(np.float16))
        check("widen_f16", native.level, 3, n, many.op("pi_widen_f16", half, n, Out((n,))), half.astype(f32))

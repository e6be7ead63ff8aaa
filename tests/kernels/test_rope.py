"""Rope and its tables, byte for byte; the tables also against decimal arithmetic. NUMERICS.md section 4."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from itertools import product

import numpy as np
import pytest
from kernels.harness import KINDS, Native, Out, check, f32, values

from pyinfer.backend import reference as ref

FACTORS = {rot: (1 + np.arange(rot // 2) / 7).astype(f32) for rot in (2, 6, 64, 128)}


@pytest.fixture(scope="module")
def lone() -> Native:
    """The tables are made without a context."""
    return Native("ref")


def table(
    native: Native, first: int, n: int, rot: int, base: float, scale: float, factors: object
) -> list[np.ndarray]:
    out = Out((n, rot // 2))
    made: list[np.ndarray] = native.op("pi_rope_table", first, n, rot, base, scale, factors, out, out)
    return made


@pytest.mark.parametrize("first", [0, 1, 4095, 1_048_570, 2**32 - 5])
@pytest.mark.parametrize("rot", sorted(FACTORS))
def test_rope_table(lone: Native, rot: int, first: int) -> None:
    for base, scale, factors in zip(
        (10000.0, 500000.0, 1e6, 1.5),
        (1.0, 4.0, 1.0, 0.3),
        (None, None, FACTORS[rot], FACTORS[rot]),
        strict=True,
    ):
        got = table(lone, first, 5, rot, base, scale, factors)
        want = ref.rope_angles(first, 5, rot, base, scale, factors)
        for name, a, b in zip(("cos", "sin"), got, want, strict=True):
            check(f"rope_table {name}", "all", 0, (first, rot, base, scale, factors is not None), a, b)


# Positions where gcc, left to contract, moves a value: it fuses the product of `two_prod` into a sum that is
# to tell what that product lost. tools/variants.sh builds like that, and this must fail there.
CONTRACTED = (5014, 10028, 11149, 11704, 13516, 15626, 16099, 16315)


@pytest.mark.parametrize("position", CONTRACTED)
def test_rope_table_shows_contraction(lone: Native, position: int) -> None:
    got = table(lone, position, 1, 64, 10000.0, 1.0, None)
    want = ref.rope_angles(position, 1, 64, 10000.0, 1.0, None)
    for name, a, b in zip(("cos", "sin"), got, want, strict=True):
        check(f"rope_table {name}", "all", 0, position, a, b)


# ---- against decimal arithmetic ----------------------------------------------------------------------------

DIGITS = 60


@cache
def pi() -> Decimal:
    """Machin: pi = 16 atan(1/5) - 4 atan(1/239)."""

    def atan_inverse(n: int) -> Decimal:
        return sum(
            ((-1) ** k / (Decimal(2 * k + 1) * Decimal(n) ** (2 * k + 1)) for k in range(DIGITS)), Decimal(0)
        )

    return 16 * atan_inverse(5) - 4 * atan_inverse(239)


def cos_sin(angle: Decimal) -> tuple[Decimal, Decimal]:
    x = angle.remainder_near(2 * pi())
    cos = sin = Decimal(0)
    term = Decimal(1)
    for k in range(0, 80, 2):
        sign = (-1) ** (k // 2)
        cos, sin = cos + sign * term, sin + sign * term * x / (k + 1)
        term = term * x * x / ((k + 1) * (k + 2))
    return cos, sin


def ulps(got: np.ndarray, exact: list[Decimal]) -> np.ndarray:
    """Distance from the correctly rounded values, in steps of float32."""
    want = np.array([float(e) for e in exact]).astype(f32)
    order = [
        np.where(b < 0, -(b & 0x7FFFFFFF), b)
        for b in (x.view(np.int32).astype(np.int64) for x in (got, want))
    ]
    distance: np.ndarray = np.abs(order[0] - order[1])
    return distance


def test_decimal_cos_and_sin() -> None:
    with localcontext() as context:
        context.prec = DIGITS + 10
        assert str(pi()).startswith("3.14159265358979323846264338327950288419716939937510")
        for x in (0.0, 0.5, 3.0, 100.25):
            assert np.allclose(
                [float(y) for y in cos_sin(Decimal(x))], [np.cos(x), np.sin(x)], rtol=0, atol=1e-14
            )


@pytest.mark.parametrize("position", [0, 1, 2, 3, 1000, 8191, 131_071, 524_289, 1_048_575, 1_048_576])
def test_rope_table_is_within_one_ulp(lone: Native, position: int) -> None:
    for rot, base, scale, factors in (
        (64, 10000.0, 1.0, None),
        (128, 1e6, 1.0, None),
        (64, 500000.0, 1.0, FACTORS[64]),
        (6, 10000.0, 4.0, None),
    ):
        cos, sin = (t[0] for t in table(lone, position, 1, rot, base, scale, factors))
        with localcontext() as context:
            context.prec = DIGITS + 10
            exact = []
            for i in range(rot // 2):
                divisor = Decimal(scale) * (Decimal(float(factors[i])) if factors is not None else 1)
                exact.append(cos_sin(position * Decimal(base) ** (Decimal(-2 * i) / rot) / divisor))
        for name, got, part in (("cos", cos, 0), ("sin", sin, 1)):
            off = ulps(got, [e[part] for e in exact])
            assert off.max() <= 1, (
                f"{name} position={position} rot={rot} base={base}: {off.max()} ulp at {off.argmax()}"
            )


# ---- applying it -------------------------------------------------------------------------------------------

SHAPES = [
    (2, 2),
    (4, 2),
    (16, 16),
    (18, 18),
    (40, 16),
    (40, 40),
    (64, 64),
    (64, 34),
    (80, 20),
    (128, 128),
    (256, 64),
]


@cache
def angles(tokens: int, rot: int) -> tuple[np.ndarray, np.ndarray]:
    return ref.rope_angles(3, tokens, rot, 10000.0, 1.0, None)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "tiny"])
@pytest.mark.parametrize("neox", [0, 1], ids=["norm", "neox"])
def test_rope(native: Native, neox: int, kind: str) -> None:
    reference = ref.ReferenceBackend()
    for (dim, rot), tokens, heads in product(SHAPES, (1, 2, 5), (1, 3)):
        x = values(kind, (tokens, heads, dim), seed=dim)
        cos, sin = angles(tokens + 2, rot)
        got = native.op("pi_rope", x, tokens, heads, dim, rot, neox, cos, sin, tokens + 2, 2, Out(x.shape))
        want = reference.apply_rope(x.reshape(tokens, -1), cos, sin, 2, dim, bool(neox)).reshape(x.shape)
        check("rope", native.level, dim, (kind, dim, rot, tokens, heads), got, want)


@pytest.mark.parametrize("threads", [2, 3])
def test_rope_on_threads(native: Native, threads: int) -> None:
    x = values("random", (70, 9, 64), seed=1)
    cos, sin = angles(70, 64)
    want = ref.ReferenceBackend().apply_rope(x.reshape(70, -1), cos, sin, 0, 64, True).reshape(x.shape)
    got = Native(native.level, threads).op("pi_rope", x, 70, 9, 64, 64, 1, cos, sin, 70, 0, Out(x.shape))
    check("rope", native.level, 1, x.shape, got, want)

"""The order law in NumPy: an independent transcription of csrc/NUMERICS.md, to be read beside it and to test
against.

Only primitives: every coarse op runs its default. Each function works on whole arrays of outputs; the loop
that is left is the fold. NumPy's elementwise float32 + - * / and sqrt round once, as IEEE-754 says; its
reductions and its transcendentals are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as T
from numpy.typing import NDArray

from ..errors import ModelError
from .base import Backend

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
f32 = np.float32

BLOCK = 32


def fma(a: Any, b: Any, c: Any) -> F32:
    """float32 a * b + c with one rounding.

    The product of two float32 is exact in float64. To round the sum there and then to float32 goes wrong
    only where the first lands half way between two float32: at a float64 that ends in 28 zero bits or more.
    Such a sum is rounded to odd instead (S. Boldo and G. Melquiond, "When double rounding is odd", 2004):
    truncated, with the last bit set if anything was lost; so the second rounding is as if from the exact
    value.
    """
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    with np.errstate(all="ignore"):
        p = np.asarray(a * b)
        s = np.asarray(p + c)
        i = s.view(np.int64) & 0xFFF_FFFF == 0
        if i.any():
            p, c, t = np.broadcast_to(p, s.shape)[i], np.broadcast_to(c, s.shape)[i], s[i]
            v = t - p
            lost = (p - (t - v)) + (c - v)
            towards = np.where((lost > 0) == (t > 0), 1, -1)  # the exact value, in steps of magnitude
            odd = (lost != 0) & np.isfinite(t)  # the last bit of t is 0
            s[i] = np.where(odd, t.view(np.int64) + towards, t.view(np.int64)).view(np.float64)
        return s.astype(f32)


# ---- section 2: the fold ----------------------------------------------------------------------------------


def fold(a: F32, b: F32) -> F32:
    """Along the last axis, from +0, one fma after the other."""
    acc = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], f32)
    for i in range(a.shape[-1]):
        acc = fma(a[..., i], b[..., i], acc)
    return acc


def fold_sum(x: F32) -> F32:
    """Along the last axis, from +0."""
    acc = np.zeros(x.shape[:-1], f32)
    for i in range(x.shape[-1]):
        acc = acc + x[..., i]
    return acc


# ---- section 3: weights -----------------------------------------------------------------------------------


def quantize(x: F32) -> tuple[NDArray[np.int8], F32]:
    """Rows to int8 codes (rows, blocks, 32) and their scale dx (rows, blocks)."""
    x = x.reshape(len(x), -1, BLOCK)
    amax = np.abs(x).max(axis=-1)
    amax = np.where(amax < f32(2.0**-100), f32(0), amax)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, f32(127) / amax, f32(0))
    return np.rint(x * inverse[..., None]).astype(np.int8), amax / f32(127)


@dataclass(frozen=True)
class Codes:
    """A quantised matrix: codes (rows, groups, 16 or 32), a scale, perhaps a minimum, to each group."""

    code: NDArray[np.int8]
    s: F32
    m: F32 | None

    @property
    def shape(self) -> tuple[int, int]:
        rows, groups, n = self.code.shape
        return rows, groups * n

    def matmul(self, x: F32) -> F32:
        groups, n = self.code.shape[1:]
        q, dx = quantize(x)
        q, dx = q.reshape(len(x), groups, n), np.repeat(dx, BLOCK // n, axis=1)
        sx = q.sum(axis=-1, dtype=np.int32).astype(f32) * dx
        acc = np.zeros((len(x), len(self.code)), f32)
        for g in range(groups):
            # Integers in float64: exact, so a matrix product may add them in any order.
            exact = q[:, g].astype(np.float64) @ self.code[:, g].astype(np.float64).T
            acc = fma(exact.astype(f32), self.s[None, :, g] * dx[:, g, None], acc)
            if self.m is not None:
                acc = fma(self.m[None, :, g], sx[:, g, None], acc)
        return acc

    def rows(self, ids: Sequence[int]) -> F32:
        code, s = self.code[ids].astype(f32), self.s[ids][..., None]
        with np.errstate(over="ignore"):  # MXFP4's largest scales
            y = s * code if self.m is None else fma(s, code, self.m[ids][..., None])
        return y.reshape(len(ids), -1)


@dataclass(frozen=True)
class Floats:
    """A matrix (rows, cols) of F32, F16 or BF16 values, widened."""

    w: F32

    def matmul(self, x: F32) -> F32:
        acc = np.zeros((len(x), len(self.w)), f32)
        for k in range(self.w.shape[1]):
            acc = fma(self.w[None, :, k], x[:, k, None], acc)
        return acc

    def rows(self, ids: Sequence[int]) -> F32:
        return self.w[ids]


Unpack = Callable[[Any], Codes | Floats]
UNPACK: dict[int, tuple[np.dtype[Any], Unpack]] = {}  # a type: its block, and what becomes of (rows, blocks)


def of_block(type: T, **fields: str) -> Callable[[Unpack], Unpack]:
    """Enters a function in UNPACK; `fields` are those of a block in the file, in order, as NumPy dtypes."""

    def enter(unpack: Unpack) -> Unpack:
        UNPACK[type] = np.dtype(list(fields.items())), unpack
        return unpack

    return enter


def matrix(type: int, rows: int, data: NDArray[np.uint8]) -> Codes | Floats:
    """The matrix of the bytes of a GGUF tensor."""
    block, unpack = UNPACK[type]
    return unpack(np.ascontiguousarray(data).reshape(rows, -1).view(block))


def widen(x: Any) -> F32:
    """Exactly, from f16 or integers of up to 24 bits."""
    return np.asarray(x).astype(f32)


def split(x: NDArray[np.uint8], width: int, run: int) -> NDArray[np.int8]:
    """Bytes (..., n) to fields of `width` bits: of each `run` bytes all the lowest, then all the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = x.reshape(*x.shape[:-1], -1, 1, run) >> shifts & np.uint8((1 << width) - 1)
    return parts.reshape(*x.shape[:-1], -1).view(np.int8)


def codes(code: NDArray[np.int8], s: F32, m: F32 | None = None) -> Codes:
    """Of blocks: code (rows, blocks, values), s and m (rows, blocks) or (rows, blocks, groups)."""
    s = s.reshape(len(s), -1)
    return Codes(code.reshape(*s.shape, -1), s, None if m is None else m.reshape(s.shape))


NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
MX = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@of_block(T.F32, w="<f4")
def unpack_f32(b: Any) -> Floats:
    return Floats(b["w"])


@of_block(T.F16, w="<f2")
def unpack_f16(b: Any) -> Floats:
    return Floats(widen(b["w"]))


@of_block(T.BF16, w="<u2")
def unpack_bf16(b: Any) -> Floats:
    return Floats((b["w"].astype(np.uint32) << np.uint32(16)).view(f32))


@of_block(T.Q4_0, d="<f2", qs="16u1")
def unpack_q4_0(b: Any) -> Codes:
    return codes(split(b["qs"], 4, 16) - np.int8(8), widen(b["d"]))


@of_block(T.Q4_1, d="<f2", m="<f2", qs="16u1")
def unpack_q4_1(b: Any) -> Codes:
    return codes(split(b["qs"], 4, 16), widen(b["d"]), widen(b["m"]))


@of_block(T.Q5_0, d="<f2", qh="4u1", qs="16u1")
def unpack_q5_0(b: Any) -> Codes:
    return codes(split(b["qh"], 1, 1) * np.int8(16) + split(b["qs"], 4, 16) - np.int8(16), widen(b["d"]))


@of_block(T.Q5_1, d="<f2", m="<f2", qh="4u1", qs="16u1")
def unpack_q5_1(b: Any) -> Codes:
    return codes(split(b["qh"], 1, 1) * np.int8(16) + split(b["qs"], 4, 16), widen(b["d"]), widen(b["m"]))


@of_block(T.Q8_0, d="<f2", qs="32i1")
def unpack_q8_0(b: Any) -> Codes:
    return codes(b["qs"], widen(b["d"]))


@of_block(T.IQ4_NL, d="<f2", qs="16u1")
def unpack_iq4_nl(b: Any) -> Codes:
    return codes(NL[split(b["qs"], 4, 16)], widen(b["d"]))


@of_block(T.MXFP4, e="u1", qs="16u1")
def unpack_mxfp4(b: Any) -> Codes:
    return codes(MX[split(b["qs"], 4, 16)], np.ldexp(f32(1), b["e"].astype(np.int32) - 128))


@of_block(T.Q2_K, scales="16u1", qs="64u1", d="<f2", dmin="<f2")
def unpack_q2_k(b: Any) -> Codes:
    d, dmin = widen(b["d"])[..., None], widen(b["dmin"])[..., None]
    return codes(split(b["qs"], 2, 32), d * widen(b["scales"] & 15), -(dmin * widen(b["scales"] >> 4)))


@of_block(T.Q3_K, hmask="32u1", qs="64u1", scales="12u1", d="<f2")
def unpack_q3_k(b: Any) -> Codes:
    sc = split(b["scales"][..., 8:], 2, 4) * np.int8(16) + split(b["scales"][..., :8], 4, 8) - np.int8(32)
    code = split(b["hmask"], 1, 32) * np.int8(4) + split(b["qs"], 2, 32) - np.int8(4)
    return codes(code, widen(b["d"])[..., None] * widen(sc))


def scales_and_minimums(b: Any) -> tuple[F32, F32]:
    """s and m (rows, blocks, 8) of Q4_K and Q5_K."""
    lo, mid, hi = (b["scales"][..., i : i + 4] for i in (0, 4, 8))
    sc = np.concatenate([lo & 63, (lo >> 6) * np.uint8(16) + (hi & 15)], axis=-1)
    mn = np.concatenate([mid & 63, (mid >> 6) * np.uint8(16) + (hi >> 4)], axis=-1)
    return widen(b["d"])[..., None] * widen(sc), -(widen(b["dmin"])[..., None] * widen(mn))


@of_block(T.Q4_K, d="<f2", dmin="<f2", scales="12u1", qs="128u1")
def unpack_q4_k(b: Any) -> Codes:
    return codes(split(b["qs"], 4, 32), *scales_and_minimums(b))


@of_block(T.Q5_K, d="<f2", dmin="<f2", scales="12u1", qh="32u1", qs="128u1")
def unpack_q5_k(b: Any) -> Codes:
    return codes(split(b["qh"], 1, 32) * np.int8(16) + split(b["qs"], 4, 32), *scales_and_minimums(b))


@of_block(T.Q6_K, ql="128u1", qh="64u1", scales="16i1", d="<f2")
def unpack_q6_k(b: Any) -> Codes:
    code = split(b["qh"], 2, 32) * np.int8(16) + split(b["ql"], 4, 64) - np.int8(32)
    return codes(code, widen(b["d"])[..., None] * widen(b["scales"]))


@of_block(T.IQ4_XS, d="<f2", scales_h="2u1", scales_l="4u1", qs="128u1")
def unpack_iq4_xs(b: Any) -> Codes:
    sc = split(b["scales_h"], 2, 1) * np.int8(16) + split(b["scales_l"], 4, 1) - np.int8(32)
    return codes(NL[split(b["qs"], 4, 16)], widen(b["d"])[..., None] * widen(sc))


# ---- section 4: operations --------------------------------------------------------------------------------

EXP = {
    name: f32(float.fromhex(value))
    for name, value in {
        "LOG2E": "0x1.715476p+0",
        "LN2_HI": "0x1.62e4p-1",
        "LN2_LO": "0x1.7f7d1cp-20",
        "C6": "0x1.6d111cp-10",
        "C5": "0x1.120b8p-7",
        "C4": "0x1.55551ap-5",
        "C3": "0x1.5554dcp-3",
        "C2": "0x1p-1",
    }.items()
}


def exp(x: F32) -> F32:
    with np.errstate(all="ignore"):
        x = np.minimum(np.maximum(x, f32(-104)), f32(89))
        n = np.rint(x * EXP["LOG2E"])
        r = fma(n, -EXP["LN2_LO"], fma(n, -EXP["LN2_HI"], x))
        p = np.full(np.shape(x), EXP["C6"])
        for c in ("C5", "C4", "C3", "C2"):
            p = fma(p, r, EXP[c])
        a = f32(1) + r
        y = a + fma(p * r, r, r - (a - f32(1)))
        k = np.nan_to_num(n).astype(np.int32)
        return y * np.ldexp(f32(1), k >> 1) * np.ldexp(f32(1), k - (k >> 1))


# Double-double arithmetic: a number is the unevaluated sum of two float64.
DD = tuple[Any, Any]


def two_sum(a: Any, b: Any) -> DD:
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def quick_two_sum(a: Any, b: Any) -> DD:
    s = a + b
    return s, b - (s - a)


def two_prod(a: Any, b: Any) -> DD:
    ca, cb = 134217729.0 * a, 134217729.0 * b
    ah, bh = ca - (ca - a), cb - (cb - b)
    al, bl = a - ah, b - bh
    p = a * b
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def dd_mul(a: DD, b: DD) -> DD:
    p, e = two_prod(a[0], b[0])
    return quick_two_sum(p, e + (a[0] * b[1] + a[1] * b[0]))


def dd_mul1(a: DD, b: Any) -> DD:
    p, e = two_prod(a[0], b)
    return quick_two_sum(p, e + a[1] * b)


def dd_sub(a: DD, b: DD) -> DD:
    s, e = two_sum(a[0], -b[0])
    return quick_two_sum(s, e + (a[1] - b[1]))


def dd_div1(a: DD, b: Any) -> DD:
    q = a[0] / b
    r = dd_sub(a, two_prod(q, b))
    return quick_two_sum(q, (r[0] + r[1]) / b)


def inverse_root(base: float, n: int) -> DD:
    """base^(-1/n)."""
    lo, hi = 0.0, 1.0
    for _ in range(64):
        mid = (lo + hi) / 2
        p = base
        for _ in range(n):
            p = p * mid
        lo, hi = (mid, hi) if p < 1.0 else (lo, mid)
    y: DD = (hi, 0.0)
    for _ in range(4):
        q: DD = (base, 0.0)
        for _ in range(n):
            q = dd_mul(q, y)
        step = dd_div1(dd_mul(y, dd_sub((1.0, 0.0), q)), float(n))
        y = dd_sub(y, (-step[0], -step[1]))
    return y


HALF_PI = (float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54"))


def rope_angles(
    first: int, n: int, rot: int, base: float, scale: float, factors: F32 | None
) -> tuple[F32, F32]:
    """cos and sin (n, rot / 2)."""
    step, power = inverse_root(base, rot // 2), (1.0, 0.0)
    cos, sin = np.empty((n, rot // 2), f32), np.empty((n, rot // 2), f32)
    positions = np.arange(first, first + n, dtype=np.float64)
    for i in range(rot // 2):
        frequency = dd_div1(power, scale)
        if factors is not None:
            frequency = dd_div1(frequency, float(factors[i]))
        power = dd_mul(power, step)
        a = dd_mul1(frequency, positions)
        k = np.rint(a[0] / HALF_PI[0])
        x, low = dd_sub(a, dd_mul1(HALF_PI, k))
        z, s, c = x * x, 1.0, 1.0
        for j in range(17, 2, -2):
            s = 1.0 - z / float(j * (j - 1)) * s
        for j in range(18, 1, -2):
            c = 1.0 - z / float(j * (j - 1)) * c
        s = x * s
        s, c = s + low * c, c - low * s
        quadrant = k.astype(np.int64) & 3
        cos[:, i] = np.choose(quadrant, [c, -s, -c, s])
        sin[:, i] = np.choose(quadrant, [s, c, -s, -c])
    return cos, sin


class ReferenceBackend(Backend):
    """NumPy, one operation of the contract after the other; tensors are arrays."""

    name = "reference"

    def tensor(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array)

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> NDArray[Any]:
        return np.zeros(shape, {"f32": np.float32, "f16": np.float16, "q8_0": np.uint8}[dtype])

    def part(self, x: NDArray[Any], index: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        return x[index].reshape(shape)

    def numpy(self, x: NDArray[Any]) -> NDArray[Any]:
        return x

    def weight(
        self, type: int, rows: int, cols: int, data: NDArray[np.uint8], *, pack: bool = True
    ) -> Codes | Floats:
        if type not in UNPACK:
            raise ModelError(f"the reference backend has no weight type {T(type).name}")
        return matrix(type, rows, data)

    def kernels(self) -> dict[str, str]:
        return {"all": "reference"}

    def matmul(self, a: F32, b: F32 | Codes | Floats) -> F32:
        if isinstance(b, np.ndarray):
            return fold(a[:, None, :], b.T[None, :, :])
        return b.matmul(a)

    def gather_rows(self, w: Codes | Floats, ids: Sequence[int]) -> F32:
        return w.rows(list(ids))

    def transpose_2d(self, x: F32) -> F32:
        return np.ascontiguousarray(x.T)

    def softmax_rows(self, x: F32) -> F32:
        e = exp(x - x.max(axis=-1, keepdims=True))
        return e / fold_sum(e)[..., None]

    def scale(self, x: F32, factor: float, *, divide: bool = False) -> F32:
        return x / f32(factor) if divide else x * f32(factor)

    def add(self, a: F32, b: F32) -> F32:
        return a + b

    def hadamard(self, a: F32, b: F32) -> F32:
        return a * b

    def add_scalar(self, x: F32, c: float) -> F32:
        return x + f32(c)

    def rsqrt_elem(self, x: F32) -> F32:
        return f32(1) / np.sqrt(x)

    def silu(self, x: F32) -> F32:
        return x / (f32(1) + exp(-x))

    def sum_squares_axis(self, x: F32) -> F32:
        return fold(x, x)[:, None]

    def broadcast_row_scalars(self, x: F32, cols: int) -> F32:
        return np.repeat(x, cols, axis=1)

    def repeat_row_as_matrix(self, x: F32, rows: int) -> F32:
        return np.repeat(x, rows, axis=0)

    def reshape_data(self, x: F32, shape: tuple[int, ...]) -> F32:
        return x.reshape(shape)

    def copy_2d_from_cols(self, x: F32, cols: int, first: int) -> F32:
        return x[:, first : first + cols].copy()

    def copy_2d_into_cols(self, out: F32, x: F32, first: int) -> None:
        out[:, first : first + x.shape[1]] = x

    def copy_rows_2d(self, x: F32, first: int, rows: int) -> F32:
        return x[first : first + rows].copy()

    def concat_dim0(self, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([a, b])

    def narrow_f16(self, x: F32) -> NDArray[np.float16]:
        return x.astype(np.float16)

    def rope_tables(
        self, first: int, n: int, rot: int, base: float, scale: float, factors: F32 | None
    ) -> tuple[F32, F32]:
        return rope_angles(first, n, rot, base, scale, factors)

    def apply_rope(self, x: F32, cos: F32, sin: F32, first: int, head_dim: int, neox: bool) -> F32:
        half = cos.shape[1]
        heads = x.reshape(len(x), -1, head_dim)
        c, s = (t[first : first + len(x), None, :] for t in (cos, sin))
        even = slice(0, half) if neox else slice(0, 2 * half, 2)
        odd = slice(half, 2 * half) if neox else slice(1, 2 * half, 2)
        y = heads.copy()
        x0, x1 = heads[..., even], heads[..., odd]
        y[..., even], y[..., odd] = fma(x0, c, -(x1 * s)), fma(x0, s, x1 * c)
        return y.reshape(x.shape)

"""The ops over the C library. A call is one C call on pointers that were cast once; Python allocates nothing per op but
the handle of the result, whose memory comes from a free list."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from .._pi import ffi, lib
from ..errors import BackendError, ModelError
from .base import Backend, KVBufferView

DTYPES: dict[str, tuple[Any, str, int]] = {
    "f32": (np.float32, "float *", lib.PI_F32),
    "f16": (np.float16, "uint16_t *", lib.PI_F16),
}
LAYOUTS = {"rows": lib.PI_ROWS, "tiles": lib.PI_TILES}
RECYCLED_ROWS, RECYCLED_VALUES = 16, 1 << 18  # results up to this size, those of decoding, are kept for reuse
ERRORS = {lib.PI_ENOMEM: "out of memory", lib.PI_EINVAL: "refused its arguments", lib.PI_ETYPE: "unknown weight type"}


def levels() -> dict[str, bool]:
    """Instruction-set levels that this build knows, ascending, and whether this machine runs them."""
    return {_text(lib.pi_level_name(i)): bool(lib.pi_level_available(i)) for i in range(lib.pi_level_count())}


def chosen_level() -> str | None:
    """The level that PYINFER_CPU forces, or None for the best. Raises BackendError for one that cannot run."""
    level = os.environ.get("PYINFER_CPU") or None
    if level is None:
        return None
    known = levels()
    if level not in known:
        raise BackendError(f"PYINFER_CPU={level!r} is no level of this build; it has {', '.join(known)}")
    if not known[level]:
        usable = ", ".join(name for name, runs in known.items() if runs)
        raise BackendError(f"PYINFER_CPU={level!r} cannot run on this CPU; it runs {usable}")
    return level


class CTensor:
    """Values in C order and their address; the memory goes back to `home` with the last reference."""

    __slots__ = ("array", "home", "ptr", "shape")

    def __init__(self, array: NDArray[Any], ptr: Any, home: list[Any] | None = None) -> None:
        self.array, self.ptr, self.shape, self.home = array, ptr, array.shape, home

    def __del__(self) -> None:
        if self.home is not None:
            self.home.append((self.array, self.ptr))


class CWeight:
    """A packed matrix (rows, cols)."""

    __slots__ = ("ptr", "shape")

    def __init__(self, ptr: Any, shape: tuple[int, int]) -> None:
        self.ptr, self.shape = ffi.gc(ptr, lib.pi_weight_free, lib.pi_weight_bytes(ptr)), shape


class NativeBackend(Backend):
    """The C library at one level (None: the best that runs here) on a number of threads."""

    def __init__(self, name: str, level: str | None, threads: int) -> None:
        ptr = lib.pi_ctx_new(ffi.NULL if level is None else level.encode(), threads)
        if ptr == ffi.NULL:
            raise BackendError(f"backend {name}: level {level or 'best'} with {threads} threads could not be started")
        self.name, self.threads = name, threads
        self.ctx = ffi.gc(ptr, lib.pi_ctx_free)
        self.level = _text(lib.pi_ctx_level(ptr))
        self._free: dict[tuple[int, ...], list[Any]] = {}

    # ---- storage -------------------------------------------------------------------------------------------

    def _wrap(self, array: NDArray[Any]) -> CTensor:
        c_type = "uint16_t *" if array.dtype == np.float16 else "float *"
        return CTensor(array, ffi.cast(c_type, array.ctypes.data))

    def _new(self, shape: tuple[int, ...]) -> CTensor:
        home = self._free.get(shape)
        if home:
            array, ptr = home.pop()
            return CTensor(array, ptr, home)
        fresh = self._wrap(np.empty(shape, np.float32))
        if shape[0] <= RECYCLED_ROWS and fresh.array.size <= RECYCLED_VALUES:
            fresh.home = self._free.setdefault(shape, [])
        return fresh

    def tensor(self, array: NDArray[Any]) -> CTensor:
        return self._wrap(np.array(array, order="C"))

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> CTensor:
        return self._wrap(np.zeros(shape, DTYPES[dtype][0]))

    def numpy(self, x: CTensor) -> NDArray[Any]:
        return x.array if x.home is None else x.array.copy()  # recycled memory does not outlive x

    def weight(self, type: int, rows: int, cols: int, data: NDArray[np.uint8]) -> CWeight:
        out = ffi.new("pi_weight **")
        code = lib.pi_weight_pack(self.ctx, int(type), rows, cols, ffi.from_buffer(data), data.nbytes, out)
        if code == lib.PI_ETYPE:
            raise ModelError(f"weight type {GGMLQuantizationType(type).name} has no kernel")
        _check(code, "weight_pack")
        return CWeight(out[0], (rows, cols))

    def kernels(self) -> dict[str, str]:
        return {
            _text(lib.pi_kernel_name(i)): _text(lib.pi_ctx_kernel_level(self.ctx, i))
            for i in range(lib.pi_kernel_count())
        }

    # ---- matrices ------------------------------------------------------------------------------------------

    def matmul(self, a: CTensor, b: CTensor | CWeight) -> CTensor:
        if isinstance(b, CWeight):
            return self.matmul_many(a, (b,))[0]
        (m, k), (_, n) = a.shape, b.shape
        y = self._new((m, n))
        _check(lib.pi_matmul_rows(self.ctx, a.ptr, b.ptr, m, k, n, y.ptr), "matmul_rows")
        return y

    def matmul_many(self, x: CTensor, weights: Sequence[CWeight]) -> list[CTensor]:
        n = x.shape[0]
        w0, *more = weights
        w1, w2, *_ = [*more, None, None]
        y0 = self._new((n, w0.shape[0]))
        y1 = self._new((n, w1.shape[0])) if w1 else None
        y2 = self._new((n, w2.shape[0])) if w2 else None
        code = lib.pi_matmul(
            self.ctx,
            w0.ptr,
            w1.ptr if w1 else ffi.NULL,
            w2.ptr if w2 else ffi.NULL,
            x.ptr,
            n,
            ffi.NULL,
            y0.ptr,
            y1.ptr if y1 else ffi.NULL,
            y2.ptr if y2 else ffi.NULL,
        )
        if code:
            _check(code, "matmul")
        return [y for y in (y0, y1, y2) if y is not None]

    def matmul_add(self, x: CTensor, w: CWeight, residual: CTensor) -> CTensor:
        y = self._new(residual.shape)
        null = ffi.NULL
        code = lib.pi_matmul(self.ctx, w.ptr, null, null, x.ptr, x.shape[0], residual.ptr, y.ptr, null, null)
        if code:
            _check(code, "matmul")
        return y

    def gather_rows(self, w: CWeight, ids: Sequence[int]) -> CTensor:
        y = self._new((len(ids), w.shape[1]))
        _check(lib.pi_gather_rows(self.ctx, w.ptr, ffi.new("int32_t[]", list(ids)), len(ids), y.ptr), "gather_rows")
        return y

    # ---- rows and elements ---------------------------------------------------------------------------------

    def softmax_rows(self, x: CTensor) -> CTensor:
        y = self._new(x.shape)
        _check(lib.pi_softmax_rows(self.ctx, x.ptr, x.shape[0], x.shape[1], y.ptr), "softmax_rows")
        return y

    def rms_norm(self, x: CTensor, weight: CTensor, eps: float) -> CTensor:
        y = self._new(x.shape)
        code = lib.pi_rms_norm(self.ctx, x.ptr, weight.ptr, x.shape[0], x.shape[1], eps, y.ptr)
        if code:
            _check(code, "rms_norm")
        return y

    def rms_norm_heads(self, x: CTensor, weight: CTensor, eps: float) -> CTensor:
        y = self._new(x.shape)
        head_dim = weight.shape[1]
        rows = x.shape[0] * x.shape[1] // head_dim
        _check(lib.pi_rms_norm(self.ctx, x.ptr, weight.ptr, rows, head_dim, eps, y.ptr), "rms_norm")
        return y

    def sum_squares_axis(self, x: CTensor) -> CTensor:
        y = self._new((x.shape[0], 1))
        _check(lib.pi_sum_squares(self.ctx, x.ptr, x.shape[0], x.shape[1], y.ptr), "sum_squares")
        return y

    def swiglu(self, gate: CTensor, up: CTensor) -> CTensor:
        y = self._new(up.shape)
        code = lib.pi_swiglu(self.ctx, gate.ptr, up.ptr, up.shape[0] * up.shape[1], y.ptr)
        if code:
            _check(code, "swiglu")
        return y

    def silu(self, x: CTensor) -> CTensor:
        y = self._new(x.shape)
        _check(lib.pi_silu(self.ctx, x.ptr, x.array.size, y.ptr), "silu")
        return y

    def add(self, a: CTensor, b: CTensor) -> CTensor:
        y = self._new(a.shape)
        _check(lib.pi_add(self.ctx, a.ptr, b.ptr, a.array.size, y.ptr), "add")
        return y

    def hadamard(self, a: CTensor, b: CTensor) -> CTensor:
        y = self._new(a.shape)
        _check(lib.pi_hadamard(self.ctx, a.ptr, b.ptr, a.array.size, y.ptr), "hadamard")
        return y

    def scale(self, x: CTensor, factor: float, *, divide: bool = False) -> CTensor:
        y = self._new(x.shape)
        (np.divide if divide else np.multiply)(x.array, np.float32(factor), out=y.array)
        return y

    def add_scalar(self, x: CTensor, c: float) -> CTensor:
        y = self._new(x.shape)
        np.add(x.array, np.float32(c), out=y.array)
        return y

    def rsqrt_elem(self, x: CTensor) -> CTensor:
        y = self._new(x.shape)
        np.divide(np.float32(1), np.sqrt(x.array), out=y.array)
        return y

    def apply_rope(
        self, x: CTensor, cos: CTensor, sin: CTensor, first: int, head_dim: int, neox: bool
    ) -> CTensor:
        (tokens, width), half = x.shape, cos.shape[1]
        if first + tokens > cos.shape[0]:
            raise IndexError(f"rope tables hold {cos.shape[0]} positions, not {first + tokens}")
        y = self._new(x.shape)
        at = first * half
        code = lib.pi_rope(
            self.ctx, x.ptr, tokens, width // head_dim, head_dim, 2 * half, neox, cos.ptr + at, sin.ptr + at, y.ptr
        )
        if code:
            _check(code, "rope")
        return y

    def rope_tables(
        self, first: int, n: int, rot: int, base: float, scale: float, factors: NDArray[np.float32] | None
    ) -> tuple[CTensor, CTensor]:
        cos, sin = (self.zeros((n, rot // 2)) for _ in range(2))
        divisors = ffi.NULL if factors is None else ffi.new("float[]", [float(f) for f in factors])
        _check(lib.pi_rope_table(first, n, rot, base, scale, divisors, cos.ptr, sin.ptr), "rope_table")
        return cos, sin

    # ---- copies: no arithmetic, so NumPy serves ----------------------------------------------------------------

    def transpose_2d(self, x: CTensor) -> CTensor:
        return self.tensor(x.array.T)

    def broadcast_row_scalars(self, x: CTensor, cols: int) -> CTensor:
        return self._wrap(np.repeat(x.array, cols, axis=1))

    def repeat_row_as_matrix(self, x: CTensor, rows: int) -> CTensor:
        return self._wrap(np.repeat(x.array, rows, axis=0))

    def reshape_data(self, x: CTensor, shape: tuple[int, ...]) -> CTensor:
        return self.tensor(x.array.reshape(shape))

    def copy_2d_from_cols(self, x: CTensor, cols: int, first: int) -> CTensor:
        return self.tensor(x.array[:, first : first + cols])

    def copy_2d_into_cols(self, out: CTensor, x: CTensor, first: int) -> None:
        out.array[:, first : first + x.shape[1]] = x.array

    def copy_rows_2d(self, x: CTensor, first: int, rows: int) -> CTensor:
        return self.tensor(x.array[first : first + rows])

    def concat_dim0(self, a: CTensor, b: CTensor) -> CTensor:
        return self._wrap(np.concatenate([a.array, b.array]))

    def narrow_f16(self, x: CTensor) -> CTensor:
        y = self.zeros(x.shape, "f16")
        _check(lib.pi_narrow_f16(self.ctx, x.ptr, x.array.size, y.ptr), "narrow_f16")
        return y

    # ---- attention -----------------------------------------------------------------------------------------

    def fused_attention(self, q: CTensor, view: KVBufferView, n_heads: int, scale: float) -> CTensor:
        y = self._new(q.shape)
        code = lib.pi_attention(self.ctx, q.ptr, q.shape[0], n_heads, _handle(view), scale, y.ptr)
        if code:
            _check(code, "attention")
        return y

    def kv_write(self, view: KVBufferView, k: CTensor, v: CTensor) -> None:
        code = lib.pi_kv_write(self.ctx, _handle(view), k.ptr, v.ptr, k.shape[0])
        if code:
            _check(code, "kv_write")
        view.length += k.shape[0]


def _handle(view: KVBufferView) -> Any:
    """The C struct of a view: filled once, but for the length."""
    h = view.handle
    if h is None:
        tiles = view.layout == "tiles"
        h = view.handle = ffi.new("pi_kv_view *")
        h.k, h.v = view.k.ptr, view.v.ptr
        h.head_stride = view.capacity * view.head_dim if tiles else view.head_dim
        h.row_stride = view.head_dim if tiles else view.n_kv_heads * view.head_dim
        h.capacity, h.layout, h.dtype = view.capacity, LAYOUTS[view.layout], DTYPES[view.dtype][2]
        h.n_kv_heads, h.head_dim = view.n_kv_heads, view.head_dim
    h.length = view.length
    return h


def _check(code: int, op: str) -> None:
    if code == lib.PI_ENOMEM:
        raise MemoryError(f"{op}: out of memory")
    if code:
        raise ValueError(f"{op}: the C library {ERRORS.get(code, f'failed with code {code}')}")


def _text(c_string: Any) -> str:
    return bytes(ffi.string(c_string)).decode()

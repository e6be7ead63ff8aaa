"""The ops over the C library.

An op is one C call on pointers that were cast once; its result is a handle whose memory comes from a free
list. Decoding one token makes the same calls each time, on the same memory, but for the token and its
position: so they are captured once, and then only made again (`capture`, `Replay`), which leaves Python some
0.3 us a call.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from .. import _pi
from ..errors import BackendError, InputError, ModelError
from ..schedule import Limits, Unit
from .base import Backend
from .kv import KVBufferView, check_rows, row_bytes
from .replay import Capture, FreeLists, Replay

ffi, lib = _pi.ffi, _pi.lib
DTYPES: dict[str, tuple[Any, str, int]] = {
    "f32": (np.float32, "float *", lib.PI_F32),
    "f16": (np.float16, "uint16_t *", lib.PI_F16),
    "q8_0": (np.uint8, "uint8_t *", lib.PI_Q8_0),
}
UNITS = {Unit.GROUP: lib.PI_UNIT_GROUP, Unit.HEAD: lib.PI_UNIT_HEAD, Unit.SPLIT: lib.PI_UNIT_SPLIT}
LAYOUTS = {"rows": lib.PI_ROWS, "tiles": lib.PI_TILES}
# Results up to so many values keep their memory for the next: of decoding by shape, others by size, for
# what a prefill writes would else be cleared, page by page, at every op.
RECYCLED_ROWS, RECYCLED_VALUES, RECYCLED_LARGE = 16, 1 << 18, 1 << 23
LINE = 64  # bytes of a cache line
NULLS = [ffi.NULL] * 3


def levels() -> dict[str, bool]:
    """Instruction-set levels that this build knows, ascending, and whether this machine runs them."""
    return {_text(lib.pi_level_name(i)): bool(lib.pi_level_available(i)) for i in range(lib.pi_level_count())}


def chosen_level() -> str | None:
    """The level that PYINFER_CPU forces, or None for the best; raises BackendError if it cannot run."""
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

    __slots__ = ("array", "home", "memory", "ptr", "shape")

    def __init__(
        self, array: NDArray[Any], ptr: Any, home: list[Any] | None = None, memory: Any = None
    ) -> None:
        self.array, self.ptr, self.shape, self.home = array, ptr, array.shape, home
        self.memory = array if memory is None else memory  # `array`, or what it is the beginning of

    def __del__(self) -> None:
        if self.home is not None:
            self.home.append((self.memory, self.ptr))


class CWeight:
    """A matrix (rows, cols): packed, or in `src`, GGUF data that it keeps alive."""

    __slots__ = ("ptr", "shape", "src")

    def __init__(self, ptr: Any, shape: tuple[int, int], src: Any = None) -> None:
        self.ptr, self.shape, self.src = ffi.gc(ptr, lib.pi_weight_free), shape, src


class NativeBackend(Backend):
    """The C library at one level (None: the best that runs here) on a number of threads."""

    concurrent = False  # one op at a time: each has the threads of the context to itself

    def __init__(self, name: str, level: str | None, threads: int) -> None:
        super().__init__()
        ptr = lib.pi_ctx_new(ffi.NULL if level is None else level.encode(), threads)
        if ptr == ffi.NULL:
            raise BackendError(
                f"backend {name}: level {level or 'best'} with {threads} threads could not be started"
            )
        self.name, self.threads = name, threads
        self.ctx = ffi.gc(ptr, lib.pi_ctx_free)
        self.level = _text(lib.pi_ctx_level(ptr))
        self.limits = Limits(
            threads, f"backend {name} has {threads} thread{'s' * (threads > 1)}", splits=True
        )
        self._free: FreeLists = {}
        self._spans, self._op_times = np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64)
        self._clock_ahead = time.perf_counter_ns() - lib.pi_clock()  # they may count from other moments
        self._capture: Capture | None = None
        self._capturing = threading.Lock()

    # ---- calls ---------------------------------------------------------------------------------------------

    def _call(self, function: Any, *args: Any) -> None:
        """function(ctx, *args), its error code raised; noted down when this thread captures."""
        code = function(self.ctx, *args)
        if code:
            _fail(code, function)
        if capture := self._own_capture():
            capture.calls.append((function, args))

    def _own_capture(self) -> Capture | None:
        """What this thread captures into. Read once: another thread may end its own capture at any time."""
        capture = self._capture
        return capture if capture is not None and capture.thread == threading.get_ident() else None

    def _not_replayable(self) -> None:
        """This op ran in NumPy: replaying the C calls alone would leave it out."""
        if capture := self._own_capture():
            capture.whole = False

    def capture(
        self, forward: Callable[[], CTensor], views: Sequence[KVBufferView]
    ) -> tuple[CTensor, Replay | None]:
        """Runs forward() and keeps its C calls, to be made again for the next token."""
        with self._capturing:
            self._capture = Capture(threading.get_ident())
            try:
                out = forward()
                replay = Replay(self, self._capture, views, out) if self._capture.whole else None
            finally:
                self._capture = None
        return out, replay

    # ---- for those who watch -------------------------------------------------------------------------------

    def captured(self) -> int:
        capture = self._own_capture()
        return len(capture.calls) if capture else 0

    def workers(self, spans: int) -> NDArray[np.int64]:
        room = self._spans
        n = lib.pi_ctx_spans(self.ctx, ffi.from_buffer("int64_t[]", room), len(room), spans)
        found = room[:n].copy()
        if spans != len(room):
            self._spans = np.zeros((spans, 3), np.int64)
        found[:, 1:] += self._clock_ahead
        return found

    def op_times(self, ops: int, *, start: bool = False) -> NDArray[np.int64]:
        """When the last C calls began and ended (ops, 2), as `workers`. start: makes sure that from now on so
        many are noted down.
        """
        if start and len(self._op_times) == ops:
            return self._op_times
        if len(self._op_times) != ops:
            self._op_times = np.zeros((ops, 2), np.int64)
            self._op_times_at = ffi.from_buffer("int64_t[]", self._op_times)
        if code := lib.pi_ctx_op_times(self.ctx, self._op_times_at, ops):
            _fail(code, lib.pi_ctx_op_times)
        return self._op_times + self._clock_ahead

    # ---- storage -------------------------------------------------------------------------------------------

    def _wrap(self, array: NDArray[Any]) -> CTensor:
        c_type = next(c_type for dtype, c_type, _ in DTYPES.values() if dtype == array.dtype)
        return CTensor(array, ffi.cast(c_type, array.ctypes.data))

    def _new(self, shape: tuple[int, ...]) -> CTensor:
        capture = self._own_capture()
        free = capture.free if capture else self._free
        n = math.prod(shape)
        small = shape[0] <= RECYCLED_ROWS and n <= RECYCLED_VALUES
        if not small and not 0 < n <= RECYCLED_LARGE:
            return self._wrap(np.empty(shape, np.float32))
        home = free.setdefault(shape if small else (1 << (n - 1).bit_length(),), [])
        try:  # not `if home`: another thread may take the last one
            memory, ptr = home.pop()
        except IndexError:
            fresh = self._wrap(np.empty(shape if small else 1 << (n - 1).bit_length(), np.float32))
            memory, ptr = fresh.array, fresh.ptr
        return CTensor(memory if small else memory[:n].reshape(shape), ptr, home, memory)

    def tensor(self, array: NDArray[Any]) -> CTensor:
        self._not_replayable()
        return self._wrap(np.array(array, order="C"))

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> CTensor:
        self._not_replayable()
        kind = np.dtype(DTYPES[dtype][0])
        n = math.prod(shape) * kind.itemsize
        room = np.zeros(
            n + LINE, np.uint8
        )  # NumPy aligns to 16 bytes: a row of a K tile would lie in two lines
        first = -room.ctypes.data % LINE
        return self._wrap(room[first : first + n].view(kind).reshape(shape))

    def part(self, x: CTensor, index: tuple[int, ...], shape: tuple[int, ...]) -> CTensor:
        return self._wrap(x.array[index].reshape(shape))

    def numpy(self, x: CTensor) -> NDArray[Any]:
        self._not_replayable()  # whoever asks for values computes with them
        if x.home is None:
            return x.array
        if x.array.size <= RECYCLED_VALUES:
            return x.array.copy()  # recycled memory does not outlive x
        x.home = None  # not worth a copy: this memory is not recycled
        return x.array

    def weight(
        self, type: int, rows: int, cols: int, data: NDArray[np.uint8], *, pack: bool = True
    ) -> CWeight:
        out, src = ffi.new("pi_weight **"), ffi.from_buffer(data)
        code = lib.pi_weight_new(self.ctx, int(type), rows, cols, src, data.nbytes, pack, out)
        if code == lib.PI_ETYPE:
            raise ModelError(f"weight type {GGMLQuantizationType(type).name} has no kernel")
        if code:
            _fail(code, lib.pi_weight_new)
        return CWeight(out[0], (rows, cols), None if pack else src)

    def kernels(self) -> dict[str, str]:
        return {
            _text(lib.pi_kernel_name(i)): _text(lib.pi_ctx_kernel_level(self.ctx, i))
            for i in range(lib.pi_kernel_count())
        }

    # ---- matrices ------------------------------------------------------------------------------------------

    def matmul(self, a: CTensor, b: CTensor | CWeight) -> CTensor:
        if isinstance(b, CWeight):
            return NativeBackend.matmul_many(self, a, (b,))[
                0
            ]  # by name: `unfused` makes self's the default, over matmul
        (m, k), (_, n) = a.shape, b.shape
        y = self._new((m, n))
        self._call(lib.pi_matmul_rows, a.ptr, b.ptr, m, k, n, y.ptr)
        return y

    def matmul_many(self, x: CTensor, weights: Sequence[CWeight]) -> list[CTensor]:
        n = x.shape[0]
        ys = [self._new((n, w.shape[0])) for w in weights]
        w = [w.ptr for w in weights] + NULLS[len(weights) :]
        y = [y.ptr for y in ys] + NULLS[len(weights) :]
        self._call(lib.pi_matmul, *w, x.ptr, n, ffi.NULL, *y)
        return ys

    def matmul_add(self, x: CTensor, w: CWeight, residual: CTensor) -> CTensor:
        y = self._new(residual.shape)
        self._call(lib.pi_matmul, w.ptr, *NULLS[1:], x.ptr, x.shape[0], residual.ptr, y.ptr, *NULLS[1:])
        return y

    def gather_rows(self, w: CWeight, ids: Sequence[int]) -> CTensor:
        y = self._new((len(ids), w.shape[1]))
        self._call(lib.pi_gather_rows, w.ptr, ffi.new("int32_t[]", list(ids)), len(ids), y.ptr)
        return y

    # ---- rows and elements ---------------------------------------------------------------------------------

    def softmax_rows(self, x: CTensor) -> CTensor:
        y = self._new(x.shape)
        self._call(lib.pi_softmax_rows, x.ptr, *x.shape, y.ptr)
        return y

    def rms_norm(self, x: CTensor, weight: CTensor, eps: float) -> CTensor:
        y = self._new(x.shape)
        self._call(lib.pi_rms_norm, x.ptr, weight.ptr, *x.shape, eps, y.ptr)
        return y

    def rms_norm_heads(self, x: CTensor, weight: CTensor, eps: float) -> CTensor:
        y, head_dim = self._new(x.shape), weight.shape[1]
        self._call(lib.pi_rms_norm, x.ptr, weight.ptr, x.array.size // head_dim, head_dim, eps, y.ptr)
        return y

    def sum_squares_axis(self, x: CTensor) -> CTensor:
        y = self._new((x.shape[0], 1))
        self._call(lib.pi_sum_squares, x.ptr, *x.shape, y.ptr)
        return y

    def swiglu(self, gate: CTensor, up: CTensor) -> CTensor:
        y = self._new(up.shape)
        self._call(lib.pi_swiglu, gate.ptr, up.ptr, up.array.size, y.ptr)
        return y

    def silu(self, x: CTensor) -> CTensor:
        y = self._new(x.shape)
        self._call(lib.pi_silu, x.ptr, x.array.size, y.ptr)
        return y

    def add(self, a: CTensor, b: CTensor) -> CTensor:
        y = self._new(a.shape)
        self._call(lib.pi_add, a.ptr, b.ptr, a.array.size, y.ptr)
        return y

    def hadamard(self, a: CTensor, b: CTensor) -> CTensor:
        y = self._new(a.shape)
        self._call(lib.pi_hadamard, a.ptr, b.ptr, a.array.size, y.ptr)
        return y

    def apply_rope(
        self, x: CTensor, cos: CTensor, sin: CTensor, first: int, head_dim: int, neox: bool
    ) -> CTensor:
        y, (tokens, width), (n_pos, half) = self._new(x.shape), x.shape, cos.shape
        heads = width // head_dim
        if capture := self._own_capture():
            capture.held.append((cos, sin))
        self._call(
            lib.pi_rope, x.ptr, tokens, heads, head_dim, 2 * half, neox, cos.ptr, sin.ptr, n_pos, first, y.ptr
        )
        return y

    def rope_tables(
        self, first: int, n: int, rot: int, base: float, scale: float, factors: NDArray[np.float32] | None
    ) -> tuple[CTensor, CTensor]:
        cos, sin = (self.zeros((n, rot // 2)) for _ in range(2))
        divisors = ffi.NULL if factors is None else ffi.new("float[]", [float(f) for f in factors])
        code = lib.pi_rope_table(first, n, rot, base, scale, divisors, cos.ptr, sin.ptr)
        if code:
            _fail(code, lib.pi_rope_table)
        return cos, sin

    # ---- attention -----------------------------------------------------------------------------------------

    def fused_attention(self, q: CTensor, view: KVBufferView, n_heads: int, scale: float) -> CTensor:
        y = self._new(q.shape)
        self._attention(q, (view,), (q.shape[0],), n_heads, scale, y)
        return y

    def batched_attention(
        self, q: CTensor, views: Sequence[KVBufferView], tokens: Sequence[int], n_heads: int, scale: float
    ) -> CTensor:
        y = self._new(q.shape)
        self._attention(q, views, tokens, n_heads, scale, y)
        return y

    def _attention(
        self,
        q: CTensor,
        views: Sequence[KVBufferView],
        tokens: Sequence[int],
        n_heads: int,
        scale: float,
        y: CTensor,
    ) -> None:
        rows = (sum(tokens), n_heads * views[0].head_dim)
        if q.shape != rows:
            raise InputError(f"q {q.shape} is not {rows}, as the views and tokens of this attention want it")
        handles, counts = (
            ffi.new("pi_kv_view *[]", [self.handle(v) for v in views]),
            ffi.new("int64_t[]", list(tokens)),
        )
        mapped = self.map_attention(views, tokens, n_heads)
        self._call(lib.pi_attention, q.ptr, len(views), handles, counts, n_heads, scale, *mapped, y.ptr)
        if capture := self._own_capture():
            capture.attention.append((len(capture.calls) - 1, (views, tokens, n_heads)))

    def map_attention(
        self, views: Sequence[KVBufferView], tokens: Sequence[int], n_heads: int
    ) -> tuple[int, int]:
        """The plan of a step as pi_attention takes it: unit_of and tasks."""
        plan, threads = self.plan_attention(views, tokens, n_heads, self.limits)
        return (
            (lib.PI_UNIT_GROUP, 1) if plan is None else (UNITS[plan.unit], plan.tasks(threads, max(tokens)))
        )

    def kv_write(self, view: KVBufferView, k: CTensor, v: CTensor) -> None:
        check_rows(view.n_kv_heads, view.head_dim, k, v)
        self._call(lib.pi_kv_write, self.handle(view), k.ptr, v.ptr, k.shape[0])
        view.length += k.shape[0]

    def narrow_f16(self, x: CTensor) -> CTensor:
        y = self.zeros(x.shape, "f16")
        self._call(lib.pi_narrow_f16, x.ptr, x.array.size, y.ptr)
        return y

    @staticmethod
    def handle(view: KVBufferView) -> Any:
        """The C struct of a view, brought up to date."""
        if view.handle is None:
            h, tiles = ffi.new("pi_kv_view *"), view.layout == "tiles"
            row = row_bytes(view.dtype, view.head_dim)
            h.head_stride = view.block * row if tiles else row
            h.row_stride = view.n_kv_heads * row
            h.block, h.window = view.block, view.window
            h.layout, h.dtype = LAYOUTS[view.layout], DTYPES[view.dtype][2]
            h.n_kv_heads, h.head_dim = view.n_kv_heads, view.head_dim
            view.handle = h, [-1, None, None]
        h, seen = view.handle
        if seen[0] != view.stamp:
            seen[:] = [
                view.stamp,
                *(ffi.new("void *[]", [x.ptr for x in blocks]) for blocks in (view.k, view.v)),
            ]
            h.k, h.v = seen[1:]
        h.first, h.length, h.capacity = view.first, view.length, view.capacity
        return h

    # ---- one rounding or none to an element: NumPy serves -------------------------------------------------

    def scale(self, x: CTensor, factor: float, *, divide: bool = False) -> CTensor:
        return self.tensor((np.divide if divide else np.multiply)(x.array, np.float32(factor)))

    def add_scalar(self, x: CTensor, c: float) -> CTensor:
        return self.tensor(x.array + np.float32(c))

    def rsqrt_elem(self, x: CTensor) -> CTensor:
        return self.tensor(np.float32(1) / np.sqrt(x.array))

    def transpose_2d(self, x: CTensor) -> CTensor:
        return self.tensor(x.array.T)

    def broadcast_row_scalars(self, x: CTensor, cols: int) -> CTensor:
        return self.tensor(np.repeat(x.array, cols, axis=1))

    def repeat_row_as_matrix(self, x: CTensor, rows: int) -> CTensor:
        return self.tensor(np.repeat(x.array, rows, axis=0))

    def reshape_data(self, x: CTensor, shape: tuple[int, ...]) -> CTensor:
        return self.tensor(x.array.reshape(shape))

    def copy_2d_from_cols(self, x: CTensor, cols: int, first: int) -> CTensor:
        return self.tensor(x.array[:, first : first + cols])

    def copy_2d_into_cols(self, out: CTensor, x: CTensor, first: int) -> None:
        self._not_replayable()
        out.array[:, first : first + x.shape[1]] = x.array

    def copy_rows_2d(self, x: CTensor, first: int, rows: int) -> CTensor:
        return self.tensor(x.array[first : first + rows])

    def concat_dim0(self, a: CTensor, b: CTensor) -> CTensor:
        return self.tensor(np.concatenate([a.array, b.array]))


def _fail(code: int, function: Any) -> None:
    op = function.__name__.removeprefix("pi_")
    if code == lib.PI_ENOMEM:
        raise MemoryError(f"{op}: out of memory")
    raise ValueError(f"{op}: the C library refused its arguments (code {code})")


def _text(c_string: Any) -> str:
    return bytes(ffi.string(c_string)).decode()

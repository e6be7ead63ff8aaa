"""The ops on the GPU of a Mac: csrc/metal/, and csrc/NUMERICS.md section 6.

An op is still a call of the C library on pointers. Those that have a kernel are encoded instead, into one
list that runs when somebody needs values: once for a forward pass. What has none runs in C, on the same
memory, after what was encoded before. A kernel that meets values so small that a GPU may flush them says so,
and then the calls that it ran with are made after all, in C. For that, memory that is given back while the
list is open is not used again before it has run: no call writes over the inputs of an earlier one.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from .. import _metal, _pi
from ..errors import BackendError
from .cpus import default_threads
from .kv import KVBufferView
from .native import DTYPES, CTensor, CWeight, NativeBackend, chosen_level

ffi, lib = _pi.ffi, _pi.lib
gpu_ffi, gpu_lib = _metal.ffi, _metal.lib
PAGE = 16384
ERROR_BYTES = 1 << 14
HELD_BYTES = 1 << 28  # given back while the list is open: more than that, and it runs
SMALL_WORK = 1 << 18  # multiplications, or values: less than that does not open a list
POOLED = 1 << 22  # values: memory of results up to there is kept for the next

DTYPE_NAMES = {lib.PI_F32: "f32", lib.PI_F16: "f16"}
STEMS = {
    lib.PI_F32: "f32",
    lib.PI_F16: "f16",
    lib.PI_Q4_0: "q4_0",
    lib.PI_Q4_1: "q4_1",
    lib.PI_Q5_0: "q5_0",
    lib.PI_Q8_0: "q8_0",
    lib.PI_Q4_K: "q4_k",
    lib.PI_Q5_K: "q5_k",
    lib.PI_Q6_K: "q6_k",
}
FLOATS = ("f32", "f16")
# What `matvec` puts into threadgroup memory for a lane and a block: integer and step of each scale group, and
# the minimum.
STEP_VALUES = {"q4_0": 2, "q4_1": 3, "q5_0": 2, "q8_0": 2, "q4_k": 3, "q5_k": 3, "q6_k": 4}
# Threads to a group, by a kernel's name or its beginning; FLAT: the others.
FLAT = 256
THREADS = {"matvec": 256, "matmul": 128, "matmul_f32": 64, "matmul_f16": 64, "softmax": 256, "attention": 256}
KERNELS = [
    *("guard", "add", "hadamard", "silu", "swiglu", "quantize", "rms_norm", "softmax", "rope"),
    *(
        f"{op}_{stem}"
        for stem in STEMS.values()
        for op in ("matvec", "matmul", "gather")
        if (op, stem[0]) != ("matvec", "f")
    ),
    *(f"{op}_{dtype}" for dtype in ("f32", "f16") for op in ("attention", "kv_write")),
]
# What csrc/metal/*.metal call by these names.
SIMD, QUANTIZE_BLOCKS, FOLD_CHUNK, MATVEC_CHUNK, TILE, TILE_SIMDS, FLOAT_ROWS, FLOAT_TOKENS = (
    32,
    8,
    1024,
    32,
    32,
    4,
    64,
    4,
)
ROWS, SUM_CHUNK = 8, 256
TILE_FROM = 8  # tokens: below, each is a matrix times a row
SCORE_BYTES = 1 << 25  # of attention's scores to a dispatch
MOST_BLOCKS, MOST_IDS, MOST_HEAD_DIM = 4096 // 8, 4096 // 4, 512
SHORT_F32, SHORT_F16 = (
    2.0**-40,
    2.0**-79,
)  # what an input may not be below, but for zero, by the type of the weights

Call = tuple[Any, Any, tuple[Any, ...]]  # function, context, further arguments


class Home(list[Any]):
    """A free list whose memory waits while the GPU's list is open."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def append(self, item: Any) -> None:
        if self.gpu.open:
            self.gpu.hold(item[0].nbytes, lambda: list.append(self, item))
        else:
            super().append(item)


class Arena:
    """Pages of packed weights, known to the GPU as long as a weight in them is used."""

    def __init__(self, gpu: Gpu, base: Any, size: int) -> None:
        self.gpu, self.base = gpu, base
        with gpu.lock:
            if gpu_lib.pi_gpu_wrap(gpu.handle, base, size):
                raise BackendError(f"backend metal: the GPU does not take {size} bytes of weights")

    def __del__(self) -> None:
        with self.gpu.lock:
            self.gpu.finish()
            gpu_lib.pi_gpu_forget(self.gpu.handle, self.base)


class Gpu:
    """The system's GPU, its kernels, the memory that it sees, and the list of what is encoded.

    source: the kernels, None for those that the package is built with. Raises BackendError if there is no GPU
    or a kernel cannot be used.
    """

    def __init__(self, source: str | None = None) -> None:
        self.lock = threading.RLock()
        self.open = False  # whether anything is encoded
        self.calls: list[Call] = []  # that are encoded, to be made in C if need be
        self.kept: list[Any] = []  # what they point to
        self.held: list[Callable[[], None]] = []  # what gives memory back, once the list has run
        self.held_bytes = 0
        self.encoded: dict[str, int] = dict.fromkeys(KERNELS, 0)  # dispatches by kernel
        self.runs = self.repeated = 0  # lists that ran; those made again in C
        self.homes: dict[int, Home] = {}
        self.arenas: WeakValueDictionary[int, Arena] = WeakValueDictionary()
        self.weights: WeakValueDictionary[Any, MetalWeight] = WeakValueDictionary()  # by address
        self.error = gpu_ffi.new("char[]", ERROR_BYTES)
        text = gpu_lib.pi_gpu_source() if source is None else gpu_ffi.new("char[]", source.encode())
        handle = gpu_lib.pi_gpu_open(text, self.error, ERROR_BYTES)
        if handle == gpu_ffi.NULL:
            raise BackendError(f"backend metal: {self.said()}")
        self.handle = gpu_ffi.gc(handle, gpu_lib.pi_gpu_close)
        self.name = gpu_ffi.string(gpu_lib.pi_gpu_name(handle)).decode()
        self.limits = gpu_ffi.new("pi_gpu_limits *")
        gpu_lib.pi_gpu_limits_of(handle, self.limits)
        if not self.limits.simd_matrices:
            raise BackendError(
                f"backend metal: {self.name} has no SIMD-group matrices; it takes an Apple M1 or later"
            )
        self.kernels = {name: self.kernel(name) for name in KERNELS}

    def said(self) -> str:
        return bytes(gpu_ffi.string(self.error)).decode(errors="replace")

    def kernel(self, name: str) -> int:
        threads = gpu_ffi.new("int64_t *")
        number: int = gpu_lib.pi_gpu_kernel(self.handle, name.encode(), threads, self.error, ERROR_BYTES)
        if number < 0:
            raise BackendError(f"backend metal: kernel {name}: {self.said()}")
        if threads[0] < group_threads(name):
            raise BackendError(
                f"backend metal: kernel {name}: {self.name} runs {threads[0]} of its threads at once"
            )
        return number

    # ---- memory --------------------------------------------------------------------------------------------

    def memory(self, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """Zeros that the GPU sees."""
        n = math.prod(shape) * np.dtype(dtype).itemsize
        with self.lock:
            base = gpu_lib.pi_gpu_alloc(self.handle, max(n, 1))
        if base == gpu_ffi.NULL:
            raise MemoryError(f"backend metal: no {n} bytes of memory")
        owned = gpu_ffi.gc(base, lambda base: self.hold(n, lambda: gpu_lib.pi_gpu_forget(self.handle, base)))
        return np.frombuffer(gpu_ffi.buffer(owned, max(n, 1)), dtype, math.prod(shape)).reshape(shape)

    def hold(self, size: int, give_back: Callable[[], None]) -> None:
        """Gives memory back when nothing that is encoded uses it any more."""
        with self.lock:
            if not self.open:
                return give_back()
            self.held.append(give_back)
            self.held_bytes += size

    def arena(self, pages: Any, size: int) -> Arena:
        at = int(ffi.cast("uintptr_t", pages))
        arena = self.arenas.get(at)
        if arena is None:
            self.arenas[at] = arena = Arena(self, gpu_ffi.cast("void *", at), size)
        return arena

    # ---- the list ------------------------------------------------------------------------------------------

    def encode(
        self,
        name: str,
        constants: bytes,
        data: Sequence[Any],
        groups: tuple[int, ...],
        memory: int = 0,
        table: Any = b"",
    ) -> bool:
        """One dispatch of `groups` in x, y and z, with `memory` bytes to a threadgroup. False: an address in
        data is not of memory that the GPU sees.
        """
        at = [gpu_ffi.cast("void *", int(ffi.cast("uintptr_t", p))) for p in data]
        shape = (*groups, *(1,) * (3 - len(groups)), group_threads(name), memory)
        code = gpu_lib.pi_gpu_encode(
            *(self.handle, self.kernels[name], constants, len(constants)),
            *(gpu_ffi.from_buffer(table), len(table), at, len(at), shape),
        )
        if code not in (gpu_lib.PI_GPU_OK, gpu_lib.PI_GPU_EUNKNOWN):
            raise BackendError(f"backend metal: kernel {name} was not encoded (code {code})")
        if code == gpu_lib.PI_GPU_OK:
            self.open = True
            self.encoded[name] += 1
        return bool(code == gpu_lib.PI_GPU_OK)

    def finish(self) -> None:
        """Runs what is encoded and waits for it."""
        if not self.open:
            return
        with self.lock:
            if not self.open:  # another thread has run it
                return
            small = gpu_ffi.new("int *")
            code = gpu_lib.pi_gpu_finish(self.handle, small, self.error, ERROR_BYTES)
            calls, held = self.calls, self.held
            self.calls, self.held, self.held_bytes, self.open = [], [], 0, False
            self.runs += 1
            try:
                if code:
                    raise BackendError(f"backend metal: {self.said()}")
                if small[0]:
                    self.repeated += 1
                    for function, ctx, args in calls:
                        if function(ctx, *args):
                            raise BackendError(
                                f"backend metal: {function.__name__} refused what the GPU has run"
                            )
            finally:
                calls.clear()
                self.kept.clear()
                for give_back in held:
                    give_back()


def group_threads(name: str) -> int:
    """Threads of a kernel's groups."""
    return THREADS.get(name) or THREADS.get(name.split("_")[0], FLAT)


class MetalWeight(CWeight):
    """A packed matrix that the GPU sees, with kernels of its type."""

    def __init__(self, weight: CWeight, gpu: Gpu, stem: str) -> None:
        self.ptr, self.shape, self.src = weight.ptr, weight.shape, weight.src
        self.stem, self.gpu = stem, gpu
        data, group, pages, size = (
            ffi.new(kind) for kind in ("void **", "int64_t *", "void **", "int64_t *")
        )
        lib.pi_weight_memory(self.ptr, data, group, pages, size)
        self.data, self.group_bytes = data[0], group[0]
        self.arena: Arena | None = gpu.arena(pages[0], size[0])

    def __del__(self) -> None:
        self.arena = None  # before the weight goes, and the pages with it


class MetalBackend(NativeBackend):
    """The C library with an Apple GPU beside it.

    threads: for what runs in C, None: one per physical core. small_work: from how much work on the GPU's list
    is opened; gpu: another than the one that all backends of the process share, checked already.
    """

    def __init__(
        self, threads: int | None = None, *, small_work: int | None = None, gpu: Gpu | None = None
    ) -> None:
        super().__init__("metal", chosen_level(), threads or default_threads())
        self.gpu = gpu or shared_gpu()
        self.small_work = SMALL_WORK if small_work is None else small_work

    def kernels(self) -> dict[str, str]:
        return super().kernels() | dict.fromkeys(KERNELS, "metal")

    # ---- storage -------------------------------------------------------------------------------------------

    def _new(self, shape: tuple[int, ...]) -> CTensor:
        gpu, n = self.gpu, math.prod(shape)
        if not 0 < n <= POOLED:
            return self._wrap(gpu.memory(np.float32, shape))
        size = max(1 << (n - 1).bit_length(), PAGE // 4)
        home = gpu.homes.setdefault(size, Home(gpu))
        try:
            memory, ptr = home.pop()
        except IndexError:
            fresh = self._wrap(gpu.memory(np.float32, (size,)))
            memory, ptr = fresh.array, fresh.ptr
        return CTensor(memory[:n].reshape(shape), ptr, home, memory)

    def tensor(self, array: NDArray[Any]) -> CTensor:
        array = np.asarray(array)
        memory = self.gpu.memory(array.dtype, array.shape)
        memory[...] = array
        return self._wrap(memory)

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> CTensor:
        return self._wrap(self.gpu.memory(DTYPES[dtype][0], shape))

    def weight(
        self, type: int, rows: int, cols: int, data: NDArray[np.uint8], *, pack: bool = True
    ) -> CWeight:
        plain, stem = super().weight(type, rows, cols, data, pack=pack), STEMS.get(int(type))
        if not pack or stem is None or (stem == "f32" and has_short(data)):
            return plain
        weight = MetalWeight(plain, self.gpu, stem)
        self.gpu.weights[weight.ptr] = weight
        return weight

    def capture(self, forward: Callable[[], CTensor], views: Sequence[KVBufferView]) -> tuple[CTensor, None]:
        return forward(), None  # the list would have to be encoded anew for each token

    # ---- calls ---------------------------------------------------------------------------------------------

    def _call(self, function: Any, *args: Any) -> None:
        """On the GPU's list, or in C after all that is on it."""
        encode = ENCODERS.get(function)
        with self.gpu.lock:
            if self.gpu.held_bytes > HELD_BYTES:
                self.gpu.finish()
            again = encode(self, *args) if encode else None
            if again is None:
                self.gpu.finish()
                super()._call(function, *args)
            else:
                self.gpu.calls.append((function, self.ctx, again))

    def _worth(self, work: int) -> bool:
        return self.gpu.open or work >= self.small_work

    # ---- encoders ------------------------------------------------------------------------------------------
    # From the args of a C function to dispatches. They give the args with which the call can be made again,
    # or None where it is to be made in C.

    def _each(self, name: str, n: int, *data: Any, limit: float = 0.0) -> bool:
        """A thread to each of n values."""
        bits = struct.pack("<f", limit)
        return self.gpu.encode(name, struct.pack("<I4s", n, bits), data, (-(-n // FLAT),))

    def _encode_add(self, a: Any, b: Any, n: int, y: Any) -> tuple[Any, ...] | None:
        return (a, b, n, y) if self._worth(n) and self._each("add", n, a, b, y) else None

    def _encode_hadamard(self, a: Any, b: Any, n: int, y: Any) -> tuple[Any, ...] | None:
        return (a, b, n, y) if self._worth(n) and self._each("hadamard", n, a, b, y) else None

    def _encode_silu(self, x: Any, n: int, y: Any) -> tuple[Any, ...] | None:
        return (x, n, y) if self._worth(n) and self._each("silu", n, x, y) else None

    def _encode_swiglu(self, gate: Any, up: Any, n: int, y: Any) -> tuple[Any, ...] | None:
        return (gate, up, n, y) if self._worth(n) and self._each("swiglu", n, gate, up, y) else None

    def _encode_rms_norm(
        self, x: Any, w: Any, rows: int, n: int, eps: float, y: Any
    ) -> tuple[Any, ...] | None:
        if not self._worth(rows * n):
            return None
        done = self.gpu.encode("rms_norm", struct.pack("<If", n, eps), (x, w, y), (rows,), 4 * FOLD_CHUNK)
        return (x, w, rows, n, eps, y) if done else None

    def _encode_softmax_rows(self, x: Any, rows: int, n: int, y: Any) -> tuple[Any, ...] | None:
        if not self._worth(rows * n):
            return None
        done = self.gpu.encode("softmax", struct.pack("<I", n), (x, y), (rows,), 4 * THREADS["softmax"])
        return (x, rows, n, y) if done else None

    def _encode_rope(self, *args: Any) -> tuple[Any, ...] | None:
        x, tokens, heads, dim, rot, neox, cos, sin, n_pos, first, y = args
        if not self._worth(tokens * heads * dim) or first + tokens > n_pos:
            return None
        half = rot // 2
        pairs = half + dim - rot
        constants = struct.pack("<7I", pairs, heads, dim, half, first, *((1, half) if neox else (2, 1)))
        done = self.gpu.encode("rope", constants, (x, cos, sin, y), (-(-pairs // FLAT), heads, tokens))
        return args if done else None

    def _encode_gather_rows(self, w: Any, ids: Any, n: int, y: Any) -> tuple[Any, ...] | None:
        weight = self.gpu.weights.get(w)
        if weight is None or n > MOST_IDS or not self._worth(n * weight.shape[1]):
            return None
        rows, cols = weight.shape
        if not all(0 <= i < rows for i in ids):
            return None  # C says so
        constants = struct.pack("<2IQ", cols, cols // 32, weight.group_bytes)
        groups = -(-cols // FLAT), n
        done = self.gpu.encode(
            f"gather_{weight.stem}", constants, (weight.data, y), groups, table=bytes(ffi.buffer(ids, 4 * n))
        )
        return (w, ids, n, y) if done else None

    def _encode_matmul(self, *args: Any) -> tuple[Any, ...] | None:
        *ptrs, x, tokens, add, y0, y1, y2 = args
        given = [(w, y) for w, y in zip(ptrs, (y0, y1, y2), strict=True) if w != ffi.NULL]
        weights = [w for ptr, _ in given if (w := self.gpu.weights.get(ptr)) is not None]
        if len(weights) < len(given) or len({w.shape[1] for w in weights}) != 1 or tokens < 1:
            return None
        cols, outputs = weights[0].shape[1], sum(w.shape[0] for w in weights)
        if not self._worth(tokens * cols * outputs):
            return None
        blocks, n = cols // 32, tokens * cols
        codes: tuple[Any, ...] = ()
        if any(
            w.stem not in FLOATS for w in weights
        ):  # int8 codes, dx, and sums times dx, in one piece of memory
            memory = self._new((-(-n // 4) + 2 * tokens * blocks,)).ptr
            codes = memory, memory + -(-n // 4), memory + -(-n // 4) + tokens * blocks
            groups = -(-blocks // QUANTIZE_BLOCKS), tokens
            if not self.gpu.encode("quantize", struct.pack("<2I", cols, blocks), (x, *codes), groups):
                return None
        floats = [w.stem for w in weights if w.stem in FLOATS]
        if floats and not self._each("guard", n, x, limit=SHORT_F32 if "f32" in floats else SHORT_F16):
            return None
        for i, (w, (_, y)) in enumerate(zip(weights, given, strict=True)):
            rows = w.shape[0]
            more = add if i == 0 else ffi.NULL
            constants = struct.pack("<4IQI4x", rows, cols, blocks, tokens, w.group_bytes, more != ffi.NULL)
            if w.stem in FLOATS:
                name, data, memory = f"matmul_{w.stem}", (w.data, x, more, y), 0
                groups = -(-rows // FLOAT_ROWS), -(-tokens // FLOAT_TOKENS)
            else:
                data = (w.data, *codes, more, y)
                if tokens >= TILE_FROM:
                    name, memory = f"matmul_{w.stem}", 4 * TILE * (32 + TILE + TILE)
                    groups = -(-rows // TILE), -(-tokens // TILE)
                else:
                    name, memory = f"matvec_{w.stem}", 4 * MATVEC_CHUNK * SIMD * STEP_VALUES[w.stem]
                    groups = -(-rows // SIMD), tokens
            if not self.gpu.encode(name, constants, data, groups, memory):
                return None
        return args

    def _encode_kv_write(self, view: Any, k: Any, v: Any, tokens: int) -> tuple[Any, ...] | None:
        h = view[0]
        work = tokens * h.n_kv_heads * h.head_dim
        if tokens < 1 or not self._worth(work) or h.length + tokens > h.capacity:
            return None
        places = self._places(h, h.length, h.length + tokens)
        if places is None:
            return None
        base, table, name = places
        constants = struct.pack("<5I", h.n_kv_heads, h.head_dim, h.length, h.block, h.head_stride)
        groups = -(-h.head_dim // FLAT), h.n_kv_heads, tokens
        if not self.gpu.encode(f"kv_write_{name}", constants, (base, k, v), groups, table=table):
            return None
        again = self._snapshot(h, h.length + tokens)
        h.length += tokens
        return again, k, v, tokens

    def _encode_attention(self, *args: Any) -> tuple[Any, ...] | None:
        q, n_seqs, views, counts, n_heads, scale, unit_of, tasks, y = args
        keys = sum(views[i].length * counts[i] for i in range(n_seqs))
        if not self._worth(keys * n_heads * views[0].head_dim * 2):
            return None
        steps, at = [], 0
        for i in range(n_seqs):
            h, tokens = views[i][0], counts[i]
            places = self._places(h, h.first, h.length)
            if (
                places is None
                or h.head_dim > MOST_HEAD_DIM
                or not 0 < tokens <= h.length - h.first
                or n_heads % h.n_kv_heads
            ):
                return None
            steps.append((h, tokens, places, at * n_heads * h.head_dim))
            at += tokens
        for h, tokens, (base, table, name), skip in steps:
            heads, dim = n_heads // h.n_kv_heads, h.head_dim
            rows = tokens * heads
            step = rows
            while (
                step > ROWS
                and -(-step // ROWS) * ROWS * h.n_kv_heads * 4 * (h.length - h.first) > SCORE_BYTES
            ):
                step = -(-step // 2)
            step = -(-step // ROWS) * ROWS
            for row in range(0, rows, step):
                end = min(row + step, rows)
                row_blocks = -(-(end - row) // ROWS)
                from_, to = sees(h, tokens, row // heads)[0], sees(h, tokens, (end - 1) // heads)[1]
                columns = to - from_
                constants = struct.pack(
                    "<13If",
                    *(heads, n_heads, dim, tokens, h.length, h.first, h.window, h.block, h.head_stride),
                    *(row, row_blocks, from_, columns, scale),
                )
                scores = self._new((row_blocks * ROWS * h.n_kv_heads * columns,))
                data = q + skip, base, y + skip, scores.ptr
                memory = 4 * ROWS * (dim + SUM_CHUNK)
                if not self.gpu.encode(
                    f"attention_{name}", constants, data, (row_blocks, h.n_kv_heads), memory, table
                ):
                    return None
        handles = ffi.new(
            "pi_kv_view *[]", [self._snapshot(views[i][0], views[i].length) for i in range(n_seqs)]
        )
        return q, n_seqs, handles, counts, n_heads, scale, unit_of, tasks, y

    def _snapshot(self, h: Any, end: int) -> Any:
        """A view as it is now, with the blocks of tokens up to `end`: to be used when the list has run."""
        copy, n = ffi.new("pi_kv_view *", h), -(-h.capacity // h.block)
        keys, values = (ffi.new("void *[]", n) for _ in range(2))
        for to, blocks in ((keys, h.k), (values, h.v)):  # whose own lists may end with those
            ffi.memmove(to, blocks, -(-end // h.block) * ffi.sizeof("void *"))
        copy.k, copy.v = keys, values
        self.gpu.kept.append((copy, keys, values))
        return copy

    def _places(self, h: Any, start: int, end: int) -> tuple[Any, bytes, str] | None:
        """Where the blocks that hold tokens start..end lie: an address, a table of distances from it in units
        of 4 bytes, (K, V) by block, and the type. None for what no kernel reads.
        """
        first, n = start // h.block, -(-end // h.block)
        if h.layout != lib.PI_TILES or h.dtype not in DTYPE_NAMES or not first < n <= MOST_BLOCKS:
            return None
        at = np.zeros((n, 2), np.uint64)
        for column, blocks in enumerate((h.k, h.v)):
            at[first:, column] = np.frombuffer(ffi.buffer(blocks, 8 * n), np.uint64)[first:]
        base = gpu_ffi.new("void **")
        lowest = int(at[first:].min())
        size = gpu_lib.pi_gpu_memory(self.gpu.handle, gpu_ffi.cast("void *", lowest), base)
        begin = int(gpu_ffi.cast("uintptr_t", base[0]))
        block_bytes = h.n_kv_heads * h.head_stride
        if not size or int(at[first:].max()) + block_bytes > begin + size or (at[first:] % 4).any():
            return None
        distances = np.zeros((n, 2), np.uint64)
        distances[first:] = (at[first:] - np.uint64(lowest)) // 4
        return ffi.cast("uint8_t *", lowest), distances.astype(np.uint32).tobytes(), DTYPE_NAMES[h.dtype]


ENCODERS: dict[Any, Callable[..., tuple[Any, ...] | None]] = {
    lib.pi_add: MetalBackend._encode_add,
    lib.pi_hadamard: MetalBackend._encode_hadamard,
    lib.pi_silu: MetalBackend._encode_silu,
    lib.pi_swiglu: MetalBackend._encode_swiglu,
    lib.pi_rms_norm: MetalBackend._encode_rms_norm,
    lib.pi_softmax_rows: MetalBackend._encode_softmax_rows,
    lib.pi_rope: MetalBackend._encode_rope,
    lib.pi_gather_rows: MetalBackend._encode_gather_rows,
    lib.pi_matmul: MetalBackend._encode_matmul,
    lib.pi_kv_write: MetalBackend._encode_kv_write,
    lib.pi_attention: MetalBackend._encode_attention,
}


def _after_the_list(name: str) -> Callable[..., Any]:
    op = getattr(NativeBackend, name)

    def call(self: MetalBackend, *args: Any, **kwargs: Any) -> Any:
        self.gpu.finish()
        return op(self, *args, **kwargs)

    return call


# Where NumPy reads or writes what the GPU may not have computed yet.
for _name in (
    *("numpy", "scale", "add_scalar", "rsqrt_elem", "transpose_2d", "broadcast_row_scalars"),
    *(
        "repeat_row_as_matrix",
        "reshape_data",
        "copy_2d_from_cols",
        "copy_2d_into_cols",
        "copy_rows_2d",
        "concat_dim0",
    ),
):
    setattr(MetalBackend, _name, _after_the_list(_name))


def sees(h: Any, tokens: int, t: int) -> tuple[int, int]:
    """The tokens from..to that query t of the last `tokens` attends to (KVBufferView.sees)."""
    to = h.length - tokens + t + 1
    return max(h.first, to - h.window) if h.window else h.first, to


def has_short(data: NDArray[np.uint8]) -> bool:
    """Whether f32 weights have values whose products may end below the smallest normal one."""
    size = np.abs(np.ascontiguousarray(data).view("<f4"))
    return bool(((size > 0) & (size < SHORT_F32)).any())


# ---- the check at the start --------------------------------------------------------------------------------

_shared: list[Gpu] = []
_sharing = threading.Lock()


def shared_gpu() -> Gpu:
    """The process's GPU, opened and checked once. Raises BackendError if it cannot be used."""
    with _sharing:
        if not _shared:
            gpu = Gpu()
            check(gpu)
            _shared.append(gpu)
        return _shared[0]


def check(gpu: Gpu) -> None:
    """Runs every kernel on small inputs and compares with plain C. Raises BackendError that names the first
    whose bytes differ, or that was not run.
    """
    ops, plain = MetalBackend(1, small_work=0, gpu=gpu), NativeBackend("scalar", "ref", 1)
    for name, case in CHECKS.items():
        for kind in ("plain", "odd", "small"):
            repeated = gpu.repeated
            with np.errstate(all="ignore"):
                got, want = (case(backend, Values(kind)) for backend in (ops, plain))
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                if differing := int((a.view(np.uint32) != b.view(np.uint32)).sum()):
                    raise BackendError(
                        f"backend metal: kernel {name} does not compute on {gpu.name} what plain C does: "
                        f"{differing} of {a.size} differ ({kind} values, result {i})"
                    )
            if kind == "plain" and gpu.repeated > repeated:
                raise BackendError(
                    f"backend metal: kernel {name} on {gpu.name} finds ordinary values too small"
                )
    if idle := [name for name, n in gpu.encoded.items() if not n]:
        raise BackendError(f"backend metal: the check did not run kernel {idle[0]}")


class Values:
    """Random values of the check. odd: zeros of both signs, ties, large and subnormal ones among them; small:
    rows of such sizes that what is computed of them is subnormal, or nearly.
    """

    def __init__(self, kind: str) -> None:
        self.random, self.kind, self.odd = np.random.RandomState(5), kind, kind != "plain"

    def __call__(self, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        x = (self.random.randint(-(1 << 23), 1 << 23, shape) * (2.0**-22 * scale)).astype(np.float32)
        x[x == 0] = 1
        if self.kind == "small":
            sizes = self.random.choice([-130, -122, -105, -99, -90, -64, -63], (*shape[:-1], 1))
            x = np.ldexp(x, sizes).astype(np.float32)
        elif self.odd:
            odd = [
                0.0,
                -0.0,
                0.5,
                -2.5,
                127.5,
                1e4,
                -90.0,
                -104.0,
                2.0**-126,
                -(2.0**-127),
                2.0**-149,
                1e-30,
                -3e-20,
            ]
            some = self.random.randint(0, 9, shape) == 0
            x[some] = self.random.choice(np.array(odd, np.float32), shape)[some]
        return x

    def weight(self, stem: str, rows: int, cols: int) -> NDArray[np.uint8]:
        """Rows of a matrix as GGUF has them."""
        if stem in FLOATS:
            kind = np.float32 if stem == "f32" else np.float16
            x = np.ldexp(self.random.randint(-1000, 1000, (rows, cols)), -12).astype(kind)
            if self.odd and stem == "f16":
                x[::3, ::5] = np.float16(2.0**-24)
            return x.view(np.uint8)
        block, size, halves = BLOCKS[stem]
        raw = self.random.randint(0, 256, (rows, cols // block, size)).astype(np.uint8)
        for at in halves:
            d = np.ldexp(self.random.randint(-1000, 1000, (rows, cols // block, 1)), -14).astype(np.float16)
            if self.odd:
                d[::3] = self.random.choice(
                    np.array([0.0, -0.0, 2.0**-24, 2.0**-15, 60000.0], np.float16), d[::3].shape
                )
            raw[..., at : at + 2] = d.view(np.uint8)
        return raw.reshape(rows, -1)


# Of quantised types: values and bytes of a block, and where its halves lie.
BLOCKS = {
    "q4_0": (32, 18, (0,)),
    "q4_1": (32, 20, (0, 2)),
    "q5_0": (32, 22, (0,)),
    "q8_0": (32, 34, (0,)),
    "q4_k": (256, 144, (0, 2)),
    "q5_k": (256, 176, (0, 2)),
    "q6_k": (256, 210, (208,)),
}
Check = Callable[[NativeBackend, Values], list[NDArray[Any]]]


def _elements(op: str, n_inputs: int) -> Check:
    def run(ops: NativeBackend, values: Values) -> list[NDArray[Any]]:
        return [
            ops.numpy(getattr(ops, op)(*(ops.tensor(values(1, n, scale=8)) for _ in range(n_inputs))))
            for n in (1, 255, 257)
        ]

    return run


def _rows(op: str) -> Check:
    def run(ops: NativeBackend, values: Values) -> list[NDArray[Any]]:
        results = []
        for rows, n, eps in ((3, 1, 0.0), (2, 33, 1e-5), (6, 40, 0.0), (1, 1025, 1e-5)):
            x, w = ops.tensor(values(rows, n, scale=4)), ops.tensor(values(1, n))
            if op == "softmax" and values.kind == "small":
                x = ops.tensor(np.linspace([-110] * rows, [0] * rows, n, dtype=np.float32, axis=1))
            results.append(ops.numpy(ops.rms_norm(x, w, eps) if op == "rms_norm" else ops.softmax_rows(x)))
        return results

    return run


def _rope(ops: NativeBackend, values: Values) -> list[NDArray[Any]]:
    results = []
    for dim, rot, neox in ((6, 6, True), (40, 18, False)):
        cos, sin = ops.rope_tables(100, 5, rot, 1e4, 1.0, None)
        x = ops.tensor(values(3, 2 * dim))
        results.append(ops.numpy(ops.apply_rope(x, cos, sin, 1, dim, neox)))
    return results


def _weights(stem: str, tokens: Sequence[int], most: int) -> Check:
    number = next(number for number, name in STEMS.items() if name == stem)

    def run(ops: NativeBackend, values: Values) -> list[NDArray[Any]]:
        results = []
        for rows, blocks in ((33, 1), (5, most)):
            cols = 35 * blocks if stem in FLOATS else BLOCKS[stem][0] * blocks
            w = ops.weight(number, rows, cols, values.weight(stem, rows, cols))
            if not tokens:
                results.append(ops.numpy(ops.gather_rows(w, [rows - 1, 0, 3])))
            for n in tokens:
                x, residual = ops.tensor(values(n, cols)), ops.tensor(values(n, rows))
                results.append(ops.numpy(ops.matmul_many(x, [w])[0]))  # in a list of its own
                results.append(ops.numpy(ops.matmul_add(x, w, residual)))
        return results

    return run


def _attention(dtype: str, write: bool) -> Check:
    """Two blocks of memory, grouped heads, one query and several; with a window. write: what is in memory."""

    def run(ops: NativeBackend, values: Values) -> list[NDArray[Any]]:
        results, n_kv, dim, block = [], 2, 20, 32
        memory = ops.zeros((2, 2, n_kv * block * dim), dtype)
        k, v = ([ops.part(memory, (b, i), (n_kv * block * dim,)) for b in range(2)] for i in (0, 1))
        for heads, window in ((3, 0), (2, 9)):
            view = KVBufferView(k, v, "tiles", dtype, n_kv, dim, 0, 64, 32, window=window)
            for tokens in (1, 36, 1):
                new = [ops.tensor(values(tokens, n_kv * dim)) for _ in range(2)]
                q = ops.tensor(values(tokens, n_kv * heads * dim, scale=0.5))
                ops.kv_write(view, *new)
                y = ops.fused_attention(q, view, n_kv * heads, dim**-0.5)
                results.append(ops.numpy(memory).view(np.uint16).astype(np.uint32) if write else ops.numpy(y))
        return results

    return run


CHECKS: dict[str, Check] = {
    "add": _elements("add", 2),
    "hadamard": _elements("hadamard", 2),
    "silu": _elements("silu", 1),
    "swiglu": _elements("swiglu", 2),
    "rms_norm": _rows("rms_norm"),
    "softmax": _rows("softmax"),
    "rope": _rope,
    **{f"gather_{stem}": _weights(stem, (), 2) for stem in STEMS.values()},
    **{f"matvec_{stem}": _weights(stem, (1, 3), 33 * 32 // BLOCKS[stem][0]) for stem in BLOCKS},
    **{f"matmul_{stem}": _weights(stem, (9, 33), 2) for stem in BLOCKS},
    **{f"matmul_{stem}": _weights(stem, (1, 5), 3) for stem in FLOATS},
    **{f"kv_write_{dtype}": _attention(dtype, True) for dtype in ("f32", "f16")},
    **{f"attention_{dtype}": _attention(dtype, False) for dtype in ("f32", "f16")},
}

"""The kernel check: data makers, memory that shows stray accesses, calls into C, comparison of bytes.

An op is called by its C name on arrays: `Native.op("pi_exp", x, x.size, Out(x.shape))`. Each is copied to
where a `memory` puts it: `Painted` surrounds it with a pattern and aligns it as badly as its type allows,
`Fenced` lays it against an inaccessible page. Results are held against pyinfer/backend/reference.py and
kv.py, which share no code with C.

Every output belongs to one fold, so the reference runs once on the largest shape and is sliced for the rest.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from pyinfer import _pi
from pyinfer.backend import kv
from pyinfer.backend import reference as ref
from pyinfer.backend.native import levels

ffi, lib = _pi.ffi, _pi.lib
Array = NDArray[Any]
f32 = np.float32

LEVELS = [name for name, runs in levels().items() if runs]
TYPES = {
    name: getattr(lib, f"PI_{name}")
    for name in (
        *("F32", "F16", "Q4_1", "Q8_0"),
        *(
            "BF16",
            "Q4_0",
            "Q5_0",
            "Q5_1",
            "Q2_K",
            "Q3_K",
            "Q4_K",
            "Q5_K",
            "Q6_K",
            "IQ4_NL",
            "IQ4_XS",
            "MXFP4",
        ),
    )
}
FLOATS = ("F32", "F16", "BF16")
BLOCK = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]][0] for name in TYPES}  # values in one
ROWS, TILES = lib.PI_ROWS, lib.PI_TILES
GROUP, HEAD, SPLIT = lib.PI_UNIT_GROUP, lib.PI_UNIT_HEAD, lib.PI_UNIT_SPLIT
STORED = {"f32": np.float32, "f16": np.float16, "q8_0": np.uint16}  # what a cache's memory is an array of

# ---- the comparison ----------------------------------------------------------------------------------------


def check(op: str, level: str, seed: int, shape: Any, got: Array, want: Array) -> None:
    """Bytes of `got` = bytes of `want`; else an AssertionError that says where the first difference lies."""
    where = f"{op} level={level} seed={seed} shape={shape}"
    assert got.shape == want.shape, f"{where}: result is {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{where}: result is {got.dtype}, expected {want.dtype}"
    unsigned = f"u{got.dtype.itemsize}"
    a, b = (np.ascontiguousarray(x).view(unsigned) for x in (got, want))
    if np.array_equal(a, b):
        return
    differing = np.argwhere(a != b)
    i = tuple(int(n) for n in differing[0])
    digits = 2 * got.dtype.itemsize
    raise AssertionError(
        f"{where}: {len(differing)} of {a.size} differ, first at {i}: "
        f"got 0x{a[i]:0{digits}x} ({got[i]!r}), expected 0x{b[i]:0{digits}x} ({want[i]!r})"
    )


# ---- memory ------------------------------------------------------------------------------------------------

PAINT = 0xA5
BORDER = 128
NAMES = {
    "f": "float *",
    "e": "uint16_t *",
    "H": "uint16_t *",
    "i": "int32_t *",
    "l": "int64_t *",
    "B": "uint8_t *",
}


class Painted:
    """Each array between painted borders, at an address that is a multiple of its item size and no more."""

    def __init__(self) -> None:
        self.placed: list[tuple[Array, int, int]] = []

    def place(self, array: Array) -> Array:
        buffer = np.full(array.nbytes + 2 * BORDER + 64, PAINT, np.uint8)
        start = BORDER + (array.itemsize - (buffer.ctypes.data + BORDER)) % 64
        self.placed.append((buffer, start, start + array.nbytes))
        view: Array = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view

    def verify(self, what: str) -> None:
        for buffer, start, end in self.placed:
            for side, border in (("before", buffer[:start]), ("behind", buffer[end:])):
                assert (border == PAINT).all(), f"{what}: wrote {side} a buffer of {end - start} bytes"

    def clear(self) -> None:
        self.placed.clear()


class Fenced:
    """Each array against an inaccessible page, at its end or its start: a stray access ends the process."""

    libc = ctypes.CDLL(None, use_errno=True)

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.maps: list[mmap.mmap] = []

    def place(self, array: Array) -> Array:
        page = mmap.PAGESIZE
        inner = -(-max(array.nbytes, 1) // page) * page
        room = mmap.mmap(-1, inner + 2 * page)
        self.maps.append(room)
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        for fence in (base, base + page + inner):
            if self.libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        offset = page + (inner - array.nbytes if self.at_end else 0)
        view: Array = (
            np.frombuffer(room, np.uint8, array.nbytes, offset).view(array.dtype).reshape(array.shape)
        )
        view[...] = array
        return view

    def verify(self, what: str) -> None:
        pass

    def clear(self) -> None:
        self.maps.clear()


# ---- calls -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Out:
    """An output to be handed to an op."""

    shape: tuple[int, ...]
    dtype: Any = np.float32


Blocks = list[Array | None]


@dataclass
class View:
    """A cache of one layer as api.h has it: blocks, each a flat array of its own, and strides in bytes."""

    layout: int
    dtype: str
    n_kv: int
    dim: int
    capacity: int
    gap: int = 0  # values of STORED between heads
    length: int = 0
    first: int = 0
    window: int = 0
    block: int = 0  # tokens to one; 0: a single one
    fill: float = np.nan  # what lies where nothing is written: it shows wherever it is used
    k: Blocks = field(default_factory=list)
    v: Blocks = field(default_factory=list)

    def __post_init__(self) -> None:
        """Blocks of before `first` do not exist."""
        self.block = self.block or self.capacity
        item = np.dtype(STORED[self.dtype]).itemsize
        self.row = kv.row_bytes(self.dtype, self.dim) // item  # in items, like the next three
        head = (self.block if self.layout == TILES else 1) * self.row + self.gap
        row = self.row if self.layout == TILES else self.n_kv * head
        size = self.n_kv * head if self.layout == TILES else self.block * row
        self.head_stride, self.row_stride = head * item, row * item
        filler = np.full(size, self.fill, np.float16 if self.dtype == "q8_0" else STORED[self.dtype])
        none: Blocks = [None] * (self.first // self.block)
        there = range(len(none), -(-self.capacity // self.block))
        for blocks in (self.k, self.v):
            blocks += none + [filler.view(STORED[self.dtype]).copy() for _ in there]

    def parts(self, b: int) -> tuple[list[Array], list[Array]]:
        """Views of block b's K and V: values, or codes and scales of q8_0.

        Each is (n_kv, block, n); K of tiles (n_kv, tiles, n, 16).
        """
        k, v = self.k[b], self.v[b]
        assert k is not None
        assert v is not None
        n, dim = self.n_kv, self.dim
        if self.layout == ROWS:
            k, v = (x.reshape(self.block, n, -1)[..., :dim].swapaxes(0, 1) for x in (k, v))
            return [k], [v]
        k, v = (x.reshape(n, -1)[:, : self.block * self.row] for x in (k, v))
        if self.dtype != "q8_0":
            return [k.reshape(n, -1, dim, 16)], [v.reshape(n, -1, dim)]
        tile, row = (
            k.view(np.uint8).reshape(n, -1, 32 * self.row),
            v.view(np.uint8).reshape(n, -1, 2 * self.row),
        )
        codes, scales = tile[..., : 16 * dim].view(np.int8), tile[..., 16 * dim :].view(np.float16)
        return (
            [x.reshape(*x.shape[:2], -1, 16) for x in (codes, scales)],
            [row[..., :dim].view(np.int8), row[..., dim:].view(np.float16)],
        )

    def write(self, k: Array, v: Array, first: int = 0) -> View:
        """Puts k and v (tokens, n_kv, dim) at token `first`."""
        self.length = first + len(k)
        ks, vs = stored(k, self.dtype), stored(v, self.dtype)
        for b in range(first // self.block, -(-self.length // self.block)):
            from_, to = max(first, b * self.block), min(self.length, (b + 1) * self.block)
            at, these = np.arange(from_, to) - b * self.block, slice(from_ - first, to - first)
            k_parts, v_parts = self.parts(b)
            for part, x in zip(k_parts, ks, strict=True):
                if self.layout == TILES:
                    part[:, at // 16, :, at % 16] = x[these]
                else:
                    part[:, at] = x[these].swapaxes(0, 1)
            for part, x in zip(v_parts, vs, strict=True):
                part[:, at] = x[these].swapaxes(0, 1)
        return self


def stored(x: Array, dtype: str) -> list[Array]:
    """Values as a cache keeps them: (..., dim), and (..., dim / 32) scales of q8_0."""
    return list(kv.narrow_q8_0(x)) if dtype == "q8_0" else [x.astype(STORED[dtype])]


def widened(x: Array, dtype: str) -> Array:
    """Values as attention reads them from a cache of that type."""
    return kv.widen_q8_0(*kv.narrow_q8_0(x)) if dtype == "q8_0" else x.astype(STORED[dtype]).astype(f32)


class Weight:
    """A matrix and the GGUF bytes it came from, or lies in if it is not packed."""

    def __init__(self, ptr: Any, type_: str, raw: Array, rows: int, cols: int) -> None:
        self.ptr, self.type, self.rows, self.cols, self.raw = (
            ffi.gc(ptr, lib.pi_weight_free),
            type_,
            rows,
            cols,
            raw,
        )


class Native:
    """The C library at one level, called on arrays."""

    def __init__(self, level: str, threads: int = 1, memory: Painted | Fenced | None = None) -> None:
        ptr = lib.pi_ctx_new(level.encode(), threads)
        assert ptr != ffi.NULL, f"no context for level {level} with {threads} threads"
        self.ctx, self.level, self.threads = ffi.gc(ptr, lib.pi_ctx_free), level, threads
        self.memory = memory or Painted()

    def call(self, name: str, args: list[Any]) -> int:
        """The C call itself, for tests that change what surrounds it."""
        return int(getattr(lib, name)(*args))

    def pointer(self, array: Array) -> Any:
        return ffi.cast(NAMES[array.dtype.char], array.ctypes.data)

    def op(self, name: str, *args: Any) -> Any:
        """Calls a C op that must succeed. Returns its outputs, one or a list; inputs must not change."""
        outs: list[Array] = []
        inputs: list[tuple[Array, Array]] = []
        held: list[Any] = []  # what a struct points to
        passed: list[Any] = [] if name == "pi_rope_table" else [self.ctx]
        for a in args:
            if isinstance(a, Out):
                filled = np.full(int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize, PAINT, np.uint8)
                outs.append(self.memory.place(filled.view(a.dtype).reshape(a.shape)))
                passed.append(self.pointer(outs[-1]))
            elif isinstance(a, np.ndarray):
                inputs.append((self.memory.place(np.ascontiguousarray(a)), a))
                passed.append(self.pointer(inputs[-1][0]))
            elif isinstance(a, View):
                struct, blocks = self.place_view(a, held)
                passed.append(struct)
                outs += [x for x, _ in blocks]
            elif isinstance(a, list):
                placed = [self.place_view(view, held) for view in a]
                passed.append(ffi.new("pi_kv_view *[]", [struct for struct, _ in placed]))
                inputs += [pair for _, blocks in placed for pair in blocks]
            elif isinstance(a, Weight):
                passed.append(a.ptr)
            else:
                passed.append(ffi.NULL if a is None else a)
        code = self.call(name, passed)
        what = f"{name} level={self.level} threads={self.threads} args={[describe(a) for a in args]}"
        assert code == 0, f"{what}: returned {code}"
        self.memory.verify(what)
        for at, before in inputs:
            assert at.tobytes() == before.tobytes(), f"{what}: changed an input"
        results = [x.copy() for x in outs]
        outs, inputs = [], []
        self.memory.clear()
        return results[0] if len(results) == 1 else results

    def place_view(self, view: View, held: list[Any]) -> tuple[Any, list[tuple[Array, Array]]]:
        """A pi_kv_view, and its blocks as they are placed and as they were."""
        s, blocks = ffi.new("pi_kv_view *"), []
        for name, own in (("k", view.k), ("v", view.v)):
            pointers = ffi.new("void *[]", len(own))
            for i, x in enumerate(own):
                if x is not None:
                    blocks.append((self.memory.place(x), x))
                    pointers[i] = self.pointer(blocks[-1][0])
            setattr(s, name, pointers)
            held += [s, pointers]
        for name in ("block", "head_stride", "row_stride", "first", "length", "capacity", "window", "layout"):
            setattr(s, name, getattr(view, name))
        s.dtype, s.n_kv_heads, s.head_dim = getattr(lib, f"PI_{view.dtype.upper()}"), view.n_kv, view.dim
        return s, blocks

    def attention(
        self,
        q: Array,
        views: View | list[View],
        tokens: int | list[int],
        scale: float,
        unit_of: int = GROUP,
        tasks: int | None = None,
    ) -> Array:
        """Queries q (sum of tokens, heads, dim) of one sequence or several."""
        views = views if isinstance(views, list) else [views]
        counts = np.atleast_1d(np.asarray(tokens, np.int64))
        how = (q.shape[1], scale, unit_of, tasks or self.threads)
        out: Array = self.op("pi_attention", q, len(views), views, counts, *how, Out(q.shape))
        return out

    def weight(self, type_: str, raw: Array, rows: int, cols: int, *, pack: bool = True) -> Weight:
        """From GGUF bytes: packed ones start at an odd address and end at a guard page."""
        out = ffi.new("pi_weight **")
        raw = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
        src = self.memory.place(raw) if pack else raw
        address = self.pointer(src) if pack else ffi.from_buffer(raw)
        code = lib.pi_weight_new(self.ctx, TYPES[type_], rows, cols, address, src.nbytes, pack, out)
        assert code == 0, f"pi_weight_new level={self.level} {type_} {rows} x {cols}: returned {code}"
        del src
        self.memory.clear()
        return Weight(out[0], type_, raw, rows, cols)


def describe(a: Any) -> Any:
    if isinstance(a, list):
        return [describe(x) for x in a]
    if isinstance(a, View):
        return (
            f"{a.dtype} view(layout={a.layout} kv={a.n_kv} dim={a.dim} tokens {a.first}..{a.length} of"
            f" {a.capacity}, block={a.block} window={a.window})"
        )
    if isinstance(a, Weight):
        return f"{a.type}({a.rows}, {a.cols})"
    return a.shape if isinstance(a, np.ndarray | Out) else a


def in_child(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs a module in a process of its own, which may crash or hang."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    command = [sys.executable, "-X", "faulthandler", "-m", module, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


# ---- values ------------------------------------------------------------------------------------------------

MAX = np.finfo(np.float32).max
KINDS = ("random", "mixed", "large", "cancel", "signed_zeros", "subnormal", "zeros", "codes", "ties", "tiny")


@cache
def values(kind: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """float32 values of one kind; the last axis is the one that folds run along. Not to be written to."""
    rng = np.random.RandomState(seed)
    x = (rng.randint(-(1 << 23), 1 << 23, shape) * 2.0**-22).astype(f32)
    if kind == "mixed":  # magnitudes of all sizes beside each other
        x = np.ldexp(x, rng.randint(-60, 60, shape)).astype(f32)
    elif kind == "large":
        x = x * f32(1e18)
    elif kind == "cancel":  # neighbours that almost cancel
        half = x[..., : shape[-1] // 2 * 2 : 2]
        x[..., 1::2] = np.nextafter(-half, rng.choice(np.array([-np.inf, np.inf], f32), half.shape))
    elif kind == "signed_zeros":
        x = rng.choice(np.array([0.0, -0.0, 1.0, -1.0], f32), shape)
    elif kind == "subnormal":
        bits = rng.randint(0, 1 << 23, shape, np.uint32) | rng.randint(0, 2, shape, np.uint32) << np.uint32(
            31
        )
        x = bits.astype(np.uint32).view(f32)
    elif kind == "zeros":
        x = np.zeros(shape, f32)
    elif kind == "codes":  # every int8 code is 127 or -127
        x = rng.choice(np.array([-1.5, 1.5], f32), shape)
    elif kind == "same":  # and all of a row are of one sign: the largest sums of products
        x = (
            np.full(shape, 1.5, f32)
            * rng.permutation(np.resize(np.array([1, -1], f32), shape[:-1]))[..., None]
        )
    elif kind == "ties":  # largest magnitude 127, so the int8 codes are roundings of these very values
        x = rng.randint(-127, 127, shape).astype(f32) + f32(0.5)
        x[..., ::32] = 127
    elif kind == "tiny":  # blocks of 32 whose largest magnitude lies about 2^-100
        tops = np.array(
            [2.0**-101, np.nextafter(f32(2.0**-100), f32(0)), 2.0**-100, 2.0**-99, 2.0**-148], f32
        )
        block = np.arange(shape[-1]) // 32 + rng.randint(0, len(tops), (*shape[:-1], 1))
        x = (rng.uniform(-1, 1, shape) * tops[block % len(tops)]).astype(f32)
        x[..., ::32] = tops[block % len(tops)][..., ::32]
    elif kind == "limits":
        edges = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            MAX,
            -MAX,
            2.0**-126,
            -(2.0**-126),
            2.0**-149,
            -(2.0**-149),
            88.8,
            -104.1,
            -88.0,
        ]
        x = rng.choice(np.array(edges, f32), shape)
    else:
        assert kind == "random", kind
    x = np.ascontiguousarray(x, f32)
    x.setflags(write=False)
    return x


def halves(kind: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float16]:
    """Scales of quantised blocks."""
    rng = np.random.RandomState(seed)
    if kind == "extreme":
        return rng.choice(np.array([65504, -65504], np.float16), shape)
    if kind == "subnormal":
        return rng.randint(0, 1024, shape).astype(np.uint16).view(np.float16)
    if kind == "zeros":
        return rng.choice(np.array([0.0, -0.0], np.float16), shape)
    return (rng.randint(-(1 << 11), 1 << 11, shape) * 2.0**-17).astype(np.float16)


@cache
def raw_weight(type_: str, kind: str, rows: int, cols: int, seed: int) -> Array:
    """GGUF bytes (rows, bytes of a row). Kinds: random, extreme, subnormal, zeros (of scales and values)."""
    rng = np.random.RandomState(seed)
    if type_ in ("F32", "F16"):
        if type_ == "F16" and kind == "subnormal":
            w: Array = halves(kind, (rows, cols), seed)
        elif kind == "extreme":
            w = rng.choice(np.array([65504.0, -65504.0], f32), (rows, cols))
        else:
            w = values(kind, (rows, cols), seed)
        return w.astype(f32 if type_ == "F32" else np.float16).view(np.uint8)
    if type_ == "BF16":
        w = np.ldexp(f32(1.9921875), 100) * rng.choice(np.array([1, -1], f32), (rows, cols))
        w = w if kind == "extreme" else values(kind, (rows, cols), seed)
        return (w.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = (rows, cols // BLOCK[type_])
    if type_ not in ("Q8_0", "Q4_1"):
        return random_blocks(type_, kind, blocks, rng).view(np.uint8).reshape(rows, -1)
    d, m = (halves(kind, (*blocks, 1), seed + i).view(np.uint8) for i in (1, 2))
    if type_ == "Q8_0":
        code = rng.randint(-128, 128, (*blocks, 32)).astype(np.int8)
        if kind == "extreme":  # the asymmetric code, and its largest positive neighbour
            code = np.where(rng.randint(0, 4, (*blocks, 32)) > 0, -128, 127).astype(np.int8)
            code[: rows // 2] = -128
        parts = [d, code.view(np.uint8)]
    else:
        nibbles = rng.randint(0, 256, (*blocks, 16)).astype(np.uint8)
        parts = [d, m, np.full_like(nibbles, 255) if kind == "extreme" else nibbles]
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


# The bytes of a field that stand for its lowest and highest values, where these are not 0x00 and 0xFF.
EXTREME_BYTES = {
    ("Q6_K", "scales"): (0x80, 0x7F),
    ("MXFP4", "qs"): (0xFF, 0x77),
    **{
        (type_, "scales"): (0xFF, 0xFF) for type_ in ("Q2_K", "Q4_K", "Q5_K")
    },  # scales and minimums, unsigned
}


def random_blocks(type_: str, kind: str, blocks: tuple[int, int], rng: np.random.RandomState) -> Array:
    """Blocks (rows, blocks). Extreme: rows of all lowest and all highest codes in turn, and of sub-scales in
    pairs, with the largest scales that overflow nothing.
    """
    b = np.zeros(blocks, ref.UNPACK[TYPES[type_]][0])
    for name in b.dtype.names or ():
        field = b[name]
        if name in ("d", "dmin", "m"):
            field[...] = halves(kind, blocks, rng.randint(1 << 30))
        elif name == "e":
            low, high = {"random": (110, 124), "subnormal": (0, 4), "extreme": (236, 239)}.get(kind, (0, 255))
            field[...] = rng.randint(low, high, blocks)
        elif kind == "extreme":
            turn = np.arange(blocks[0]) // (1 if name.startswith(("q", "hmask")) else 2) % 2
            ends = np.array(EXTREME_BYTES.get((type_, name), (0x00, 0xFF)), np.uint8)
            field[...] = ends.view(field.dtype)[turn].reshape(-1, 1, 1)
        else:
            field[...] = rng.randint(0, 256, field.shape).astype(np.uint8).view(field.dtype)
            if type_ == "MXFP4" and kind == "zeros":  # there is no scale of zero, but two codes
                field[...] &= 0x88
    return b


def reference_weight(type_: str, raw: Array) -> Any:
    """The reference backend's matrix of the same bytes."""
    return ref.matrix(TYPES[type_], len(raw), raw)


# ---- attention, all outputs at once ------------------------------------------------------------------------


def attention(
    q: Array, k: Array, v: Array, scale: float, ends: Array, starts: Array | int = 0
) -> NDArray[np.float32]:
    """Query i of q (queries, heads, dim) over tokens starts[i]..ends[i] of k and v (tokens, n_kv, dim).

    NUMERICS.md, section 4, in the reference backend's folds; a test holds it to that backend's own attention.
    """
    queries, heads, dim = q.shape
    starts = np.broadcast_to(starts, ends.shape)
    n, n_kv = int((ends - starts).max()), k.shape[1]
    at = np.minimum(starts[:, None] + np.arange(n), len(k) - 1)  # (queries, n)
    seen = np.arange(n) < (ends - starts)[:, None, None, None]  # (queries, 1, 1, n)
    q = q.reshape(queries, n_kv, heads // n_kv, dim)
    s = np.zeros((*q.shape[:3], n), f32)
    for d in range(dim):
        s = ref.fma(q[..., d, None], k[:, :, d].astype(f32)[at].swapaxes(1, 2)[:, :, None], s)
    s = s * f32(scale)
    e = ref.exp(s - np.where(seen, s, -np.inf).max(axis=-1, keepdims=True).astype(f32))
    total, out = np.zeros(q.shape[:3], f32), np.zeros(q.shape, f32)
    for t in range(n):
        total = np.where(seen[..., t], total + e[..., t], total)
    p = e / total[..., None]
    for t in range(n):
        value = v[at[:, t]].astype(f32)[:, :, None]  # (queries, n_kv, 1, dim)
        out = np.where(seen[..., t, None], ref.fma(p[..., t, None], value, out), out)
    return out.reshape(queries, heads, dim)

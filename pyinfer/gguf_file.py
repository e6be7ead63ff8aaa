"""Reads GGUF model files (little-endian, versions 2 and 3) through a memory map.

A file is checked once, here, in full: every count and length is held against the bytes that remain before
anything is allocated, so a damaged or hostile file ends in a `ModelError` that names the key or tensor at
fault. Value types, tensor types and block sizes come from the `gguf` package. Its own reader builds several
NumPy arrays per metadata string, seconds for a large vocabulary; this one notes where they lie, in a small
fraction of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ._pi import ffi, lib
from .errors import ClosedError, ModelError

VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise
MAX_KEY = 65535  # bytes, from the GGUF specification, as is the next
MAX_TENSOR_NAME = 64
# Metadata and tensor infos must end within the first MAX_HEADER bytes. The largest vocabularies need some
# 30 MiB; the bound keeps small what a malformed file can cost in time and memory, however large it is.
MAX_HEADER = 1 << 28

_LENGTH = 8  # bytes of a string's length
_MIN_KEY_SIZE = 8 + 4 + 1  # name length, value type, the smallest value
_MIN_TENSOR_SIZE = 8 + 4 + 8 + 4 + 8  # name length, dimension count, one dimension, type, offset
_HASH_STEP = 1 << 24

_DTYPES: dict[int, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}

_DAMAGED = "the file is damaged, download it again"
_CUT_SHORT = "the file is cut short or damaged, download it again"

_LOOKALIKES = (
    (rb"FUGG", "a big-endian GGUF file: get the little-endian one"),
    (rb"version https://git-lfs", "a Git LFS pointer: run 'git lfs pull' or download the model itself"),
    (rb"(\xef\xbb\xbf)?\s*<[!?a-zA-Z]", "a web page: download the model itself, not the page about it"),
    (rb".{5}\0{3}\{", "a safetensors file: get or convert to the GGUF version"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "a PyTorch or pickle file: get or convert to the GGUF version"),
    (rb"lmgg|tjgg|fmgg|algg", "a GGML file from before GGUF: get or convert to the GGUF version"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|\xfd7zXZ|BZh", "a compressed file: decompress it first"),
    (rb"\s*[{\[]", "JSON: download the model itself"),
    (rb"\0{4}", "an unfinished download: download it again"),
)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in NumPy order, (rows, columns); `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class Strings(Sequence[str]):
    """An array of strings as a file holds them, each decoded when it is asked for: vocabularies have 10^5."""

    def __init__(self, raw: bytes, starts: npt.NDArray[np.int64]) -> None:
        """raw: each string's length, eight bytes, and the string. starts: where each begins, and the end."""
        self._raw, self._starts = raw, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return _decoded(self._raw[self._starts[i] + _LENGTH : self._starts[i + 1]])

    def tolist(self) -> list[str]:
        # A length's last byte is 0. Where no other is, it parts the strings, once the first seven are gone.
        keep = np.ones(len(self._raw), np.bool_)
        for byte in range(_LENGTH - 1):
            keep[self._starts[:-1] + byte] = False
        texts = _decoded(np.frombuffer(self._raw, np.uint8)[keep].tobytes()).split("\0")[1:]
        return texts if len(texts) == len(self) else self[:]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Strings)) and self.tolist() == list(other)

    def __repr__(self) -> str:
        return repr(self.tolist())


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


class GGUFFile:
    """An open, checked GGUF file; also a context manager that closes it.

    Attributes:
        path, size: the file and its bytes.
        version: of GGUF, 2 or 3.
        metadata: key to bool, int, float, str, Strings or, for other arrays, a read-only 1-D NumPy array.
            Bytes of a string that are not UTF-8 become lone surrogates ("surrogateescape").
        tensors: name to TensorInfo, in the file's order.

    Raises:
        ModelError: the file cannot be read, is not GGUF, or breaks a rule of the format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = _open_map(self.path)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        self._sha256 = ""
        self.size = len(self._map)
        try:
            header = _Header(self._map, self.path)
            n_tensors, n_keys = header.preamble()
            self.version = header.version
            self.metadata = header.metadata(n_keys)
            self.tensors = header.tensors(n_tensors, self.metadata.get("general.alignment", ALIGNMENT))
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The raw bytes of tensor `name`: a read-only view of the map, shape (nbytes,).

        Raises ModelError when there is no such tensor, ClosedError after `close`.
        """
        if name not in self.tensors:
            raise ModelError(f"{self.path}: tensor {name!r} is not in the file")
        info = self.tensors[name]
        return self._open_bytes()[info.offset : info.offset + info.nbytes]

    def sha256(self) -> str:
        """SHA-256 of the whole file in hex; computed at the first call. Raises ClosedError after `close`."""
        if not self._sha256:
            data, digest = self._open_bytes().data, hashlib.sha256()
            for start in range(0, self.size, _HASH_STEP):
                digest.update(data[start : start + _HASH_STEP])
            self._sha256 = digest.hexdigest()
        return self._sha256

    def drop_pages(self) -> None:
        """Lets the system take back the memory behind the file; touched, it returns. All of it, as for every
        page that is read the system brings some of its neighbours.
        """
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last array from `data` still alive. Safe to call again."""
        mapped, self._map, self._bytes = self._map, None, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # an array from `data` is alive: the map goes with it
                mapped.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_bytes(self) -> npt.NDArray[np.uint8]:
        if self._bytes is None:
            raise ClosedError(f"{self.path}: the file was closed; open it again")
        return self._bytes


def _open_map(path: Path) -> mmap.mmap:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{path}: is a directory; name the .gguf file in it")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise ModelError(f"{path}: is not a regular file; name a .gguf file")
        if status.st_size == 0:
            raise ModelError(f"{path}: is empty; download it again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError, OverflowError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{str(path)!r}: cannot be read ({reason}); check path and permissions") from error


class _Header:
    """A cursor over a file's header. `what` is the thing being read, for messages."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.size = len(buffer)
        self.end = min(self.size, MAX_HEADER)
        self.pos = 0
        self.version = 0
        self.what = "header"

    def preamble(self) -> tuple[int, int]:
        """Magic, version and the counts of tensors and keys, which it returns."""
        magic = self.buffer[:4]
        if magic != b"GGUF":
            start = self.buffer[:64]
            kind = next((kind for form, kind in _LOOKALIKES if re.match(form, start, re.DOTALL)), None)
            remedy = f"it looks like {kind}" if kind else _DAMAGED
            self.fail(f"not a GGUF file, it starts with {magic!r}", remedy)
        self.pos = 4
        self.version = self.u32()
        if self.version & 0xFFFF == 0:
            self.fail("a big-endian GGUF file is unsupported", "get the little-endian one")
        if self.version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            self.fail(f"GGUF version {self.version} is unsupported", f"get or convert to version {known}")
        n_tensors, n_keys = self.u64(), self.u64()
        self.what = "tensor count"
        self.need(n_tensors * _MIN_TENSOR_SIZE)
        self.what = "key count"
        self.need(n_keys * _MIN_KEY_SIZE)
        return n_tensors, n_keys

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for i in range(count):
            key = self.name("key", i, MAX_KEY)
            if key in values:
                self.fail("appears twice")
            values[key] = self.value()
        return values

    def tensors(self, count: int, alignment: Any) -> dict[str, TensorInfo]:
        """The tensor infos, their offsets from the start of the file, checked to lie apart and within it."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.what = "key 'general.alignment'"
            self.fail(f"{alignment!r:.40} is not a power of two")
        infos: dict[str, TensorInfo] = {}
        for i in range(count):
            name = self.name("tensor", i, MAX_TENSOR_NAME)
            if name in infos:
                self.fail("appears twice")
            infos[name] = self.tensor(name, alignment)

        start = -(-self.pos // alignment) * alignment
        infos = {
            name: TensorInfo(name, info.shape, info.type, start + info.offset, info.nbytes)
            for name, info in infos.items()
        }
        end, before = start, ""
        for info in sorted(infos.values(), key=lambda info: info.offset):
            self.what = f"tensor {info.name!r}"
            if info.offset < end:
                self.fail(f"its data overlaps that of {before!r}")
            end, before = info.offset + info.nbytes, info.name
            if end > self.size:
                self.fail(f"its data would end at byte {end}, the file at {self.size}", _CUT_SHORT)
        return infos

    def tensor(self, name: str, alignment: int) -> TensorInfo:
        """One tensor info after its name; its offset counts from the start of the data, as in the file."""
        n_dims = self.u32()
        if not 1 <= n_dims <= 4:
            self.fail(f"it has {n_dims} dimensions, not 1 to 4")
        shape = tuple(self.u64() for _ in range(n_dims))[::-1]
        if 0 in shape:
            self.fail(f"shape {shape} has an empty dimension")
        raw, offset = self.u32(), self.u64()
        try:
            kind = GGMLQuantizationType(raw)
            block, block_size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.fail(f"type {raw} is unknown", "get another quantization, or update the 'gguf' package")
        if shape[-1] % block:
            self.fail(f"rows of {shape[-1]} are not whole blocks of {block}, as {kind.name} needs")
        if offset % alignment:
            self.fail(f"its offset {offset} is not a multiple of the alignment {alignment}")
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // block * block_size)

    def fail(self, why: str, remedy: str = _DAMAGED) -> NoReturn:
        raise ModelError(f"{self.path}: {self.what:.120}: {why}; {remedy}")

    def need(self, n: int) -> None:
        """Fails unless `n` more bytes may follow."""
        if self.pos + n <= self.end:
            return
        if self.pos + n > self.size:
            self.fail(f"{n} bytes needed at byte {self.pos}, {self.size - self.pos} left", _CUT_SHORT)
        self.fail(f"{n} bytes from byte {self.pos} would pass the header's limit of {MAX_HEADER}")

    def take(self, n: int) -> bytes:
        self.need(n)
        self.pos += n
        return self.buffer[self.pos - n : self.pos]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def name(self, what: str, index: int, limit: int) -> str:
        self.what = f"{what} number {index + 1}"
        length = self.u64()
        if length > limit:
            self.fail(f"its name has {length} bytes, more than {limit}")
        raw = self.take(length)
        self.what = f"{what} {raw!r}"
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.fail("its name is not UTF-8")
        self.what = f"{what} {name!r}"
        return name

    def value(self) -> Any:
        kind = self.value_type()
        if kind == GGUFValueType.STRING:
            return self.strings(1)[0]
        if kind != GGUFValueType.ARRAY:
            return self.numbers(kind, 1)[0].item()
        kind = self.value_type()
        if kind == GGUFValueType.ARRAY:
            self.fail("arrays of arrays are unsupported", "get another conversion of the model")
        count = self.u64()
        return self.strings(count) if kind == GGUFValueType.STRING else self.numbers(kind, count)

    def value_type(self) -> int:
        kind = self.u32()
        if kind not in _DTYPES and kind not in (GGUFValueType.STRING, GGUFValueType.ARRAY):
            self.fail(f"value type {kind} is unknown")
        return kind

    def numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(_DTYPES[kind])
        values: npt.NDArray[Any] = np.ndarray(count, dtype, self.take(count * dtype.itemsize))
        if kind == GGUFValueType.BOOL:
            if count and values.max() > 1:
                self.fail(f"{values.max()} is not a boolean")
            values = values.view(np.bool_)
        return values

    def strings(self, count: int) -> Strings:
        self.need(count * _LENGTH)
        starts, found = np.empty(count + 1, np.int64), ffi.new("int64_t *")
        with ffi.from_buffer(self.buffer) as data, ffi.from_buffer("int64_t[]", starts) as out:
            lib.pi_string_starts(data + self.pos, self.end - self.pos, count, out, found)
        if found[0] < count:
            self.pos += int(starts[found[0]])
            self.need(self.u64())
        return Strings(self.take(int(starts[count])), starts)

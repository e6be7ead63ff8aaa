"""The GGUF parser: equal to the gguf package's on good files, a ModelError naming the fault on all others."""

import hashlib
import math
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quant_shape_to_byte_shape

from pyinfer import gguf_file
from pyinfer.errors import ClosedError, ModelError
from pyinfer.gguf_file import GGUFFile, Strings
from pyinfer.model.config import SUPPORTED_TYPES

U8, I32, F32, BOOL, STRING, ARRAY = 0, 5, 6, 7, 8, 9
HUGE = 2**63


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return u64(len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + u32(kind) + value


def tensor(name: str | bytes, dims: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + u32(len(dims)) + u64(*dims) + u32(kind) + u64(offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 256,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    """A file's bytes: a header, padded to 32 if any data follows, and `data` bytes."""
    head = magic + u32(version) + u64(len(tensors), len(keys)) + b"".join([*keys, *tensors])
    return head + bytes(-len(head) % 32 + data) if data else head


def counts(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + u32(3) + u64(n_tensors, n_keys) + bytes(100)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(raw: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        return path

    return write


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A file with every value type, and tensors of one to four dimensions in several types."""
    path = tmp_path / "rich.gguf"
    writer = GGUFWriter(path, "llama")
    for kind, value in {
        GGUFValueType.UINT8: 200,
        GGUFValueType.INT8: -100,
        GGUFValueType.UINT16: 60000,
        GGUFValueType.INT16: -30000,
        GGUFValueType.UINT32: 4 * 10**9,
        GGUFValueType.INT32: -2 * 10**9,
        GGUFValueType.FLOAT32: 0.1,
        GGUFValueType.UINT64: 2**64 - 1,
        GGUFValueType.INT64: -(2**63),
        GGUFValueType.FLOAT64: 0.1,
        GGUFValueType.BOOL: True,
        GGUFValueType.STRING: "naïve ☃ 🎉",
    }.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"many.{kind.name}", [value] * 3, GGUFValueType.ARRAY, kind)
    writer.add_array("mixed", ["", "a", "bcd", "é"])
    writer.add_bool("no", False)
    rng = np.random.default_rng(0)
    for i, shape in enumerate([(5,), (3, 32), (2, 3, 32), (2, 2, 3, 32)]):
        writer.add_tensor(f"f32.{i}", rng.standard_normal(shape, np.float32))
        writer.add_tensor(f"f16.{i}", rng.standard_normal(shape, np.float32).astype(np.float16))
    for kind in SUPPORTED_TYPES:
        data = rng.integers(0, 256, quant_shape_to_byte_shape((2, 256), kind), np.uint8)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_equals_the_gguf_package(rich: Path) -> None:
    theirs, ours = GGUFReader(rich), GGUFFile(rich)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, field in fields.items():
        value = ours.metadata[name]
        plain = value.tolist() if isinstance(value, (np.ndarray, Strings)) else value
        assert plain == field.contents(), name
        assert type(plain) is type(field.contents()), name
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for expected in theirs.tensors:
        info = ours.tensors[expected.name]
        assert info.shape == tuple(expected.shape.tolist()[::-1])
        assert (info.type, info.offset, info.nbytes) == (
            expected.tensor_type,
            expected.data_offset,
            expected.n_bytes,
        )
        assert ours.data(expected.name).tobytes() == expected.data.tobytes()


def test_arrays_keep_their_type_and_are_read_only(rich: Path) -> None:
    metadata = GGUFFile(rich).metadata
    for kind, dtype in {"UINT8": "u1", "INT16": "i2", "FLOAT32": "f4", "INT64": "i8", "BOOL": "?"}.items():
        array = metadata[f"many.{kind}"]
        assert array.dtype == np.dtype(dtype)
        assert not array.flags.writeable


def test_empty_arrays(save: Callable[[bytes], Path]) -> None:
    kinds = [kind for kind in GGUFValueType if kind != GGUFValueType.ARRAY]
    raw = gguf([key(kind.name, ARRAY, u32(kind) + u64(0)) for kind in kinds], data=0)
    assert [len(value) for value in GGUFFile(save(raw)).metadata.values()] == [0] * len(kinds)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_and_alignment(save: Callable[[bytes], Path], version: int) -> None:
    raw = gguf(
        [key("general.alignment", 4, u32(8))], [tensor("a"), tensor("b", offset=256)], 600, version=version
    )
    file = GGUFFile(save(raw))
    start = len(gguf([key("general.alignment", 4, u32(8))], [tensor("a"), tensor("b")], data=0))
    assert file.version == version
    assert file.tensors["a"].offset == -(-start // 8) * 8
    assert file.tensors["b"].offset == file.tensors["a"].offset + 256


def test_strings_that_are_not_utf8_survive(save: Callable[[bytes], Path]) -> None:
    raw = gguf(
        [key("one", STRING, string(b"a\xffb")), key("many", ARRAY, u32(STRING) + u64(1) + string(b"\xfe"))]
    )
    metadata = GGUFFile(save(raw)).metadata
    assert metadata["one"].encode("utf-8", "surrogateescape") == b"a\xffb"
    assert metadata["many"] == ["\udcfe"]


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [b""],
        [b"a", b"b"],
        [b"", b"a", b"", b"\xc3\xa9" * 200, b"x" * 256, b""],
        [b"a\0b", b"", b"\0"],  # what parts them while they are decoded
        [b"\xe4\xb8", b"\xad", b"\xff", b"\xe4"],  # a character begun and not ended
    ],
)
def test_arrays_of_strings(texts: list[bytes], save: Callable[[bytes], Path]) -> None:
    array = u32(STRING) + u64(len(texts)) + b"".join(map(string, texts))
    with GGUFFile(save(gguf([key("k", ARRAY, array), key("after", U8, b"\1")]))) as file:
        strings, after = file.metadata["k"], file.metadata["after"]
    want = [text.decode("utf-8", "surrogateescape") for text in texts]
    assert isinstance(strings, Strings)
    assert strings == want == strings.tolist() == list(strings) == [strings[i] for i in range(len(want))]
    assert (strings[::2], strings[-2:], len(strings), after) == (want[::2], want[-2:], len(want), 1)
    assert strings != [*want, "more"]
    assert strings != "".join(want)  # not even where each is one letter
    for i in (len(want), -len(want) - 1):
        with pytest.raises(IndexError):
            strings[i]


def test_data_is_a_read_only_view(rich: Path) -> None:
    file = GGUFFile(rich)
    info, data = file.tensors["f32.1"], file.data("f32.1")
    assert (data.dtype, data.shape) == (np.uint8, (info.nbytes,))
    assert np.shares_memory(data, file.data("f32.1"))
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    with pytest.raises(ModelError, match=r"'absent'"):
        file.data("absent")


def test_sha256(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hashlib.sha256(rich.read_bytes()).hexdigest()
    monkeypatch.setattr(gguf_file, "_HASH_STEP", 1000)
    file = GGUFFile(rich)
    assert file.sha256() == expected
    file.close()
    assert file.sha256() == expected


def test_close(rich: Path) -> None:
    with GGUFFile(rich) as file:
        view = file.data("f32.0")
        before = view.tobytes()
        file.drop_pages()
        assert view.tobytes() == before
    assert view.tobytes() == before  # the map lives on with its last view
    file.close()
    file.drop_pages()
    with pytest.raises(ClosedError, match=r"rich\.gguf"):
        file.data("f32.0")
    with pytest.raises(ClosedError, match=r"rich\.gguf"):
        file.sha256()


def test_close_unmaps(rich: Path) -> None:
    file = GGUFFile(rich)
    mapped = file._map
    assert mapped is not None
    file.close()
    assert mapped.closed


# Every rule of the format: a file that breaks it, and what the message must hold.
BAD = {
    "empty": (b"", "is empty"),
    "short-magic": (b"GG", "header.*not a GGUF"),
    "magic": (gguf(magic=b"GGUX"), r"header.*not a GGUF file, it starts with b'GGUX'"),
    "magic-big-endian": (gguf(magic=b"FUGG"), "big-endian"),
    "version-big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    "version-1": (gguf(version=1), "version 1 is unsupported"),
    "version-4": (gguf(version=4), "version 4 is unsupported"),
    "safetensors": (u64(100) + b'{"__metadata__":{}}', "safetensors"),
    "pickle": (b"\x80\x02}q\x00." + bytes(50), "pickle"),
    "zip": (b"PK\x03\x04" + bytes(50), "PyTorch"),
    "ggml": (b"tjgg" + bytes(50), "GGML"),
    "html": (b"\n<!DOCTYPE html><html>", "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    "json": (b'{"error": "not found"}', "JSON"),
    "gzip": (b"\x1f\x8b\x08" + bytes(50), "compressed"),
    "zeros": (bytes(1000), "unfinished download"),
    "tensor-count": (counts(HUGE, 0), "tensor count.*cut short"),
    "tensor-count-by-one": (counts(4, 0), "tensor count"),
    "key-count": (counts(0, HUGE), "key count.*cut short"),
    "key-count-by-one": (counts(0, 8), "key count"),
    "key-name-length": (
        gguf([u64(HUGE) + bytes(50)]),
        "key number 1: its name has 9223372036854775808 bytes",
    ),
    "key-name-past-end": (gguf([u64(60000)], data=0) + bytes(8), "key number 1.*cut short"),
    "key-name-utf8": (gguf([key(b"k\xff", U8, b"\1")]), r"key b'k\\xff': its name is not UTF-8"),
    "key-twice": (gguf([key("k", U8, b"\1"), key("k", U8, b"\2")]), "key 'k': appears twice"),
    "value-type": (gguf([key("k", 13, bytes(8))]), "key 'k': value type 13"),
    "value-past-end": (gguf([key("k", 12, b"1234")], data=0), "key 'k': 8 bytes needed at byte 37, 4 left"),
    "bool": (gguf([key("k", BOOL, b"\2")]), "key 'k': 2 is not a boolean"),
    "bool-array": (gguf([key("k", ARRAY, u32(BOOL) + u64(2) + b"\1\x80")]), "key 'k': 128 is not a boolean"),
    "string-length": (gguf([key("k", STRING, u64(HUGE))]), "key 'k'.*cut short"),
    "string-past-end": (gguf([key("k", STRING, u64(5) + b"1234")], data=0), "key 'k'.*cut short"),
    "array-type": (gguf([key("k", ARRAY, u32(77) + u64(1) + bytes(8))]), "key 'k': value type 77"),
    "array-nested": (gguf([key("k", ARRAY, u32(ARRAY) + u64(0))]), "key 'k': arrays of arrays"),
    "array-length": (gguf([key("k", ARRAY, u32(I32) + u64(HUGE))]), "key 'k'.*cut short"),
    "array-length-wraps": (gguf([key("k", ARRAY, u32(I32) + u64(2**62))]), "key 'k'.*cut short"),
    "array-past-end": (gguf([key("k", ARRAY, u32(U8) + u64(5) + b"1234")], data=0), "key 'k'.*cut short"),
    "array-string-count": (
        gguf([key("k", ARRAY, u32(STRING) + u64(HUGE))]),
        f"key 'k': {8 * HUGE} bytes needed",  # found by the count, not by reading strings until they end
    ),
    "array-string-missing": (
        gguf([key("k", ARRAY, u32(STRING) + u64(2) + string("12345678"))], data=0),
        "key 'k': 8 bytes needed",
    ),
    "array-string-length": (
        gguf([key("k", ARRAY, u32(STRING) + u64(2) + string("a") + u64(HUGE))]),
        "key 'k'.*cut short",
    ),
    "alignment-0": (gguf([key("general.alignment", 4, u32(0))]), "'general.alignment': 0 is not a power"),
    "alignment-24": (gguf([key("general.alignment", 4, u32(24))]), "'general.alignment': 24 is not a power"),
    "alignment-negative": (
        gguf([key("general.alignment", I32, b"\xe0\xff\xff\xff")]),
        "'general.alignment': -32",
    ),
    "alignment-float": (
        gguf([key("general.alignment", F32, struct.pack("<f", 32))]),
        "'general.alignment': 32.0",
    ),
    "alignment-bool": (gguf([key("general.alignment", BOOL, b"\1")]), "'general.alignment': True"),
    "alignment-array": (gguf([key("general.alignment", ARRAY, u32(4) + u64(0))]), "'general.alignment'"),
    "tensor-name-length": (gguf([], [tensor("t" * 65)]), "tensor number 1: its name has 65 bytes"),
    "tensor-name-utf8": (gguf([], [tensor(b"t\xc3")]), r"tensor b't\\xc3': its name is not UTF-8"),
    "tensor-twice": (gguf([], [tensor("a"), tensor("a", offset=256)], 512), "tensor 'a': appears twice"),
    "dims-0": (gguf([], [tensor("t", ())]), "tensor 't': it has 0 dimensions"),
    "dims-5": (gguf([], [tensor("t", (32, 1, 1, 1, 1))]), "tensor 't': it has 5 dimensions"),
    "dims-huge": (gguf([], [string("t") + u32(2**32 - 1) + bytes(40)]), "tensor 't': it has 4294967295 dim"),
    "dim-empty": (gguf([], [tensor("t", (32, 0))]), r"tensor 't': shape \(0, 32\) has an empty"),
    "product": (gguf([], [tensor("t", (2**32, 2**32))]), "tensor 't': its data would end.*cut short"),
    "product-of-4": (gguf([], [tensor("t", (HUGE,) * 4)]), "tensor 't': its data would end.*cut short"),
    "block": (gguf([], [tensor("t", (48, 2), 8)]), "tensor 't': rows of 48 are not whole blocks of 32.*Q8_0"),
    "type": (gguf([], [tensor("t", kind=4)]), "tensor 't': type 4 is unknown"),
    "type-huge": (gguf([], [tensor("t", kind=2**32 - 1)]), "tensor 't': type 4294967295 is unknown"),
    "offset-unaligned": (
        gguf([], [tensor("t", offset=16)], 512),
        "tensor 't': its offset 16 is not a multiple",
    ),
    "offset-past-end": (
        gguf([], [tensor("t", offset=1024)], 512),
        "tensor 't': its data would end.*cut short",
    ),
    "offset-huge": (gguf([], [tensor("t", offset=HUGE)]), "tensor 't': its data would end"),
    "overlap": (
        gguf([], [tensor("b", offset=64), tensor("a")], 512),
        "tensor 'b': its data overlaps that of 'a'",
    ),
    "overlap-same-offset": (
        gguf([], [tensor("a"), tensor("b")]),
        "tensor 'b': its data overlaps that of 'a'",
    ),
}


@pytest.mark.parametrize(("raw", "message"), BAD.values(), ids=BAD)
def test_broken_rules_are_named(save: Callable[[bytes], Path], raw: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=rf"(?s)model\.gguf.*{message}") as caught:
        GGUFFile(save(raw))
    assert len(str(caught.value)) < 500


def test_bad_files_differ_from_good_ones_by_their_fault_alone(save: Callable[[bytes], Path]) -> None:
    keys = [key("a", U8, b"\1"), key("b", ARRAY, u32(STRING) + u64(2) + string("x") + string(""))]
    file = GGUFFile(save(gguf(keys, [tensor("t" * 64), tensor("u", (64, 2), 8, offset=256)], 512)))
    assert file.metadata == {"a": 1, "b": ["x", ""]}
    assert [math.prod(info.shape) for info in file.tensors.values()] == [64, 128]


def test_header_limit(save: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = gguf([key("big", STRING, string("x" * 1000))])
    GGUFFile(save(raw))
    monkeypatch.setattr(gguf_file, "MAX_HEADER", 1000)
    with pytest.raises(ModelError, match=r"key 'big'.*limit of 1000"):
        GGUFFile(save(raw))


def test_long_names_are_shortened_in_messages(save: Callable[[bytes], Path]) -> None:
    with pytest.raises(ModelError, match="kkkkk") as caught:
        GGUFFile(save(gguf([key("k" * 60000, 99, b"")])))
    assert len(str(caught.value)) < 500


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "loop").symlink_to("loop")
    for path, message in {
        tmp_path: "is a directory",
        tmp_path / "absent.gguf": r"absent\.gguf: no such file",
        pipe: "pipe: is not a regular file",
        tmp_path / "loop": "loop.*cannot be read",
        tmp_path / "a\0b": "cannot be read",
        tmp_path / ("x" * 300): "cannot be read",
    }.items():
        with pytest.raises(ModelError, match=message):
            GGUFFile(path)
        with pytest.raises(ModelError, match=message):
            GGUFFile(str(path))


def test_permission_denied(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod would not stop a superuser
    with pytest.raises(ModelError, match=r"rich\.gguf.*Permission denied"):
        GGUFFile(rich)


def test_every_truncation_is_refused(save: Callable[[bytes], Path]) -> None:
    values = [(kind, bytes(struct.calcsize(form))) for kind, form in enumerate("BbHhIif?")]
    values += [
        (STRING, string("abc")),
        (ARRAY, u32(I32) + u64(2, 7)),
        (ARRAY, u32(STRING) + u64(1) + string("de")),
    ]
    keys = [key(f"k{i}", kind, value) for i, (kind, value) in enumerate(values)]
    tensors = [tensor("q", (32, 2), 8), tensor("f", (3,), offset=96)]
    complete = len(gguf(keys, tensors, data=1)) - 1 + 96 + 3 * 4
    raw = gguf(keys, tensors)
    for length in range(complete):
        with pytest.raises(ModelError, match=r"model\.gguf"):
            GGUFFile(save(raw[:length]))
    for length in range(complete, complete + 9):
        assert GGUFFile(save(raw[:length])).size == length


def test_flipped_bytes_never_raise_anything_else(rich: Path) -> None:
    raw, rng = rich.read_bytes(), random.Random(20)
    header = min(info.offset for info in GGUFFile(rich).tensors.values())
    refused = 0
    with rich.open("r+b") as handle:
        for trial in range(3000):
            changed = bytearray(raw[:header])
            for _ in range(1 + trial % 3):
                changed[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            handle.seek(0)
            handle.write(changed)
            handle.flush()
            try:
                file = GGUFFile(rich)
            except ModelError:
                refused += 1
            else:
                for name in file.tensors:
                    assert file.data(name).nbytes == file.tensors[name].nbytes
    assert 1000 < refused < 3000  # the flips reach the rules, and not all of them matter

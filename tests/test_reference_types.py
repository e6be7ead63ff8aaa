"""The reference's weight types against the gguf package's dequantize, exact sums, and NUMERICS.md's table.

Pure Python: what the C library is held against has to stand without it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

from pyinfer.backend import reference as ref

BLOCKS = {T(type).name: block for type, (block, _) in ref.UNPACK.items()}
QUANTISED = [name for name in BLOCKS if GGML_QUANT_SIZES[T[name]][0] > 1]
MINIMUMS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
SCALES = ("d", "dmin", "m")
FINITE = np.array([h for h in range(1 << 16) if h & 0x7C00 != 0x7C00], "<u2").view("<f2")


def random_blocks(name: str, rows: int, blocks: int) -> Any:
    """Any bits but infinity and NaN; a quarter of the blocks with the lowest codes, a quarter the highest."""
    rng = np.random.RandomState(T[name])
    block = BLOCKS[name]
    raw = rng.randint(0, 256, (rows, blocks, block.itemsize)).astype(np.uint8)
    raw[rng.randint(0, 4, (rows, blocks)) == 0] = 0
    raw[rng.randint(0, 4, (rows, blocks)) == 0] = 255
    b = raw.view(block)[..., 0]
    for field in set(SCALES) & set(block.names):
        b[field] = rng.choice(FINITE, (rows, blocks))
        b[field][: rows // 2] = rng.choice(np.array([65504, -65504, 2**-24, 0.0, -0.0], "<f2"), blocks)
    return b


def matrix(name: str, b: Any) -> Any:
    return ref.matrix(T[name], len(b), b.view(np.uint8))


def test_all_types() -> None:
    assert len(BLOCKS) == 16
    for name, block in BLOCKS.items():
        assert block.itemsize == GGML_QUANT_SIZES[T[name]][1], name


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_are_those_of_gguf(name: str) -> None:
    """To the byte: a scale times a code is exact, so a minimum added after it is rounded once in both."""
    b = random_blocks(name, 40, 24)
    with np.errstate(over="ignore"):
        want = dequantize(b.view(np.uint8).reshape(len(b), -1), T[name])
    got = matrix(name, b).rows(range(len(b)))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    assert len(np.unique(want)) > 100


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_widen_as_gguf_widens_them(name: str) -> None:
    size = BLOCKS[name].itemsize
    bits = np.arange(1 << 16) if size == 2 else np.random.RandomState(1).randint(0, 1 << 32, 1 << 16)
    raw = bits.astype(f"<u{size}").reshape(64, -1)
    got = ref.matrix(T[name], 64, raw.view(np.uint8)).rows([3, 0, 63])
    want = dequantize(raw.view(np.uint8), T[name])[[3, 0, 63]]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_every_scale_of_mxfp4() -> None:
    """2^(e - 128) for all 256 bytes e, the last no NaN; codes times the last three may be infinity."""
    b = np.zeros((256, 1), BLOCKS["MXFP4"])
    b["e"][:, 0] = np.arange(256)
    b["qs"] = np.arange(16) * 17  # each code in both halves
    w = matrix("MXFP4", b)
    assert [float(s) for s in w.s[:, 0]] == [2.0 ** (e - 128) for e in range(256)]
    rows = w.rows(range(256))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rows, dequantize(b.view(np.uint8).reshape(256, -1), T.MXFP4))
    assert np.isfinite(rows[:253]).all()
    assert (np.isinf(rows).sum(axis=1)[253:] == [8, 16, 24]).all()
    assert not np.signbit(rows[:, [0, 8, 16, 24]]).any()


@pytest.mark.parametrize("name", QUANTISED)
def test_matmul_where_nothing_is_rounded(name: str) -> None:
    """Inputs that are their own int8 codes, scales of a power of two: the dot product of dequantised rows."""
    rng = np.random.RandomState(2)
    b = random_blocks(name, 16, 512 // GGML_QUANT_SIZES[T[name]][0])
    for field in set(SCALES) & set(b.dtype.names):
        b[field] = rng.choice(np.array([2.0**-10, -(2.0**-10)], "<f2"), b.shape)
    if name == "MXFP4":
        b["e"] = rng.randint(118, 123, b.shape)
    x = rng.randint(-3, 4, (3, 512)).astype(np.float32)
    x[:, ::32] = 127  # dx = 1
    w = matrix(name, b)
    assert (w.m is not None) == (name in MINIMUMS)
    want = x.astype(np.float64) @ w.rows(range(16)).astype(np.float64).T
    terms = np.abs(x.astype(np.float64)) @ np.abs(w.rows(range(16))).astype(np.float64).T
    assert want.std() > 1
    assert terms.max() < 2.0**24 * 2.0**-10, "a partial sum may have been rounded"
    np.testing.assert_array_equal(w.matmul(x), want)


def test_activations_of_groups_of_16() -> None:
    """One dx to a block of 32, one sx to each half of it."""
    b = np.zeros((1, 1), BLOCKS["Q2_K"])
    b["dmin"], b["scales"][..., :4] = 1, np.array([1, 2, 3, 4]) << 4  # only minimums, of the first two blocks
    x = np.zeros((1, 256), np.float32)
    x[0, [0, 5, 20, 40, 63]] = [127, 3, -2, 254, 100]
    assert matrix("Q2_K", b).matmul(x).item() == -(1 * 130 + 2 * -2 + 3 * 254 + 4 * 100)


def test_the_page_says_the_same_blocks() -> None:
    page = Path(__file__).parents[1] / "csrc" / "NUMERICS.md"
    table = re.findall(r"^\| (\w+) \| `([^`]+)` \| `[^`]+` \| (16|32) \|", page.read_text(), re.MULTILINE)
    assert [row[0] for row in table] == QUANTISED
    for name, fields, group in table:
        said = [re.fullmatch(r"(f16 )?(\w+)(?:\[(\d+)\])?", field) for field in fields.split(", ")]
        sizes = {m[2]: 2 if m[1] else int(m[3]) for m in said if m}
        assert sizes == {n: BLOCKS[name][n].itemsize for n in BLOCKS[name].names}, name
        assert list(sizes) == list(BLOCKS[name].names), name
        b = np.zeros((1, 1), BLOCKS[name])
        assert matrix(name, b).code.shape[-1] == int(group), name

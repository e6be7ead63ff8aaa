"""What surrounds the arithmetic: memory beside the buffers, the caller's FP environment, levels, names."""

from __future__ import annotations

import ctypes
import platform
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernels.cases import CASES, expected
from kernels.harness import LEVELS, Native, check, ffi, in_child, lib

from pyinfer import _pi
from pyinfer.backend.native import levels

NAMES = [ffi.string(lib.pi_kernel_name(i)).decode() for i in range(lib.pi_kernel_count())]


def same(name: str, native: Native, what: str) -> None:
    results = list(CASES[name](native))
    assert len(results) == len(expected(name)) > 0
    for i, (got, want) in enumerate(zip(results, expected(name), strict=True)):
        check(f"{name}, result {i}, {what}", native.level, 0, want.shape, got, want)


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_threads_move_no_byte(native: Native, name: str, threads: int) -> None:
    same(name, Native(native.level, threads), f"{threads} threads")


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("level", LEVELS)
def test_buffers_against_inaccessible_pages(level: str, side: str) -> None:
    run = in_child("kernels.guarded", level, side)
    assert run.returncode == 0, f"in {run.stdout.split()[-1:]}:\n{run.stderr}"
    assert run.stdout.split() == [*CASES, *CASES]


# ---- the floating-point environment ------------------------------------------------------------------------


@dataclass(frozen=True)
class ControlWord:
    """Where fenv_t holds what C calls the floating-point environment, and its bits."""

    offset: int
    code: str
    default: int
    flush: int  # subnormal results and inputs become 0
    upward: int
    trap: int  # division by zero, overflow, underflow
    kept: int  # control bits: the others are sticky flags


CONTROL_WORDS = {
    ("Linux", "x86_64"): ControlWord(28, "<I", 0x1F80, 0x8040, 0x4000, 0x0E00, 0xFFC0),
    ("Linux", "aarch64"): ControlWord(0, "<I", 0, 1 << 24, 1 << 22, 0, 0xFFFFFFFF),
    ("Darwin", "x86_64"): ControlWord(4, "<I", 0x1F80, 0x8040, 0x4000, 0x0E00, 0xFFC0),
    ("Darwin", "arm64"): ControlWord(8, "<Q", 0, 1 << 24, 1 << 22, 0, 0xFFFFFFFF),
}
WORD = CONTROL_WORDS[platform.system(), platform.machine()]
LIBM = ctypes.CDLL(None)  # the interpreter links it


def control() -> int:
    buffer = ctypes.create_string_buffer(64)
    LIBM.fegetenv(buffer)
    return int(struct.unpack_from(WORD.code, buffer, WORD.offset)[0]) & WORD.kept


def set_control(word: int) -> None:
    buffer = ctypes.create_string_buffer(64)
    LIBM.fegetenv(buffer)
    struct.pack_into(WORD.code, buffer, WORD.offset, word)
    LIBM.fesetenv(buffer)


class Hostile(Native):
    """Each C call is made under another floating-point environment, which it must leave as it was."""

    word = WORD.default

    def call(self, name: str, args: list[Any]) -> int:
        function = getattr(lib, name)
        set_control(self.word)
        try:
            code = function(*args)
            after = control()
        finally:
            set_control(WORD.default)
        assert after == self.word & WORD.kept, f"{name} left {after:#x}, not {self.word:#x}"
        return int(code)


WORDS = {
    "flush": WORD.default | WORD.flush,
    "upward": WORD.default | WORD.upward,
    "trap": WORD.default & ~WORD.trap,
}


def test_the_hostile_environment_is_real() -> None:
    tiny, one = np.full(4, 1e-40, np.float32), np.float32(1)
    set_control(WORDS["flush"])
    flushed = tiny * one
    set_control(WORDS["upward"])
    above = np.float32(1) + tiny
    set_control(WORD.default)
    assert not flushed.any()
    assert (above > 1).all()
    assert (tiny * one).all()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", CASES)
def test_the_callers_environment_moves_no_byte_and_stays(native: Native, name: str, word: str) -> None:
    hostile = Hostile(native.level, threads=2)
    hostile.word = WORDS[word]
    same(name, hostile, word)


def test_workers_started_under_another_environment(native: Native) -> None:
    set_control(WORDS["flush"] | WORDS["upward"])
    try:
        many = Native(native.level, 3)
    finally:
        set_control(WORD.default)
    for name in CASES:
        same(name, many, "workers started under another environment")


# ---- levels and names --------------------------------------------------------------------------------------


def kernel_levels(native: Native) -> list[str]:
    """Of each entry of the table, the level whose kernel runs it."""
    return [ffi.string(lib.pi_ctx_kernel_level(native.ctx, i)).decode() for i in range(len(NAMES))]


def own(level: str = LEVELS[-1]) -> list[str]:
    """The entries that a level brings itself."""
    return [name for name, of in zip(NAMES, kernel_levels(Native(level)), strict=True) if of == level]


def test_each_level_runs_its_own_kernels(native: Native) -> None:
    order, ran = list(levels()), kernel_levels(native)
    assert ffi.string(lib.pi_ctx_level(native.ctx)).decode() == native.level
    assert native.level in ran, "no entry comes from the level itself"
    assert all(order.index(level) <= order.index(native.level) for level in ran)
    assert (set(ran) == {"ref"}) == (native.level == "ref")


def test_the_best_level_is_the_default() -> None:
    ctx = ffi.gc(lib.pi_ctx_new(ffi.NULL, 1), lib.pi_ctx_free)
    assert ffi.string(lib.pi_ctx_level(ctx)).decode() == LEVELS[-1]


def test_a_level_that_cannot_run_is_refused() -> None:
    for name in ["", "REF", "sse9", *(name for name, runs in levels().items() if not runs)]:
        assert lib.pi_ctx_new(name.encode(), 1) == ffi.NULL


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_the_extension_exports_its_entry_alone() -> None:
    """Anything else could clash with another library's names."""
    flags = "-gU" if sys.platform == "darwin" else "-D"
    out = subprocess.run(["nm", flags, _pi.__file__], check=True, capture_output=True, text=True).stdout
    defined = {line.split()[-1].lstrip("_") for line in out.splitlines() if line.split()[-2] in "TDBRV"}
    assert defined - {"init", "fini"} == {"PyInit__pi"}


# ---- what bench holds speeds against -----------------------------------------------------------------------


def test_the_read_measure_reads_every_word() -> None:
    data = np.random.default_rng(0).integers(0, 2**64, 40 * 8192, np.uint64)
    for threads in (1, 3):
        native, out = Native("ref", threads), ffi.new("uint64_t *")
        assert lib.pi_measure_read(native.ctx, ffi.from_buffer(data), data.nbytes, out) == 0
        assert out[0] == np.bitwise_xor.reduce(data)


def test_the_multiply_measure_counts_by_width(native: Native) -> None:
    macs = ffi.new("int64_t *")
    assert lib.pi_measure_multiply(native.ctx, lib.PI_F32, 2, 3, macs) == 0
    f32_macs = macs[0]
    assert lib.pi_measure_multiply(native.ctx, lib.PI_Q8_0, 2, 3, macs) == 0
    assert f32_macs % 6 == 0
    assert (macs[0] == 0) if native.level == "ref" else (macs[0] > f32_macs > 0)

"""Every level gives the committed digests, on every architecture: per op, per tiny model, and for SmolLM2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden import digests
from kernels.cases import CASES
from kernels.harness import LEVELS

import pyinfer

GOLDEN = json.loads(digests.FILE.read_text())


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYINFER_CPU", request.param)
    return str(request.param)


def test_they_are_of_this_version() -> None:
    assert GOLDEN["numerics"] == pyinfer.NUMERICS
    assert set(GOLDEN["ops"]) == set(CASES)


@pytest.mark.parametrize("name", list(CASES))
def test_op(name: str, level: str) -> None:
    assert digests.op(name, level) == GOLDEN["ops"][name]


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("name", list(digests.MODELS))
def test_tiny_model(name: str, kv_dtype: str, level: str, tmp_path: Path) -> None:
    assert digests.tiny(name, tmp_path, kv_dtype, threads=2) == GOLDEN["models"][f"{name}-kv_{kv_dtype}"]


def test_smollm2(level: str) -> None:
    assert digests.smollm2(2) == GOLDEN["smollm2"]["2"]


def test_smollm2_64_tokens() -> None:
    """At the best level here."""
    assert digests.smollm2(64) == GOLDEN["smollm2"]["64"]


FAST_MATH = """
#if defined(__x86_64__)
#include <xmmintrin.h>
__attribute__((constructor)) static void start(void) { _mm_setcsr(_mm_getcsr() | 0x8040); }
#else
__attribute__((constructor)) static void start(void) {
    unsigned long e;
    __asm__ volatile("mrs %0, fpcr" : "=r"(e));
    __asm__ volatile("msr fpcr, %0" : : "r"(e | 1 << 24));
}
#endif
"""
UNDER_FAST_MATH = """
import ctypes, sys
from pathlib import Path
ctypes.CDLL(sys.argv[1])
import numpy as np
assert not (np.full(4, 1e-40, np.float32) * np.float32(1)).any(), "nothing is shown"
from golden import digests
print(digests.tiny("qwen3-Q8_0", Path(sys.argv[2]), "f16", threads=2), digests.smollm2(2))
"""


def test_under_a_library_with_fast_math_start_up_code(tmp_path: Path) -> None:
    """As one linked with -ffast-math does: whoever loads it has subnormals flushed from then on."""
    source, library = tmp_path / "fast.c", tmp_path / "fast.so"
    source.write_text(FAST_MATH)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    command = [sys.executable, "-c", UNDER_FAST_MATH, library, tmp_path]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [GOLDEN["models"]["qwen3-Q8_0-kv_f16"], GOLDEN["smollm2"]["2"]]

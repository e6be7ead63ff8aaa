"""exp over a sample of inputs: at most one ulp off, never descending, exact ends. tools/exp_all.c: all."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from kernels.harness import Native, Out, check, f32

from pyinfer.backend import reference as ref

ROOT = Path(__file__).parents[2]
SPECIAL = np.array(
    [0, 0.5, 1, 88.0, 88.72283, 88.72284, 89, 103.9, 103.97, 104, 1e5, 3e38, np.inf, 1e-45, 1e-38], f32
)


@cache
def sample() -> np.ndarray:
    """Every 1,021st bit pattern that is no NaN, and the special ones."""
    x = np.arange(0, 1 << 32, 1021, dtype=np.uint64).astype(np.uint32).view(f32)
    return np.concatenate([x[~np.isnan(x)], SPECIAL, -SPECIAL])


def exp(native: Native, x: np.ndarray) -> np.ndarray:
    y: np.ndarray = native.op("pi_exp", x, x.size, Out(x.shape))
    return y


def ulps(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """|y - e^x| in units of the last place of e^x, where that is a finite float32."""
    with np.errstate(over="ignore", under="ignore"):
        e = np.exp(x.astype(np.float64))
    unit = np.ldexp(1.0, np.maximum(np.frexp(e)[1] - 24, -149))
    finite = (e < float(np.finfo(f32).max)) & (x > -200)
    off: np.ndarray = np.abs(y[finite].astype(np.float64) - e[finite]) / unit[finite]
    return off


def test_exp_is_within_one_ulp(native: Native) -> None:
    x = sample()
    off = ulps(exp(native, x), x)
    assert off.size > 2_000_000
    assert off.max() <= 1.0


def test_exp_is_the_references(native: Native) -> None:
    x = sample()[::7]
    check("exp", native.level, 0, x.shape, exp(native, x), ref.exp(x))


def seam(x: float, count: int = 20_000) -> np.ndarray:
    """The floats about x, ascending."""
    bits = int(np.asarray(f32(x)).view(np.uint32))
    run = (bits + np.arange(-count, count)).astype(np.uint32).view(f32)
    return run if x > 0 else run[::-1].copy()


def test_exp_never_descends(native: Native) -> None:
    """Least of all where the range reduction goes to the next power of two, or results become subnormal."""
    half_steps = [
        (n + 0.5) * np.log(2) for n in (*range(-151, -140), *range(-130, -120), *range(-4, 4), 60, 126, 127)
    ]
    for at in (*half_steps, -104.0, -103.97, -87.33655, -1.0, -1e-7, 1e-7, 1.0, 88.7228, 89.0):
        run = seam(at)
        assert (np.diff(run) > 0).all()
        y = exp(native, run)
        with np.errstate(invalid="ignore"):
            assert (y[1:] >= y[:-1]).all(), f"exp descends near {at} at level {native.level}"


def test_exp_ends(native: Native) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 89, 3e38, np.inf, -104, -3e38, -np.inf], f32)
    want = np.array([1, 1, 1, 1, np.inf, np.inf, np.inf, 0, 0, 0], f32)
    check("exp", native.level, 0, x.shape, exp(native, x), want)
    assert np.isnan(exp(native, np.full(33, np.nan, f32))).all()


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("exp_all", ["0x42b00000", "0x42b40000", "2"], "262144 inputs"),
        ("quotients", [], "46517418 quotients"),
    ],
)
def test_programs_that_go_through_all(tmp_path: Path, name: str, arguments: list[str], said: str) -> None:
    program = tmp_path / name
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
    command = ["cc", *flags, str(ROOT / f"tools/{name}.c"), "-o", str(program), "-pthread", "-lm"]
    subprocess.run(command, check=True)
    run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    assert said in run.stdout

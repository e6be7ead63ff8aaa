"""Every level gives the committed digests, on every architecture: per op, per tiny model, and for SmolLM2."""

from __future__ import annotations

import json
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

"""Logits against Hugging Face transformers: the models are the right functions, not just the same everywhere.

The fixtures, and what made them: golden/hf/make.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tiny import HF_MODELS, write_tiny

import pyinfer
from pyinfer import cache
from pyinfer.backend.native import NativeBackend
from pyinfer.engine import Session
from pyinfer.fetch import resolve
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry

GOLDEN = Path(__file__).parent / "golden" / "hf"


@pytest.mark.parametrize("backend", ["reference", "simd"])
@pytest.mark.parametrize("name", HF_MODELS)
def test_tiny(name, backend, tmp_path):
    """F32 throughout; only the order of additions differs: measured 9e-7 of the logits' range."""
    arch, changes = HF_MODELS[name]
    path = write_tiny(tmp_path / "tiny.gguf", arch, **changes)
    with np.load(GOLDEN / f"{name}.npz") as f, pyinfer.load(path, backend=backend, kv_dtype="f32") as model:
        got, want = model.logits(f["tokens"].tolist()), f["logits"]
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-5 * np.ptp(want)


class Dequantised(NativeBackend):
    """Every matrix as float32, and so no input of a matmul quantised: as SmolLM2's fixture was made."""

    def weight(self, type, rows, cols, data, *, pack=True):
        values = dequantize(data.reshape(rows, -1), GGMLQuantizationType(type))
        return super().weight(GGMLQuantizationType.F32, rows, cols, values.reshape(-1).view(np.uint8))


@pytest.fixture(scope="module")
def smollm2():
    """The file, and the 32 largest logits of each position of "The capital of France is Paris. ..."."""
    with np.load(GOLDEN / "smollm2.npz") as f:
        return resolve("smollm2", progress=False), f["tokens"].tolist(), f["top_ids"], f["top_logits"]


def test_smollm2_as_float32(smollm2):
    """Measured 1.4e-6 of the logits' range, 54."""
    path, tokens, ids, want = smollm2
    ops = Dequantised("simd", None, 1)
    with GGUFFile(path) as file:
        decoder = registry.load(file, ops)
    kv = cache.create("positional", ops, decoder.config, len(tokens), "f32")
    (logits,) = Session(decoder, kv).run(tokens, all_logits=True)
    assert np.abs(np.take_along_axis(logits, ids, axis=-1) - want).max() < 1e-5 * np.ptp(logits)
    assert (logits.argmax(axis=-1) == ids[:, 0]).all()


def test_smollm2_as_it_runs(smollm2):
    """Inputs of a matmul in 8 bits, K and V in 16: measured 0.9 at most, 0.2 on average, of a range of 54."""
    path, tokens, ids, want = smollm2
    with pyinfer.load(path, progress=False) as model:
        logits = model.logits(tokens)
        text = model.generate("The capital of France is", max_tokens=8).text
    error = np.abs(np.take_along_axis(logits, ids, axis=-1) - want)
    assert error.max() < 0.03 * np.ptp(logits)
    assert error.mean() < 0.006 * np.ptp(logits)
    # Where the two likeliest are nearly tied, the other may lead.
    clear = want[:, 0] - want[:, 1] > 2 * error.max()
    assert clear.sum() >= 3
    assert (logits.argmax(axis=-1) == ids[:, 0])[clear].all()
    assert " Paris" in text

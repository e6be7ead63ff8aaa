"""bench/synth.py: its files load, run and are the same each time; its blocks are sane for every type."""

import numpy as np
import pytest
import synth
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from gguf.quants import dequantize
from tiny import SPECIALS

import pyinfer
from pyinfer.gguf_file import GGUFFile
from pyinfer.model.config import SUPPORTED_TYPES

HAVE = [t.name for t in SUPPORTED_TYPES]


@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("type", HAVE)
def test_the_engine_runs_it(tmp_path, name, type):
    path = synth.write(tmp_path / "m.gguf", name, type)
    with pyinfer.load(path) as model:
        assert set(model.describe()["tensor_types"]) == {"F32", type}
        logits = model.logits(model.tokenizer.encode("hello world"))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


def test_the_vocabulary_is_full_of_tokens_that_merging_makes(tmp_path):
    with pyinfer.load(synth.write(tmp_path / "m.gguf", "tiny", "Q8_0")) as model:
        metadata, tokenizer = model._file.metadata, model.tokenizer
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    assert kinds.count(TokenType.NORMAL) == 769 - len(SPECIALS)
    made = [pair.replace(" ", "") for pair in metadata["tokenizer.ggml.merges"]]
    assert made == metadata["tokenizer.ggml.tokens"][256 : 256 + len(made)]
    assert {len(tokenizer.encode(tokenizer.decode([id]))) for id in range(256, 264)} == {1}


def test_synth_knows_every_type_of_the_engine():
    assert set(HAVE) <= set(synth.TYPES)


@pytest.mark.parametrize("type", synth.TYPES)
def test_values_are_centred_and_spread(type):
    data = synth.matrix(type, 64, 1024, seed=3)
    kind = GGMLQuantizationType[type]
    raw = data.view({"F32": np.float32, "F16": np.float16}.get(type, np.uint8))
    values = dequantize(raw, kind)
    assert values.shape == (64, 1024)
    assert abs(values.mean()) < synth.SPREAD / 5
    assert 0.8 < values.std() / synth.SPREAD < 1.25
    assert len({row.tobytes() for row in data}) == 64  # no row twice


def test_bytes_follow_the_seed(tmp_path):
    a, b, c = (synth.write(tmp_path / f"{i}", "tiny", "Q4_K_M", seed=s) for i, s in enumerate((1, 1, 2)))
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()


def test_mixtures(tmp_path):
    def types(mix: str, name: str = "tiny", **how: str) -> dict[str, str]:
        with GGUFFile(synth.write(tmp_path / "m.gguf", name, mix, **how)) as file:
            assert file.metadata["general.file_type"] in list(LlamaFileType)
            return {n: t.type.name for n, t in file.tensors.items() if len(t.shape) == 2}

    found = types("Q4_K_M")
    assert found["token_embd.weight"] == "Q6_K"  # tied: it is the output matrix
    assert [found[f"blk.{l}.attn_v.weight"] for l in (0, 1)] == ["Q4_K", "Q6_K"]
    assert {found[f"blk.{l}.attn_q.weight"] for l in (0, 1)} == {"Q4_K"}
    found = types("Q5_K_M", "tiny-llama")
    assert (found["token_embd.weight"], found["output.weight"]) == ("Q5_K", "Q6_K")
    found = types("Q3_K_M")
    assert [found[f"blk.0.{t}.weight"] for t in ("attn_q", "attn_v", "attn_output")] == [
        "Q3_K",
        "Q5_K",
        "Q4_K",
    ]
    found = types("Q4_0", output="Q8_0")
    assert set(found.values()) == {"Q4_0", "Q8_0"}
    assert found["token_embd.weight"] == "Q8_0"
    # As llama.cpp: 14 of 28 layers. Rows of 576 are no blocks of 256: another type stands in.
    assert sum(synth.more_bits(l, 28) for l in range(28)) == 14
    smol = synth.SHAPES["smollm2-135m"][1]
    assert synth.type_of("Q4_K_M", "attn_q", 0, smol, 576, None) == "Q5_0"
    assert synth.type_of("Q4_K_M", "token_embd", -1, smol, 576, None) == "Q8_0"
    assert synth.type_of("Q4_K_M", "ffn_down", 5, smol, 1536, None) == "Q6_K"


def test_unknown_names(tmp_path):
    for name, mix, output in (("gpt-9", "Q8_0", None), ("tiny", "Q9_0", None), ("tiny", "Q8_0", "Q9_0")):
        with pytest.raises(ValueError, match=r"9.* is not known; there are "):
            synth.write(tmp_path / "m.gguf", name, mix, output=output)
    with pytest.raises(ValueError, match="rows of 40 values"):
        synth.matrix("Q8_0", 2, 40)

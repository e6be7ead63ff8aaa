"""The tiny models: files that gguf reads back, the same bytes everywhere, fixtures that belong to them."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, LlamaFileType
from gguf.quants import dequantize
from jinja2 import Template
from tiny import HF_MODELS, RANDOM_BLOCKS, SHAPES, WIDE, replace, tiny_weights, write_tiny

GOLDEN = Path(__file__).parent / "golden" / "hf"

# Of the whole file. If a change is meant, remake the fixtures in golden/hf as well.
SHA256 = {
    "llama-F32": "eae88d6230488afa2dc556a6359c926d1bfa88477a202b3ce9ba4a3c653c6d0a",
    "llama_untied-F16": "17e29e5b2973ab1f5f0c1d515502fc39ff1389a206f4ad65dee780cd462845c7",
    "llama_rope_freqs-Q8_0": "38b1471909795fa49cdd9b81b94ef60fcc57024600c5da3b708f68ecedd87592",
    "llama-Q4_1": "d2929fa3280ea68cf239ffd5ab0816fa086d6205acfe15a11e16f8a5bf282b16",
    "qwen3-F32": "a8040567d1580e7f292b03417b78d2d1c8d2fc21bd4464e608c45ee60485468d",
    "qwen3_untied-Q8_0": "e8d0f5e3306cbcbd7d196111b96ade5986c1a8d8b4585f1b107bbe590f61c6aa",
    "qwen3-Q4_1": "92d83a0e8b1b1efec12ab2a608886ffdd01526e7d3f1c349f2197a52c17f5242",
}


def read(path: Path) -> tuple[dict, dict]:
    """The file's metadata, and its tensors as (type name, f32 values)."""
    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return fields, {t.name: (t.tensor_type.name, dequantize(t.data, t.tensor_type)) for t in reader.tensors}


@pytest.mark.parametrize("name", SHA256)
def test_bytes(name, tmp_path):
    model, type = name.split("-")
    arch, changes = HF_MODELS[model]
    path = write_tiny(tmp_path / "tiny.gguf", arch, type=type, **changes)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[name]


# The largest error of a weight in [-1/4, 1/4] and of its block's scale and minimum in f16.
@pytest.mark.parametrize(("type", "error"), [("F32", 0), ("F16", 2**-14), ("Q8_0", 0.0012), ("Q4_1", 0.018)])
@pytest.mark.parametrize("model", HF_MODELS)
def test_reads_back(model, type, error, tmp_path):
    arch, changes = HF_MODELS[model]
    fields, tensors = read(write_tiny(tmp_path / "tiny.gguf", arch, type=type, **changes))
    weights = tiny_weights(arch, **changes)
    assert list(tensors) == list(weights)
    for name, want in weights.items():
        kind, got = tensors[name]
        assert kind == (type if want.ndim == 2 else "F32"), name
        assert got.shape == want.shape, name
        assert np.abs(got - want).max() <= (error if want.ndim == 2 else 0), name

    s = replace(SHAPES[arch], **changes)
    assert fields["general.architecture"] == arch
    want_fields = {
        "block_count": s.n_layers,
        "context_length": s.n_ctx,
        "embedding_length": s.d_model,
        "feed_forward_length": s.d_ff,
        "attention.head_count": s.n_heads,
        "attention.head_count_kv": s.n_kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": np.float32(s.eps),
        "rope.freq_base": s.rope_base,
        "rope.dimension_count": s.head_dim,
        "vocab_size": s.n_vocab,
    }
    assert {key: fields[f"{arch}.{key}"] for key in want_fields} == want_fields


@pytest.mark.parametrize(
    ("type", "error"), [("BF16", 2**-11), ("Q4_0", 0.034), ("Q5_0", 0.017), ("Q5_1", 0.009)]
)
def test_reads_back_more(type, error, tmp_path):
    _, tensors = read(write_tiny(tmp_path / "tiny.gguf", "llama", type=type))
    for name, want in tiny_weights("llama").items():
        kind, got = tensors[name]
        assert kind == (type if want.ndim == 2 else "F32"), name
        assert np.abs(got - want).max() <= (error if want.ndim == 2 else 0), name


@pytest.mark.parametrize("type", RANDOM_BLOCKS)
def test_random_blocks(type, tmp_path):
    """Weights about as large as the others, and as many positive as negative."""
    _, tensors = read(write_tiny(tmp_path / "tiny.gguf", "qwen3", type=type, **WIDE))
    weights = tiny_weights("qwen3", **WIDE)
    assert list(tensors) == list(weights)
    for name, (kind, got) in tensors.items():
        assert got.shape == weights[name].shape
        assert kind == (type if got.ndim == 2 else "F32"), name
        if got.ndim == 2:
            assert np.abs(got).max() <= 0.51, name
            assert got.std() > 0.05, name
            assert np.abs(got.mean()) < 0.1 * got.std(), name


def test_mixture(tmp_path):
    types = {"attn_v": "Q6_K", "token_embd": "F16"}
    fields, tensors = read(write_tiny(tmp_path / "tiny.gguf", type="Q4_K", types=types, **WIDE))
    assert fields["general.file_type"] == LlamaFileType.MOSTLY_Q4_K_M
    kinds = {name: kind for name, (kind, _) in tensors.items() if "norm" not in name}
    assert kinds.pop("token_embd.weight") == "F16"
    assert {kinds.pop(f"blk.{l}.attn_v.weight") for l in range(2)} == {"Q6_K"}
    assert set(kinds.values()) == {"Q4_K"}


@pytest.mark.parametrize(("arch", "pre"), [("llama", "smollm"), ("qwen3", "qwen2")])
def test_tokenizer(arch, pre, tmp_path):
    fields, _ = read(write_tiny(tmp_path / "tiny.gguf", arch))
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(set(tokens)) == len(kinds) == fields[f"{arch}.vocab_size"]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", pre)
    assert (tokens[0], tokens[ord("h") - ord("!")], tokens[220]) == ("!", "h", "Ġ")  # as GPT-2 numbers bytes
    for merge in fields["tokenizer.ggml.merges"]:
        assert {*merge.split(" "), merge.replace(" ", "")} <= set(tokens)
    assert tokens[fields["tokenizer.ggml.bos_token_id"]] == "<|endoftext|>"
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]

    chat = Template(fields["tokenizer.chat_template"])
    said = "<|im_start|>user\nhello<|im_end|>\n"
    assert chat.render(messages=[{"role": "user", "content": "hello"}]) == said
    assert chat.render(messages=[], add_generation_prompt=True) == "<|im_start|>assistant\n"


def test_vocabulary_too_small(tmp_path):
    with pytest.raises(ValueError, match="n_vocab 64: the tokenizer has 267 tokens"):
        write_tiny(tmp_path / "tiny.gguf", n_vocab=64)
    fields, tensors = read(write_tiny(tmp_path / "tiny.gguf", n_vocab=64, tokenizer=False))
    assert tensors["token_embd.weight"][1].shape == (64, 96)
    assert not [key for key in fields if key.startswith("tokenizer.")]


def test_seed_and_sizes_change_only_what_they_name():
    one, other = tiny_weights("llama"), tiny_weights("llama", seed=1)
    assert all(not np.array_equal(one[name], other[name]) for name in one)
    untied = tiny_weights("llama", tied=False, rope_freqs=True)
    assert untied.keys() - one.keys() == {"output.weight", "rope_freqs.weight"}
    assert all(np.array_equal(one[name], untied[name]) for name in one)


def test_rope_freqs_meet_every_case():
    divisors = tiny_weights("llama", rope_freqs=True)["rope_freqs.weight"]
    assert divisors.shape == (20,)
    assert divisors[0] == 1  # a short wave
    assert np.any((divisors > 1) & (divisors < 4))  # blended
    assert divisors[-1] == 4  # a long one


@pytest.mark.parametrize("name", HF_MODELS)
def test_hf_fixture(name):
    arch, changes = HF_MODELS[name]
    with np.load(GOLDEN / f"{name}.npz") as f:
        assert f["tokens"].dtype == np.int32
        assert f["logits"].shape == (24, replace(SHAPES[arch], **changes).n_vocab)
        assert f["logits"].dtype == np.float32
        assert 3 < np.abs(f["logits"]).max() < 10  # well spread, so that a wrong model shows
        weights = b"".join(w.tobytes() for w in tiny_weights(arch, **changes).values())
        assert f["weights"] == hashlib.sha256(weights).hexdigest(), (
            "made from other weights: run golden/hf/make.py"
        )


def test_smollm2_fixture():
    with np.load(GOLDEN / "smollm2.npz") as f:
        assert f["tokens"].tolist() == [504, 3575, 282, 4649, 314, *f["greedy"].tolist()]
        assert f["top_ids"][4:-1, 0].tolist() == f["greedy"].tolist()
        assert f["top_logits"].shape == (17, 32)
        assert np.all(np.diff(f["top_logits"]) <= 0)

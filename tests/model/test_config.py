"""Config: hyperparameters of tiny llama and qwen3 files; for bad ones, a refusal naming key or tensor."""

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quant_shape_to_byte_shape, quantize

from pyinfer.errors import ModelError
from pyinfer.gguf_file import GGUFFile
from pyinfer.model.config import OPTIONAL_TENSORS, Config, expected_tensors

F16, F32, F64, Q8_0, Q8_1, IQ2_XXS, TQ1_0 = (
    GGMLQuantizationType[name] for name in ("F16", "F32", "F64", "Q8_0", "Q8_1", "IQ2_XXS", "TQ1_0")
)
TYPE_NAMES = (
    "F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1, Q4_0, IQ4_NL, IQ4_XS, MXFP4, Q3_K, Q2_K"
)
TYPES = [GGMLQuantizationType[name] for name in TYPE_NAMES.split(", ")]
MISSING = object()

N_LAYERS, D_MODEL, D_FF, N_VOCAB, HEAD_DIM = 2, 64, 96, 5, 32
KEYS = {
    "general.architecture": "llama",
    "llama.block_count": N_LAYERS,
    "llama.embedding_length": D_MODEL,
    "llama.feed_forward_length": D_FF,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 2.0**-20,
    "llama.context_length": 128,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "tokenizer.ggml.tokens": ["a", "b", "c", "d", "e"],
    "tokenizer.ggml.bos_token_id": 1,
}
MODEL = {"token_embd.weight": (N_VOCAB, D_MODEL), "output_norm.weight": (D_MODEL,)}
LAYER = {
    "attn_norm.weight": (D_MODEL,),
    "attn_q.weight": (128, D_MODEL),
    "attn_k.weight": (64, D_MODEL),
    "attn_v.weight": (64, D_MODEL),
    "attn_output.weight": (D_MODEL, 128),
    "ffn_norm.weight": (D_MODEL,),
    "ffn_gate.weight": (D_FF, D_MODEL),
    "ffn_up.weight": (D_FF, D_MODEL),
    "ffn_down.weight": (D_MODEL, D_FF),
}
QK_NORMS = {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
Tensors = dict[str, tuple[tuple[int, ...], GGMLQuantizationType]]


def tensors(arch: str = "llama") -> Tensors:
    layer = LAYER | (QK_NORMS if arch == "qwen3" else {})
    shapes = MODEL | {f"blk.{l}.{name}": shape for l in range(N_LAYERS) for name, shape in layer.items()}
    return {name: (shape, F32 if len(shape) == 1 else F16) for name, shape in shapes.items()}


# Rows of 256, a block of the larger types.
WIDE_KEYS = {"llama.embedding_length": 256, "llama.feed_forward_length": 512, "llama.attention.head_count": 8}
WIDE_CONFIG = {"d_model": 256, "d_ff": 512, "n_heads": 8}


def wide_tensors(matrices: GGMLQuantizationType) -> Tensors:
    """As WIDE_KEYS say."""
    inner = {"attn_q": (256, 256), "attn_k": (64, 256), "attn_v": (64, 256), "attn_output": (256, 256)}
    inner |= {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
    shapes = {f"blk.{l}.{name}.weight": shape for l in range(N_LAYERS) for name, shape in inner.items()}
    norms = [name for name, (shape, _) in tensors().items() if len(shape) == 1]
    kinds = {name: (shape, matrices) for name, shape in shapes.items()}
    return {
        "token_embd.weight": ((N_VOCAB, 256), matrices),
        **kinds,
        **{name: ((256,), F32) for name in norms},
    }


def keys(arch: str = "llama") -> dict[str, Any]:
    renamed = {key.replace("llama.", f"{arch}."): value for key, value in KEYS.items()}
    return renamed | {"general.architecture": arch}


Build = Callable[..., Config]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Writes a file of the keys and tensors, with changes (None takes one away), and reads its Config."""

    def write(
        arch: str = "llama",
        changed_keys: dict[str, Any] | None = None,
        changed_tensors: dict[str, Any] | None = None,
        fill: float = 1.0,
    ) -> Config:
        path = tmp_path / "tiny.gguf"
        all_keys = keys(arch) | (changed_keys or {})
        all_tensors = tensors(arch) | (changed_tensors or {})
        writer = GGUFWriter(path, "unused")
        del writer.kv_data[0]["general.architecture"]
        for key, value in all_keys.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                kind = (
                    GGUFValueType.UINT32
                    if type(value) is int and value >= 0
                    else GGUFValueType.get_type(value)
                )
                writer.add_key_value(key, value, kind)
        for name, tensor in all_tensors.items():
            if tensor is not None:
                shape, kind = tensor
                if kind in (F32, F16):
                    data = quantize(np.full(shape, fill, np.float32), kind)
                else:
                    data = np.zeros(quant_shape_to_byte_shape(shape, kind), np.uint8)
                writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUFFile(path) as file:
            return Config.from_gguf(file)

    return write


LLAMA = Config(
    arch="llama",
    n_layers=2,
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    d_ff=96,
    n_vocab=5,
    n_ctx_train=128,
    rms_eps=2.0**-20,
    rope_base=10000.0,
    rope_dim=32,
    rope_scale=1.0,
    rope_style="norm",
    tied=True,
    qk_norm=False,
)


def but(config: Config, **changes: Any) -> Config:
    return Config(**{name: getattr(config, name) for name in Config.__slots__} | changes)


def test_llama(build: Build) -> None:
    assert build() == LLAMA


def test_qwen3(build: Build) -> None:
    assert build("qwen3") == but(LLAMA, arch="qwen3", rope_style="neox", qk_norm=True)


def narrow(head_dim: int) -> dict[str, Any]:
    """Tensors of llama for heads of another width."""
    changed = {f"blk.{l}.attn_q.weight": ((4 * head_dim, D_MODEL), F16) for l in range(N_LAYERS)}
    for l in range(N_LAYERS):
        changed[f"blk.{l}.attn_k.weight"] = changed[f"blk.{l}.attn_v.weight"] = ((2 * head_dim, D_MODEL), F16)
        changed[f"blk.{l}.attn_output.weight"] = ((D_MODEL, 4 * head_dim), F16)
    return changed


KEY_LENGTHS = {"llama.attention.key_length": None, "llama.attention.value_length": None}
GOOD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "untied": ({}, {"output.weight": ((N_VOCAB, D_MODEL), Q8_0)}, {"tied": False}),
    "head-dim-default": (KEY_LENGTHS, narrow(16), {"head_dim": 16, "rope_dim": 16}),
    "kv-heads-default": (
        {"llama.attention.head_count_kv": None},
        {f"blk.{l}.attn_{x}.weight": ((128, D_MODEL), Q8_0) for l in range(N_LAYERS) for x in "kv"},
        {"n_kv_heads": 4},
    ),
    "heads-per-layer": (
        {"llama.attention.head_count": [4, 4], "llama.feed_forward_length": [96, 96]},
        {},
        {},
    ),
    "rope-base": ({"llama.rope.freq_base": 5e5}, {}, {"rope_base": 5e5}),
    "rope-dim": ({"llama.rope.dimension_count": 16}, {}, {"rope_dim": 16}),
    "rope-none": ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}, {}),
    "rope-linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {},
        {"rope_scale": 4.0},
    ),
    "rope-factor-alone": ({"llama.rope.scaling.factor": 2.0}, {}, {"rope_scale": 2.0}),
    "rope-legacy": ({"llama.rope.scale_linear": 8.0}, {}, {"rope_scale": 8.0}),
    "rope-new-before-legacy": (
        {"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 8.0},
        {},
        {"rope_scale": 2.0},
    ),
    "rope-freqs": ({}, {"rope_freqs.weight": ((16,), F32)}, {}),
    "vocab-size": ({"llama.vocab_size": 5, "tokenizer.ggml.tokens": None}, {}, {}),
    "last-token": ({"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eos_token_id": 0}, {}, {}),
    "neutral": ({"llama.expert_count": 0, "llama.logit_scale": 1.0, "llama.attention.causal": True}, {}, {}),
    "one-split": ({"split.count": 1}, {}, {}),
    "unrelated-keys": ({"llama.tensor_data_layout": "Meta AI original pth", "x": [1, 2]}, {}, {}),
    **{
        f"type-{kind.name}": (
            {},
            {name: (shape, kind) for name, (shape, _) in tensors().items() if shape[1:]},
            {},
        )
        for kind in TYPES
        if GGML_QUANT_SIZES[kind][0] <= 32
    },
    **{
        f"type-{kind.name}": (WIDE_KEYS, wide_tensors(kind), WIDE_CONFIG)
        for kind in TYPES
        if GGML_QUANT_SIZES[kind][0] > 32
    },
}


@pytest.mark.parametrize(("changed_keys", "changed_tensors", "changes"), GOOD.values(), ids=GOOD)
def test_accepted(build: Build, changed_keys: dict, changed_tensors: dict, changes: dict) -> None:
    assert build("llama", changed_keys, changed_tensors) == but(LLAMA, **changes)


COUNTS = (
    "llama.block_count",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.context_length",
)
NUMBER = "llama.attention.layer_norm_rms_epsilon"
BAD_KEYS: list[tuple[str, Any, str]] = [
    *((key, None, "is missing") for key in (*COUNTS, NUMBER, "general.architecture")),
    *((key, "4", "'4' is not an integer") for key in (*COUNTS, "llama.attention.head_count_kv")),
    *((key, True, "True is not an integer") for key in COUNTS),
    *((key, 4.0, "4.0 is not an integer") for key in COUNTS),
    *((key, -4, "-4 is not between 1 and") for key in (*COUNTS, "llama.attention.key_length")),
    *((key, 0, "0 is not between 1 and") for key in (*COUNTS, "llama.rope.dimension_count")),
    *((key, 2**32 - 1, "is not between 1 and") for key in COUNTS),
    ("llama.block_count", [2, 2], "is not an integer"),
    ("llama.block_count", 1001, "is not between 1 and 1000"),
    ("llama.attention.head_count", [4, 2], r"\[4, 2\] differs between layers"),
    ("llama.attention.head_count", [4, 4, 4], "differs between layers"),
    ("llama.attention.head_count", [4.0, 4.0], "4.0 is not an integer"),
    ("llama.attention.head_count", ["4", "4"], "is not an integer"),
    ("llama.attention.head_count_kv", 3, "3 does not divide the 4 heads"),
    ("llama.attention.head_count_kv", 8, "8 does not divide the 4 heads"),
    ("llama.attention.key_length", 258, "258 is not between 1 and 256"),
    ("llama.attention.value_length", 16, "differs from the key length, 32"),
    ("llama.rope.dimension_count", 31, "31 is odd"),
    ("llama.rope.dimension_count", 34, "34 is not between 1 and 32"),
    ("llama.rope.freq_base", 1.0, "1.0 is not above 1"),
    ("llama.rope.freq_base", math.inf, "inf is not above 1"),
    ("llama.rope.freq_base", math.nan, "nan is not above 1"),
    ("llama.rope.freq_base", "10000", "is not a number"),
    ("llama.rope.scaling.type", "yarn", "'yarn' is unsupported; supported are none, linear"),
    ("llama.rope.scaling.type", 1, "1 is not a string"),
    ("llama.rope.scaling.factor", 0.0, "0.0 is not above 0"),
    ("llama.rope.scale_linear", -1.0, "-1.0 is not above 0"),
    ("llama.rope.scaling.factor", math.nan, "nan is not above 0"),
    (NUMBER, 0.0, "0.0 is not above 0"),
    (NUMBER, -1e-5, "is not above 0"),
    (NUMBER, math.nan, "nan is not above 0"),
    (NUMBER, math.inf, "inf is not above 0"),
    (NUMBER, False, "False is not a number"),
    (NUMBER, [1e-5, 1e-5], "is not a number"),
    ("general.architecture", "mamba", "'mamba' is unsupported; supported are llama, qwen3"),
    ("general.architecture", 7, "7 is not a string"),
    ("llama.vocab_size", "5", "'5' is not an integer"),
    ("tokenizer.ggml.tokens", [1, 2, 3, 4, 5], "is not an array of strings"),
    ("tokenizer.ggml.bos_token_id", 5, "5 is not between 0 and 4"),
    ("tokenizer.ggml.eot_token_id", 2**32 - 1, "is not between 0 and 4"),
    ("tokenizer.ggml.fim_pre_token_id", -1, "-1 is not between 0 and 4"),
    ("tokenizer.ggml.padding_token_id", "0", "'0' is not an integer"),
    ("llama.expert_count", 8, "needs an operation"),
    ("llama.attention.sliding_window", [4096, 0], "needs an operation"),
    ("llama.attention.causal", False, "needs an operation"),
    ("llama.logit_scale", 0.5, "needs an operation"),
    ("llama.final_logit_softcapping", math.nan, "needs an operation"),
    ("split.count", 3, "one of several files"),
]


@pytest.mark.parametrize(
    ("key", "value", "message"), BAD_KEYS, ids=[f"{k}={v!r:.20}" for k, v, _ in BAD_KEYS]
)
def test_bad_key(build: Build, key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=rf"tiny\.gguf: key '{re.escape(key)}': .*{message}") as caught:
        build("llama", {key: value})
    assert len(str(caught.value)) < 500


def test_keys_that_disagree(build: Build) -> None:
    with pytest.raises(ModelError, match=r"key 'tokenizer\.ggml\.tokens': has 5 tokens, not 6"):
        build("llama", {"llama.vocab_size": 6})
    with pytest.raises(ModelError, match=r"tensor 'token_embd\.weight': has shape \(5, 64\).* \(6, 64\)"):
        build("llama", {"tokenizer.ggml.tokens": ["a"] * 6})
    with pytest.raises(ModelError, match=r"key 'llama\.vocab_size': is missing"):
        build("llama", {"tokenizer.ggml.tokens": None})
    with pytest.raises(ModelError, match=r"key 'llama\.attention\.head_count': 6 does not divide"):
        build("llama", KEY_LENGTHS | {"llama.attention.head_count": 6})
    with pytest.raises(ModelError, match=r"key 'llama\.attention\.key_length': heads of 33 dimensions"):
        build("llama", {"llama.attention.key_length": 33, "llama.attention.value_length": 33})


BAD_TENSORS: list[tuple[str, str, Any, str]] = [
    *(("qwen3", name, None, "is missing") for name in tensors("qwen3")),
    *(
        ("qwen3", name, ((shape[0] + 32, *shape[1:]), kind), "has shape")
        for name, (shape, kind) in tensors("qwen3").items()
    ),
    *(
        ("llama", name, ((shape[0], shape[1] + 32), kind), "has shape")
        for name, (shape, kind) in tensors().items()
        if len(shape) == 2
    ),
    *(
        ("llama", name, ((32, *shape), kind), "has shape")
        for name, (shape, kind) in tensors().items()
        if len(shape) == 1
    ),
    *(
        ("llama", name, (shape, kind), f"type {kind.name} is unsupported; get .* {TYPE_NAMES} here")
        for name, (shape, _) in tensors().items()
        if len(shape) == 2
        for kind in (Q8_1, F64)
    ),
    ("llama", "blk.1.ffn_norm.weight", ((D_MODEL,), F16), "type F16 is unsupported; get .* F32 here"),
    ("llama", "output_norm.weight", ((D_MODEL,), Q8_0), "type Q8_0 is unsupported"),
    ("qwen3", "blk.0.attn_q_norm.weight", ((HEAD_DIM,), F16), "type F16 is unsupported"),
    ("llama", "output.weight", ((N_VOCAB + 1, D_MODEL), F16), "has shape"),
    ("llama", "rope_freqs.weight", ((HEAD_DIM,), F32), "has shape"),
    ("llama", "rope_freqs.weight", ((HEAD_DIM // 2,), F16), "type F16 is unsupported"),
    ("qwen3", "rope_freqs.weight", ((HEAD_DIM // 2,), F32), "needs an operation.*qwen3"),
    ("llama", "blk.0.attn_q.bias", ((128,), F32), "needs an operation.*llama"),
    ("llama", "blk.0.attn_q_norm.weight", ((HEAD_DIM,), F32), "needs an operation.*llama"),
    ("llama", "blk.0.ffn_gate_exps.weight", ((4, D_FF, D_MODEL), F16), "needs an operation"),
    ("llama", "blk.2.attn_norm.weight", ((D_MODEL,), F32), "needs an operation"),
    ("llama", "blk.00.attn_norm.weight", ((D_MODEL,), F32), "needs an operation"),
]


@pytest.mark.parametrize(("arch", "name", "tensor", "message"), BAD_TENSORS)
def test_bad_tensor(build: Build, arch: str, name: str, tensor: Any, message: str) -> None:
    with pytest.raises(ModelError, match=rf"tiny\.gguf: tensor '{re.escape(name)}': .*{message}"):
        build(arch, {}, {name: tensor})


@pytest.mark.parametrize("kind", [IQ2_XXS, TQ1_0])
def test_bad_type_of_wide_blocks(build: Build, kind: GGMLQuantizationType) -> None:
    wide = wide_tensors(F16) | {"blk.1.ffn_down.weight": ((256, 512), kind)}
    with pytest.raises(
        ModelError, match=rf"'blk\.1\.ffn_down\.weight': type {kind.name} is unsupported; get"
    ):
        build("llama", WIDE_KEYS, wide)


@pytest.mark.parametrize("fill", [0.0, -1.0, math.inf, math.nan])
def test_bad_rope_factors(build: Build, fill: float) -> None:
    with pytest.raises(ModelError, match=r"tensor 'rope_freqs\.weight': .*finite"):
        build("llama", {}, {"rope_freqs.weight": ((16,), F32)}, fill)


def test_expected_tensors() -> None:
    names = expected_tensors(LLAMA)
    assert names == {name: shape for name, (shape, _) in tensors().items()} | {OPTIONAL_TENSORS[0]: (16,)}
    qwen3 = but(LLAMA, arch="qwen3", qk_norm=True, tied=False)
    shapes = {name: shape for name, (shape, _) in tensors("qwen3").items()}
    assert expected_tensors(qwen3) == shapes | {"output.weight": (N_VOCAB, D_MODEL)}


def test_flipped_bytes_never_raise_anything_else(build: Build, tmp_path: Path) -> None:
    build()
    path, rng = tmp_path / "tiny.gguf", random.Random(21)
    raw, header = path.read_bytes(), min(info.offset for info in GGUFFile(path).tensors.values())
    refused = 0
    with path.open("r+b") as handle:
        for _ in range(1000):
            at = rng.randrange(header)
            handle.seek(at)
            handle.write(bytes([rng.randrange(256)]))
            handle.flush()
            try:
                with GGUFFile(path) as file:
                    Config.from_gguf(file)
            except ModelError:
                refused += 1
            handle.seek(at)
            handle.write(raw[at : at + 1])
    assert 500 < refused < 1000

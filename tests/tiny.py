"""Tiny random models as GGUF files, laid out as llama.cpp's converter lays them out.

The sizes are awkward on purpose: d_model and d_ff are multiples of 32 (a quantisation block) and not of 64,
the vocabulary is prime, heads times head_dim is not d_model, two query heads share a KV head, and
llama's head_dim of 40 is not a multiple of 16. Every weight is an integer times 2**-22 from a frozen integer
generator, so that every machine and NumPy version makes the same bytes; with 21 random bits a product does
not fit in a float, so that a sum taken in the wrong order shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quant_shape_to_byte_shape, quantize
from tokenizers.pre_tokenizers import ByteLevel

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Llama 3's long-context scaling, with a context short enough for head_dim 40 to meet all three of its cases.
ROPE_SCALING = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Shape:
    """A model's sizes, and the seed of its weights."""

    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 40
    d_model: int = 96
    d_ff: int = 160
    n_vocab: int = 269
    tied: bool = True  # the output matrix is the embedding
    rope_base: float = 10000.0
    rope_freqs: bool = False  # with the tensor of frequency divisors that Llama 3 has
    eps: float = 1e-5
    n_ctx: int = 128
    seed: int = 0


SHAPES = {"llama": Shape(), "qwen3": Shape(head_dim=32, rope_base=1e6, eps=1e-6)}

# For types whose blocks are 256 values: every matrix has rows of that length.
WIDE = {"d_model": 256, "d_ff": 256, "n_heads": 4, "head_dim": 64}
# Types that gguf does not quantise to (or not by +, -, * and / alone) get random blocks: where in a block the
# scale and the scale of minimums lie, the largest code times sub-scale, the middle code (minimums make it 0).
RANDOM_BLOCKS: dict[str, tuple[int, int | None, float, float]] = {
    "Q2_K": (80, 82, 3 * 15, 1.5),
    "Q3_K": (108, None, 4 * 32, 0),
    "Q4_K": (0, 2, 15 * 63, 7.5),
    "Q5_K": (0, 2, 31 * 63, 15.5),
    "Q6_K": (208, None, 32 * 128, 0),
    "IQ4_NL": (0, None, 127, 0),
    "IQ4_XS": (0, None, 127 * 32, 0),
    "MXFP4": (0, None, 0, 0),  # the scale is one byte, a power of two
}

# The models whose logits golden/hf/<name>.npz holds: architecture, changes to its shape.
HF_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_untied": ("llama", {"tied": False}),
    "llama_rope_freqs": ("llama", {"rope_freqs": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_untied": ("qwen3", {"tied": False}),
}


def tiny_weights(arch: str = "qwen3", **shape: Any) -> dict[str, np.ndarray]:
    """The f32 weights of a tiny model by GGUF tensor name; `shape` overrides fields of SHAPES[arch].

    Matrices are (outputs, inputs), uniform in [-1/4, 1/4]; norms are in [3/4, 5/4]. As in any llama GGUF, the
    rows of llama's attn_q and attn_k are ordered for rope on adjacent pairs; qwen3's for rope on halves.
    """
    s = replace(SHAPES[arch], **shape)
    random = np.random.RandomState(s.seed)

    def matrix(*size: int) -> np.ndarray:
        codes = random.randint(-(2**20), 2**20 + 1, size, dtype=np.int32)
        return np.ldexp(codes.astype(np.float32), -22)

    def norm(size: int) -> np.ndarray:
        weights: np.ndarray = matrix(size) + np.float32(1)  # exact: at most 23 bits
        return weights

    w = {"token_embd": matrix(s.n_vocab, s.d_model)}
    if s.rope_freqs:
        w["rope_freqs"] = _rope_freqs(s)
    for l in range(s.n_layers):
        w[f"blk.{l}.attn_norm"] = norm(s.d_model)
        w[f"blk.{l}.attn_q"] = matrix(s.n_heads * s.head_dim, s.d_model)
        w[f"blk.{l}.attn_k"] = matrix(s.n_kv_heads * s.head_dim, s.d_model)
        w[f"blk.{l}.attn_v"] = matrix(s.n_kv_heads * s.head_dim, s.d_model)
        if arch == "qwen3":
            w[f"blk.{l}.attn_q_norm"] = norm(s.head_dim)
            w[f"blk.{l}.attn_k_norm"] = norm(s.head_dim)
        w[f"blk.{l}.attn_output"] = matrix(s.d_model, s.n_heads * s.head_dim)
        w[f"blk.{l}.ffn_norm"] = norm(s.d_model)
        w[f"blk.{l}.ffn_gate"] = matrix(s.d_ff, s.d_model)
        w[f"blk.{l}.ffn_up"] = matrix(s.d_ff, s.d_model)
        w[f"blk.{l}.ffn_down"] = matrix(s.d_model, s.d_ff)
    w["output_norm"] = norm(s.d_model)
    if not s.tied:
        w["output"] = matrix(s.n_vocab, s.d_model)
    return {f"{name}.weight": value for name, value in w.items()}


def _rope_freqs(s: Shape) -> np.ndarray:
    """Divisors of the rope frequencies, (head_dim / 2,): 1 for short waves, `factor` for long, or between."""
    factor, low, high, context = ROPE_SCALING.values()
    divisors = []
    for i in range(s.head_dim // 2):
        waves = context / (2 * math.pi * s.rope_base ** (2 * i / s.head_dim))  # in the original context
        blend = min(max((waves - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return np.array(divisors, np.float32)


def random_matrix(type: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes (rows, bytes of a row) of blocks of a type in RANDOM_BLOCKS; weights in [-1/2, 1/2]."""
    d_at, min_at, peak, middle = RANDOM_BLOCKS[type]
    kind, random = GGMLQuantizationType[type], np.random.RandomState(seed)
    raw = random.randint(0, 256, quant_shape_to_byte_shape(shape, kind), dtype=np.uint8)
    blocks = raw.reshape(shape[0], -1, GGML_QUANT_SIZES[kind][1])
    if type == "MXFP4":
        blocks[..., d_at] = random.randint(120, 124, blocks.shape[:2])  # 12 * 2^-5 at most
        return raw
    d = np.ldexp(random.randint(512, 1024, (*blocks.shape[:2], 1)), -11) / peak
    blocks[..., d_at : d_at + 2] = d.astype("<f2").view(np.uint8)
    if min_at is not None:
        blocks[..., min_at : min_at + 2] = (d * middle).astype("<f2").view(np.uint8)
    return raw


def write_tiny(
    path: str | Path,
    arch: str = "qwen3",
    *,
    type: str = "F32",
    types: Mapping[str, str] | None = None,
    tokenizer: bool = True,
    **shape: Any,
) -> Path:
    """Write the model of tiny_weights(arch, **shape) to `path` and return it.

    Matrices are stored as the GGMLQuantizationType named `type`, or as `types` says by the last part of their
    names ("attn_v"), vectors as F32. In types of RANDOM_BLOCKS the weights are others than tiny_weights.
    Raises ValueError if n_vocab is too small for the tokenizer or rows are not whole blocks of a type in
    RANDOM_BLOCKS, gguf's QuantError if not those of another, and KeyError for an unknown type.
    """
    s = replace(SHAPES[arch], **shape)
    writer = GGUFWriter(path, arch)
    kinds = ("ALL_F32",) if type == "F32" else (f"MOSTLY_{type}", f"MOSTLY_{type}_M", f"MOSTLY_{type}_MOE")
    kind = next(kind for kind in kinds if kind in LlamaFileType.__members__)
    add_header(writer, arch, s, f"tiny {arch}", kind)
    if tokenizer:
        add_tokenizer(writer, "qwen2" if arch == "qwen3" else "smollm", s.n_vocab)
    for i, (name, value) in enumerate(tiny_weights(arch, **shape).items()):
        stem = name.removesuffix(".weight").split(".")[-1]
        ggml_type = GGMLQuantizationType[(types or {}).get(stem, type) if value.ndim > 1 else "F32"]
        if ggml_type.name in RANDOM_BLOCKS:
            data = random_matrix(ggml_type.name, value.shape, 1000 * s.seed + i)
        else:
            data = quantize(value, ggml_type)
        writer.add_tensor(name, data, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def add_header(writer: GGUFWriter, arch: str, s: Shape, name: str, file_type: str) -> None:
    """The keys of a model but for its tokenizer's; file_type: a name of gguf's LlamaFileType."""
    writer.add_name(name)
    writer.add_block_count(s.n_layers)
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.d_model)
    writer.add_feed_forward_length(s.d_ff)
    writer.add_head_count(s.n_heads)
    writer.add_head_count_kv(s.n_kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_rope_freq_base(s.rope_base)
    writer.add_rope_dimension_count(s.head_dim)
    writer.add_vocab_size(s.n_vocab)
    writer.add_file_type(LlamaFileType[file_type])
    writer.add_quantization_version(2)


def add_tokenizer(writer: GGUFWriter, pre: str, n_vocab: int, merges: Sequence[str] = MERGES) -> None:
    """A byte-level BPE: the 256 bytes in GPT-2's order, the merges, the specials, then unused tokens."""
    tokens = sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    kinds = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(SPECIALS)
    tokens += SPECIALS
    if n_vocab < len(tokens):
        raise ValueError(f"n_vocab {n_vocab}: the tokenizer has {len(tokens)} tokens; pass tokenizer=False")
    kinds += [TokenType.UNUSED] * (n_vocab - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), n_vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

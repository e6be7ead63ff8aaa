"""A model's hyperparameters, read from a GGUF file and held against every tensor in it.

`Config.from_gguf` is the gate: a file that passes has all the tensors its architecture needs, with the shapes
and types that the engine computes with, and asks for nothing that the engine does not do. A tensor or key
that would change the numbers and is not understood is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from gguf import GGMLQuantizationType

from ..errors import InputError, ModelError
from ..gguf_file import GGUFFile, Strings, TensorInfo

ROPE_STYLES = {"llama": "norm", "qwen3": "neox"}  # the architectures: which pairs of dimensions rope rotates
SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0"),
        *("IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K"),
    )
)
OPTIONAL_TENSORS = ("rope_freqs.weight",)
RECONVERT = "get another conversion of the model"

# Bounds far above any model: they turn a damaged value into a message and keep products of two small.
MAX_LAYERS = 1000
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 256
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31

# Keys (after "{arch}.") that change the numbers, with the value that asks for nothing.
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "attention.sliding_window": 0,
    "attention.temperature_scale": 0,
    "attn_logit_softcapping": 0,
    "embedding_scale": 1,
    "expert_count": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "rope.scaling.attn_factor": 1,
    "use_parallel_residual": False,
}


@dataclass(frozen=True, slots=True)
class Config:
    """The hyperparameters of a decoder: counts, widths in elements, and how rope rotates.

    `rope_scale` divides positions (1.0: none); `rope_style` is "norm" (dimensions 2i and 2i + 1 form a pair)
    or "neox" (i and i + rope_dim / 2); `tied` says that the output matrix is the token embedding; `qk_norm`
    that the heads of Q and K are normalised before rope.
    """

    arch: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    rope_base: float
    rope_dim: int  # rotated dimensions of each head
    rope_scale: float
    rope_style: str
    tied: bool
    qk_norm: bool

    def check_ctx(self, ctx: int) -> None:
        """Raises InputError for a context of more tokens than the model was trained for."""
        if ctx > self.n_ctx_train:
            raise InputError(f"ctx={ctx}: the model was trained for {self.n_ctx_train} tokens at most")

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Config:
        """Reads and checks `file`. Raises ModelError naming the key or tensor at fault and what to do."""
        keys = _Keys(file)
        arch = keys.text("general.architecture")
        if arch not in ROPE_STYLES:
            supported = ", ".join(ROPE_STYLES)
            keys.fail("general.architecture", f"{arch!r:.60} is unsupported; supported are {supported}")
        if keys.count("split.count", 1 << 16, default=1, least=0) > 1:
            keys.fail("split.count", "this is one of several files; merge them with llama-gguf-split")
        for name, neutral in _NEUTRAL.items():
            if np.any(keys.values.get(f"{arch}.{name}", neutral) != neutral):
                keys.fail(f"{arch}.{name}", "needs an operation that pyinfer does not do; get another model")

        n_layers = keys.count(f"{arch}.block_count", MAX_LAYERS)
        d_model = keys.count(f"{arch}.embedding_length", MAX_WIDTH)
        d_ff = keys.count(f"{arch}.feed_forward_length", MAX_WIDTH, layers=n_layers)
        n_heads = keys.count(f"{arch}.attention.head_count", MAX_HEADS, layers=n_layers)
        kv_key = f"{arch}.attention.head_count_kv"
        n_kv_heads = keys.count(kv_key, MAX_HEADS, default=n_heads, layers=n_layers)
        if n_heads % n_kv_heads:
            keys.fail(kv_key, f"{n_kv_heads} does not divide the {n_heads} heads; {RECONVERT}")
        head_dim = _head_dim(keys, arch, d_model, n_heads)
        rope_dim = keys.count(f"{arch}.rope.dimension_count", head_dim, default=head_dim)
        if rope_dim % 2:
            keys.fail(f"{arch}.rope.dimension_count", f"{rope_dim} is odd, and rope needs pairs; {RECONVERT}")

        tokens = keys.tokens()
        n_vocab = keys.count(f"{arch}.vocab_size", MAX_VOCAB, default=len(tokens) or None)
        if tokens and len(tokens) != n_vocab:
            keys.fail("tokenizer.ggml.tokens", f"has {len(tokens)} tokens, not {n_vocab}; {RECONVERT}")
        for key in keys.values:
            if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
                keys.count(key, n_vocab - 1, least=0)

        config = cls(
            arch=arch,
            n_layers=n_layers,
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            d_ff=d_ff,
            n_vocab=n_vocab,
            n_ctx_train=keys.count(f"{arch}.context_length", MAX_CONTEXT),
            rms_eps=keys.number(f"{arch}.attention.layer_norm_rms_epsilon", above=0, most=1),
            rope_base=keys.number(f"{arch}.rope.freq_base", above=1, most=1e15, default=10000.0),
            rope_dim=rope_dim,
            rope_scale=_rope_scale(keys, arch),
            rope_style=ROPE_STYLES[arch],
            tied="output.weight" not in file.tensors,
            qk_norm=arch == "qwen3",
        )
        _check_tensors(file, config)
        return config


def expected_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Name to shape (rows, columns) of every tensor the engine reads; OPTIONAL_TENSORS may be missing."""
    c = config
    model: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.n_vocab, c.d_model),
        "output_norm.weight": (c.d_model,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (c.d_model,),
        "attn_q.weight": (c.n_heads * c.head_dim, c.d_model),
        "attn_k.weight": (c.n_kv_heads * c.head_dim, c.d_model),
        "attn_v.weight": (c.n_kv_heads * c.head_dim, c.d_model),
        "attn_output.weight": (c.d_model, c.n_heads * c.head_dim),
        "ffn_norm.weight": (c.d_model,),
        "ffn_gate.weight": (c.d_ff, c.d_model),
        "ffn_up.weight": (c.d_ff, c.d_model),
        "ffn_down.weight": (c.d_model, c.d_ff),
    }
    if not c.tied:
        model["output.weight"] = (c.n_vocab, c.d_model)
    if c.arch == "llama":
        model["rope_freqs.weight"] = (c.rope_dim // 2,)
    if c.qk_norm:
        layer |= {"attn_q_norm.weight": (c.head_dim,), "attn_k_norm.weight": (c.head_dim,)}
    return model | {f"blk.{l}.{name}": shape for l in range(c.n_layers) for name, shape in layer.items()}


class _Keys:
    """Typed look-ups in a file's metadata; each failure is a ModelError that names the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.values = file.metadata

    def fail(self, key: str, why: str) -> NoReturn:
        raise ModelError(f"{self.path}: key {key!r:.120}: {why}")

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            self.fail(key, f"is missing; {RECONVERT}")
        return value

    def text(self, key: str) -> str:
        value = self.get(key, None)
        if not isinstance(value, str):
            self.fail(key, f"{value!r:.60} is not a string; {RECONVERT}")
        return value

    def tokens(self) -> Sequence[str]:
        value = self.values.get("tokenizer.ggml.tokens", [])
        if not isinstance(value, (list, Strings)):
            self.fail("tokenizer.ggml.tokens", f"is not an array of strings; {RECONVERT}")
        return value

    def count(
        self, key: str, most: int, *, default: int | None = None, least: int = 1, layers: int = 0
    ) -> int:
        """An integer from `least` to `most`. With `layers`, an array of that many equal ones will do too."""
        value = self.get(key, default)
        if layers and isinstance(value, np.ndarray):
            if len(value) != layers or np.any(value != value[0]):
                self.fail(key, f"{value.tolist()!r:.60} differs between layers, which is unsupported")
            value = value[0].item()
        if type(value) is not int:  # bool is an int to isinstance
            self.fail(key, f"{value!r:.60} is not an integer; {RECONVERT}")
        if not least <= value <= most:
            self.fail(key, f"{value} is not between {least} and {most}; {RECONVERT}")
        return value

    def number(self, key: str, *, above: float, most: float, default: float | None = None) -> float:
        """A number in (above, most]."""
        value = self.get(key, default)
        if type(value) not in (int, float):
            self.fail(key, f"{value!r:.60} is not a number; {RECONVERT}")
        if not above < value <= most:  # NaN fails too
            self.fail(key, f"{value} is not above {above} and at most {most}; {RECONVERT}")
        return float(value)


def _head_dim(keys: _Keys, arch: str, d_model: int, n_heads: int) -> int:
    key, value = f"{arch}.attention.key_length", f"{arch}.attention.value_length"
    default = None if d_model % n_heads else d_model // n_heads
    if default is None and not (key in keys.values and value in keys.values):
        heads = f"{arch}.attention.head_count"
        keys.fail(heads, f"{n_heads} does not divide the embedding length {d_model}; {RECONVERT}")
    head_dim = keys.count(key, MAX_HEAD_DIM, default=default)
    if keys.count(value, MAX_HEAD_DIM, default=default) != head_dim:
        keys.fail(value, f"differs from the key length, {head_dim}, which is unsupported")
    if head_dim % 2:
        keys.fail(key, f"heads of {head_dim} dimensions are unsupported: rope needs an even number")
    return head_dim


def _rope_scale(keys: _Keys, arch: str) -> float:
    """What positions are divided by. Without a type, linear: a file that gives only a factor means it."""
    rope = f"{arch}.rope"
    kind, factor, legacy = f"{rope}.scaling.type", f"{rope}.scaling.factor", f"{rope}.scale_linear"
    if kind in keys.values and keys.text(kind) not in ("none", "linear"):
        keys.fail(kind, f"{keys.text(kind)!r:.60} is unsupported; supported are none, linear")
    if keys.values.get(kind) == "none":
        return 1.0
    return keys.number(factor if factor in keys.values else legacy, above=0, most=1e6, default=1.0)


def _check_tensors(file: GGUFFile, config: Config) -> None:
    def fail(name: str, why: str) -> NoReturn:
        raise ModelError(f"{file.path}: tensor {name!r:.120}: {why}")

    expected = expected_tensors(config)
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is not None and info.shape != shape:
            fail(name, f"has shape {info.shape}, but the file's keys make it {shape}; {RECONVERT}")
        if info is not None and info.type not in _types(info):
            supported = ", ".join(kind.name for kind in _types(info))
            fail(name, f"type {info.type.name} is unsupported; get a quantization with {supported} here")
        if info is None and name not in OPTIONAL_TENSORS:
            fail(name, f"is missing, and {config.arch} models have it; {RECONVERT}")
    for name in file.tensors:
        if name not in expected:
            fail(name, f"needs an operation that pyinfer does not do for {config.arch}; get another model")
    if "rope_freqs.weight" in file.tensors:
        factors = file.data("rope_freqs.weight").view("<f4")
        if not all(0 < factor < math.inf for factor in factors):
            fail("rope_freqs.weight", "its factors are not all finite and above 0; download the file again")


def _types(info: TensorInfo) -> tuple[GGMLQuantizationType, ...]:
    """Vectors (norm weights, rope factors) are F32; matrices any supported type."""
    return SUPPORTED_TYPES if len(info.shape) == 2 else SUPPORTED_TYPES[:1]

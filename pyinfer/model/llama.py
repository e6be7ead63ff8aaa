"""Llama 2 and 3, SmolLM2 and their kin: RMSNorm, rope on adjacent pairs, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backend.base import Backend, Tensor, Weight
from ..cache import Cache, extended
from .config import Config
from .rope import RopeTables


class Llama:
    """Weights of a GGUF file under their GGUF names, and the forward pass over them."""

    def __init__(
        self, config: Config, ops: Backend, tensors: Mapping[str, Tensor | Weight], rope: RopeTables
    ) -> None:
        c = self.config = config
        self.ops, self.rope, w = ops, rope, tensors
        self.embed = w["token_embd.weight"]
        self.norm = w["output_norm.weight"]
        self.head = w["token_embd.weight" if c.tied else "output.weight"]
        self.scale = c.head_dim**-0.5
        self.layers = [
            (
                w[f"blk.{i}.attn_norm.weight"],
                [w[f"blk.{i}.attn_{x}.weight"] for x in "qkv"],
                w[f"blk.{i}.attn_output.weight"],
                w[f"blk.{i}.ffn_norm.weight"],
                [w[f"blk.{i}.ffn_{x}.weight"] for x in ("gate", "up")],
                w[f"blk.{i}.ffn_down.weight"],
            )
            for i in range(c.n_layers)
        ]

    def forward(self, tokens: Sequence[int], cache: Cache, *, last_only: bool = True) -> Tensor:
        """Logits (1, n_vocab) of the last token, or (len(tokens), n_vocab) of all; extends the cache,
        unless it is read-only.
        """
        ops, c, start = self.ops, self.config, cache.length
        cos, sin = self.rope.upto(start + len(tokens))
        x = ops.gather_rows(self.embed, tokens)  # (tokens, d_model)
        for i, (attn_norm, qkv, attn_output, ffn_norm, gate_up, ffn_down) in enumerate(self.layers):
            h = ops.rms_norm(x, attn_norm, c.rms_eps)
            q, k, v = ops.matmul_many(h, qkv)  # (tokens, heads * head_dim), k and v n_kv_heads * head_dim
            q = ops.apply_rope(q, cos, sin, start, c.head_dim, neox=False)
            k = ops.apply_rope(k, cos, sin, start, c.head_dim, neox=False)
            attention = ops.fused_attention(q, extended(cache, i, k, v), c.n_heads, self.scale)
            x = ops.matmul_add(attention, attn_output, x)

            h = ops.rms_norm(x, ffn_norm, c.rms_eps)
            gate, up = ops.matmul_many(h, gate_up)  # (tokens, d_ff)
            x = ops.matmul_add(ops.swiglu(gate, up), ffn_down, x)
        if last_only and len(tokens) > 1:
            x = ops.copy_rows_2d(x, len(tokens) - 1, 1)
        return ops.matmul(ops.rms_norm(x, self.norm, c.rms_eps), self.head)

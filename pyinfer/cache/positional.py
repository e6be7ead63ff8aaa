"""The default cache: memory for `capacity` tokens set aside at once, K in tiles of 16 tokens, written in
place.
"""

from __future__ import annotations

import math

from ..backend.base import Backend
from ..backend.kv import TILE, KVBufferView, block_shapes
from ..model.config import Config
from .base import InPlaceCache, check_dtype

BLOCK = 256  # tokens


def block_of(tokens: int) -> int:
    """Tokens to a block of a cache that has room for so many."""
    return min(BLOCK, -(-tokens // TILE) * TILE)


class PositionalCache(InPlaceCache):
    """Claims memory as tokens come: untouched pages cost nothing."""

    kind = "positional"

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str, *, pad: int = 0) -> None:
        check_dtype(dtype, config)
        super().__init__(ops, config, capacity, dtype)
        heads, dim, block = config.n_kv_heads, config.head_dim, block_of(pad + capacity)
        blocks, shapes = range(-(-(pad + capacity) // block)), block_shapes(dtype, heads, dim, block)
        # The whole of a block side by side: a short sequence touches few pages, and large ones.
        memory = ops.zeros((len(blocks), config.n_layers, 2, math.prod(shapes[0])), dtype)

        def view(layer: int) -> KVBufferView:
            k, v = ([ops.part(memory, (b, layer, i), shapes[i]) for b in blocks] for i in (0, 1))
            return KVBufferView(
                *(k, v, "tiles", dtype, heads, dim, pad, len(blocks) * block, block),
                first=pad,
                layer=layer,
                origin=pad,
            )

        self.views = [view(layer) for layer in range(config.n_layers)]

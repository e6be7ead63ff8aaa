"""The default cache: memory for `capacity` tokens set aside at once, K in tiles of 16 tokens, written in
place.
"""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.kv import TILE, KVBufferView, block_shapes
from ..model.config import Config
from .base import InPlaceCache, check_dtype


class PositionalCache(InPlaceCache):
    """Claims memory as tokens come: untouched pages cost nothing."""

    kind = "positional"

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str, *, pad: int = 0) -> None:
        check_dtype(dtype, config)
        super().__init__(ops, config, capacity, dtype)
        heads, dim, room = config.n_kv_heads, config.head_dim, -(-(pad + capacity) // TILE) * TILE

        def view(layer: int) -> KVBufferView:
            k, v = (ops.zeros(shape, dtype) for shape in block_shapes(dtype, heads, dim, room))
            return KVBufferView(
                *([k], [v], "tiles", dtype, heads, dim, pad, room, room), first=pad, layer=layer, origin=pad
            )

        self.views = [view(layer) for layer in range(config.n_layers)]

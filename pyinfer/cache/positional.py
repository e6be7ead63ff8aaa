"""The default cache: memory for `capacity` tokens set aside at once, K in tiles of 16 tokens, written in
place.
"""

from __future__ import annotations

import math

from ..backend.base import Backend, Tensor
from ..backend.kv import KVBufferView, block_shapes
from ..model.config import Config

BLOCK = 256  # tokens


class PositionalCache:
    """Claims memory as tokens come: untouched pages cost nothing."""

    kind = "positional"

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str) -> None:
        self.ops, self.capacity = ops, capacity
        heads, dim = config.n_kv_heads, config.head_dim
        shapes = block_shapes(dtype, heads, dim, BLOCK)
        blocks = range(-(-capacity // BLOCK))
        # The whole of a block side by side: a short sequence touches few pages, and large ones.
        memory = ops.zeros((len(blocks), config.n_layers, 2, math.prod(shapes[0])), dtype)

        def view(layer: int) -> KVBufferView:
            k, v = ([ops.part(memory, (b, layer, i), shapes[i]) for b in blocks] for i in (0, 1))
            room = len(blocks) * BLOCK
            return KVBufferView(k, v, "tiles", dtype, heads, dim, 0, room, BLOCK, layer=layer)

        self.views = [view(layer) for layer in range(config.n_layers)]

    @property
    def length(self) -> int:
        return self.views[-1].length

    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> KVBufferView:
        view = self.views[layer]
        self.ops.kv_write(view, k, v)
        return view

    def truncate(self, length: int) -> None:
        for view in self.views:
            view.length = min(view.length, length)

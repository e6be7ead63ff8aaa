"""The default cache: memory for `capacity` tokens set aside at once, K in tiles of 16 tokens, written in
place.
"""

from __future__ import annotations

from ..backend.base import Backend, Tensor
from ..backend.kv import TILE, KVBufferView, block_shapes
from ..model.config import Config


class PositionalCache:
    """Claims memory as tokens come: untouched pages cost nothing."""

    kind = "positional"

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str) -> None:
        self.ops, self.capacity = ops, capacity
        heads, dim, room = config.n_kv_heads, config.head_dim, -(-capacity // TILE) * TILE

        def view(layer: int) -> KVBufferView:
            k, v = (ops.zeros(shape, dtype) for shape in block_shapes(dtype, heads, dim, room))
            return KVBufferView([k], [v], "tiles", dtype, heads, dim, 0, room, room, layer=layer)

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

"""The default cache: memory for `capacity` tokens set aside at once, K in tiles of 16 tokens, written in
place.
"""

from __future__ import annotations

from ..backend.base import TILE, Backend, KVBufferView, Tensor
from ..model.config import Config


class PositionalCache:
    """Claims memory as tokens come: untouched pages cost nothing."""

    kind = "positional"

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str) -> None:
        self.ops, self.capacity = ops, capacity
        heads, dim, tiles = config.n_kv_heads, config.head_dim, -(-capacity // TILE)

        def layer() -> KVBufferView:
            k = ops.zeros((heads, tiles, dim, TILE), dtype)
            v = ops.zeros((heads, tiles * TILE, dim), dtype)
            return KVBufferView(k, v, "tiles", dtype, heads, dim, 0, tiles * TILE)

        self.views = [layer() for _ in range(config.n_layers)]

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

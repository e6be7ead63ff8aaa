"""The basic cache: K and V are row-major tensors, made anew at each step by concatenation."""

from __future__ import annotations

from ..backend.base import Backend, Tensor
from ..backend.kv import KVBufferView, check_rows
from ..model.config import Config
from .base import Cache, check_count, check_dtype


class AppendCache(Cache):
    """Claims only what it holds, and copies all of it for each new token. Stores f32 or f16."""

    kind = "append"

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str) -> None:
        check_dtype(dtype, config, rows=True)
        super().__init__(ops, config, capacity, dtype)
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * config.n_layers

    @property
    def length(self) -> int:
        last = self.layers[-1]
        return 0 if last is None else int(last[0].shape[0])

    def view(self, layer: int) -> KVBufferView:
        c, held = self.config, self.layers[layer]
        k, v = held or [self.ops.zeros((0, c.n_kv_heads * c.head_dim), self.dtype) for _ in range(2)]
        n = int(k.shape[0])
        return KVBufferView([k], [v], "rows", self.dtype, c.n_kv_heads, c.head_dim, n, n, n, layer=layer)

    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> KVBufferView:
        check_rows(self.config.n_kv_heads, self.config.head_dim, k, v)
        ops, held = self.ops, self.layers[layer]
        if self.dtype == "f16":
            k, v = ops.narrow_f16(k), ops.narrow_f16(v)
        if held is not None:
            k, v = ops.concat_dim0(held[0], k), ops.concat_dim0(held[1], v)
        self.layers[layer] = k, v
        return self.view(layer)

    def truncate(self, length: int) -> None:
        check_count("length", length, 0)
        for i, held in enumerate(self.layers):
            if held is not None and held[0].shape[0] > length:
                kept = [self.ops.tensor(self.ops.numpy(x)[:length]) for x in held]
                self.layers[i] = (kept[0], kept[1]) if length else None

"""The basic cache: K and V are row-major tensors, made anew at each step by concatenation."""

from __future__ import annotations

from ..backend.base import Backend, Tensor
from ..backend.kv import KVBufferView
from ..model.config import Config


class AppendCache:
    """Claims only what it holds, and copies all of it for each new token."""

    kind = "append"
    views = None

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str) -> None:
        self.ops, self.config, self.capacity, self.dtype = ops, config, capacity, dtype
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * config.n_layers

    @property
    def length(self) -> int:
        last = self.layers[-1]
        return 0 if last is None else int(last[0].shape[0])

    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> KVBufferView:
        ops, held = self.ops, self.layers[layer]
        if self.dtype == "f16":
            k, v = ops.narrow_f16(k), ops.narrow_f16(v)
        if held is not None:
            k, v = ops.concat_dim0(held[0], k), ops.concat_dim0(held[1], v)
        self.layers[layer] = k, v
        n = k.shape[0]
        c = self.config
        return KVBufferView([k], [v], "rows", self.dtype, c.n_kv_heads, c.head_dim, n, n, n, layer=layer)

    def truncate(self, length: int) -> None:
        for i, held in enumerate(self.layers):
            if held is not None and held[0].shape[0] > length:
                kept = [self.ops.tensor(self.ops.numpy(x)[:length]) for x in held]
                self.layers[i] = (kept[0], kept[1]) if length else None

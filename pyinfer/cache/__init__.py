"""KV caches: what was computed for earlier tokens, per layer.

A cache has `length` and `capacity` in tokens, and one verb: `update_in_place(layer, k, v)` appends rows
(tokens, n_kv_heads * head_dim) to a layer and returns a view of all its rows. Kinds that store the same dtype
give the same bytes.
"""

from __future__ import annotations

from typing import Protocol

from ..backend.base import Backend, Tensor
from ..backend.kv import KVBufferView
from ..errors import InputError
from ..model.config import Config
from .append import AppendCache
from .positional import PositionalCache


class Cache(Protocol):
    kind: str
    capacity: int

    @property
    def length(self) -> int: ...

    @property
    def views(self) -> list[KVBufferView] | None:
        """Of the layers, if they keep their memory from token to token."""

    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> KVBufferView: ...

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""


KINDS: dict[str, type[AppendCache] | type[PositionalCache]] = {
    "append": AppendCache,
    "positional": PositionalCache,
}
DTYPES = {"f16": 2, "f32": 4}  # bytes of a value


def create(kind: str, ops: Backend, config: Config, capacity: int, dtype: str) -> Cache:
    """Raises InputError for an unknown kind or dtype."""
    if kind not in KINDS:
        raise InputError(f"there is no KV cache {kind!r}; there are {', '.join(KINDS)}")
    if dtype not in DTYPES:
        raise InputError(f"a KV cache does not store {dtype!r}; it stores {', '.join(DTYPES)}")
    return KINDS[kind](ops, config, capacity, dtype)


def n_bytes(config: Config, tokens: int, dtype: str) -> int:
    """Bytes of K and V of all layers for so many tokens."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * tokens * DTYPES[dtype]

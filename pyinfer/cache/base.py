"""What every kind of KV cache has in common, and what a model does with one that takes nothing in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from ..backend.base import Backend, Tensor
from ..backend.kv import GROUP, TILE, KVBufferView, block_shapes
from ..errors import ContextOverflowError, InputError
from ..model.config import Config

DTYPES = ("f16", "f32", "q8_0")


class Cache(ABC):
    """The keys and values of one sequence, by layer.

    `length` and `capacity` count the model's tokens, whatever slots of memory they lie in: `length` is the
    position of the next one. One thread at a time uses a cache.
    """

    kind: str
    frozen = False  # whether it takes no tokens in
    views: list[KVBufferView] | None = None  # of the layers, if each keeps its view from token to token

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str) -> None:
        check_count("capacity", capacity, 1)
        self.ops, self.config, self.capacity, self.dtype = ops, config, capacity, dtype

    @property
    @abstractmethod
    def length(self) -> int: ...

    @abstractmethod
    def view(self, layer: int) -> KVBufferView:
        """What the layer holds now."""

    @abstractmethod
    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> KVBufferView | None:
        """Puts rows k and v (tokens, n_kv_heads * head_dim) behind what the layer holds. None: nothing was
        written.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on, if there are any. Raises InputError for a length that the
        cache cannot go back to.
        """

    def reserve(self, n: int, at_once: int | None = None) -> None:
        """Makes room for n more tokens, which come `at_once` at a time (None: all of them).

        Raises ContextOverflowError, or CacheFullError where sequences share memory; then nothing has changed.
        """
        if self.length + n > self.capacity:
            raise ContextOverflowError(
                f"{self.length} tokens in the context and {n} more do not fit into {self.capacity}; "
                "give fewer, or a larger ctx"
            )

    def close(self) -> None:
        """Forgets all tokens; what memory is shared with others goes back to them."""
        self.truncate(0)


class InPlaceCache(Cache):
    """A cache that writes into memory of its own, one view to a layer."""

    views: list[KVBufferView]

    @property
    def length(self) -> int:
        last = self.views[-1]
        return last.length - last.origin

    def view(self, layer: int) -> KVBufferView:
        return self.views[layer]

    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> KVBufferView:
        view = self.views[layer]
        self.ops.kv_write(view, k, v)
        return view

    def truncate(self, length: int) -> None:
        check_count("length", length, 0)
        for view in self.views:
            view.length = min(view.length, length + view.origin)


def extended(cache: Cache, layer: int, k: Tensor, v: Tensor) -> KVBufferView:
    """The layer's keys and values with rows k and v behind them: in the cache or, if it takes nothing in, in
    a copy. Either gives the same bytes.
    """
    view = cache.update_in_place(layer, k, v)
    if view is None:
        view = _copy(cache.ops, cache.view(layer), int(k.shape[0]))
        cache.ops.kv_write(view, k, v)
    return view


def _copy(ops: Backend, view: KVBufferView, more: int) -> KVBufferView:
    """A view of memory of its own, with what `view` holds, as it is stored, and room for `more` tokens."""
    heads, dim, room = view.n_kv_heads, view.head_dim, -(-(view.length + more) // TILE) * TILE
    rows = view.layout == "rows"
    shapes = ((room, heads * dim),) * 2 if rows else block_shapes(view.dtype, heads, dim, room)
    to = [ops.zeros(shape, view.dtype) for shape in shapes]
    axis = 0 if rows else 1  # that of tokens; in K's, of tiles
    for whole, blocks, unit in zip(to, (view.k, view.v), (1 if rows else TILE, 1), strict=True):
        out, at, end = np.moveaxis(ops.numpy(whole), axis, 0), 0, -(-view.length // unit)
        for block in blocks:
            part = np.moveaxis(ops.numpy(block), axis, 0)[: end - at]
            out[at : at + len(part)] = part
            at += len(part)
    return replace(view, k=to[:1], v=to[1:], capacity=room, block=room, stamp=0, handle=None)


def check_dtype(dtype: str, config: Config, *, rows: bool = False) -> None:
    """Raises InputError for a dtype that a cache of this model, or one of rows, does not store."""
    if dtype not in DTYPES:
        raise InputError(f"a KV cache does not store {dtype!r}; it stores {', '.join(DTYPES)}")
    if dtype == "q8_0" and rows:
        raise InputError("the KV cache append does not store q8_0; take f16 or f32, or another kind of cache")
    if dtype == "q8_0" and config.head_dim % GROUP:
        raise InputError(
            f"q8_0 stores values by {GROUP}, and this model's heads have {config.head_dim}: take f16 or f32"
        )


def check_count(name: str, value: int, least: int, step: int = 1) -> None:
    """Raises InputError for what is no whole number, is below `least`, or no multiple of `step`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or value % step:
        kind = "a whole number" if step == 1 else f"a multiple of {step}"
        raise InputError(f"{name}={value!r}: give {kind}, at least {least}")

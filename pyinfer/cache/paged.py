"""Blocks of tokens out of one pool, for many sequences: none sets memory aside that another could use, and a
prefix that several have in common is held once.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ..backend.base import Backend, Tensor
from ..backend.kv import TILE, KVBufferView, block_shapes, row_bytes
from ..errors import CacheFullError
from ..model.config import Config
from .base import InPlaceCache, check_count, check_dtype

BLOCK = 64  # tokens

AnyPaged = TypeVar("AnyPaged", bound="PagedCache")


class BlockPool:
    """`capacity` blocks, numbered, each with room for `block` tokens in every layer.

    A block's memory is claimed when it is first used, and kept for whoever takes the block next. `counts`
    says how many sequences hold each. Threads may use one pool at once.
    """

    def __init__(
        self, ops: Backend, config: Config, capacity: int, dtype: str, *, block: int = BLOCK
    ) -> None:
        check_dtype(dtype, config)
        check_count("capacity", capacity, 1)
        check_count("block", block, TILE, TILE)
        self.ops, self.config, self.capacity, self.dtype, self.block = ops, config, capacity, dtype, block
        self.memory: list[list[tuple[Tensor, Tensor]]] = []  # K and V by block and layer
        self.counts: list[int] = []
        self.free: list[int] = []
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        return len(self.counts) - len(self.free)

    @property
    def n_bytes(self) -> int:
        """Claimed so far."""
        c = self.config
        row = row_bytes(self.dtype, c.head_dim)
        return len(self.memory) * 2 * c.n_layers * c.n_kv_heads * self.block * row

    def take(self, n: int, giving: Sequence[int] = ()) -> list[int]:
        """n blocks, in exchange for `giving`. Raises CacheFullError; then nothing has changed."""
        with self._lock:
            left = self.capacity - self.in_use + sum(self.counts[b] == 1 for b in giving)
            if n > left:
                raise CacheFullError(
                    f"{n} more blocks of {self.block} tokens are needed, and {left} of the pool's "
                    f"{self.capacity} are free; close or truncate a sequence, or make a larger pool"
                )
            for _ in range(n - len(self.free) - sum(self.counts[b] == 1 for b in giving)):
                self._claim()
            self._release(giving)
            at = len(self.free) - n
            taken, self.free = self.free[at:], self.free[:at]
            for b in taken:
                self.counts[b] = 1
            return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One sequence more holds these blocks."""
        with self._lock:
            for b in blocks:
                self.counts[b] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence less holds them; those that none holds are free."""
        with self._lock:
            self._release(blocks)

    def copy(self, source: int, to: int) -> None:
        for pair in zip(self.memory[source], self.memory[to], strict=True):
            for old, new in zip(*pair, strict=True):
                np.copyto(self.ops.numpy(new), self.ops.numpy(old))

    def _claim(self) -> None:
        c = self.config
        shapes = block_shapes(self.dtype, c.n_kv_heads, c.head_dim, self.block)
        layers = [[self.ops.zeros(shape, self.dtype) for shape in shapes] for _ in range(c.n_layers)]
        self.free.append(len(self.memory))
        self.memory.append([(k, v) for k, v in layers])
        self.counts.append(0)

    def _release(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            self.counts[b] -= 1
            if not self.counts[b]:
                self.free.append(b)


class PagedCache(InPlaceCache):
    """A sequence of at most `capacity` tokens in blocks of a pool; `table` has their numbers.

    Truncating gives blocks back; `close` gives back all, and whoever shares a pool has to call it.
    """

    kind = "paged"
    window = 0

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        super().__init__(pool.ops, pool.config, capacity, pool.dtype)
        c = pool.config
        self.pool, self.table = pool, list[int]()
        self.views = [
            KVBufferView(
                *([], [], "tiles", pool.dtype, c.n_kv_heads, c.head_dim, 0, 0, pool.block),
                window=self.window,
                layer=layer,
            )
            for layer in range(c.n_layers)
        ]

    def fork(self: AnyPaged) -> AnyPaged:
        """Another sequence with the same tokens. They share the blocks; if the last one is not full, who
        first writes into it copies it.
        """
        twin, held = copy.copy(self), self._blocks_of(self.length)
        twin.table = self.table[:held]
        twin.views = [replace(v, k=v.k[:held], v=v.v[:held], stamp=0, handle=None) for v in self.views]
        twin._changed()
        self.pool.share(twin.table)
        return twin

    def reserve(self, n: int, at_once: int | None = None) -> None:
        super().reserve(n, at_once)
        if n <= 0:
            return
        pool, slots = self.pool, self.views[-1].length
        last, partly = divmod(slots, pool.block)
        shared = partly and pool.counts[self.table[last]] > 1
        more = -(-(slots + n) // pool.block) - len(self.table)
        passed = self._passed()
        if not shared and more <= 0 and not passed:
            return
        taken = pool.take(max(more, 0) + bool(shared), self.table[:passed])
        if shared:
            mine, theirs = taken.pop(), self.table[last]
            pool.copy(theirs, mine)
            self._put(last, mine)
            pool.release([theirs])
        for b in taken:
            self._put(len(self.table), b)
        self._drop(passed)
        self._changed()

    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> KVBufferView:
        self.reserve(int(k.shape[0]))  # has been, but for a forward that no session runs
        return super().update_in_place(layer, k, v)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        held = self._blocks_of(self.length)
        if held < len(self.table):
            self.pool.release(self.table[held:])
            del self.table[held:]
            for view in self.views:
                del view.k[held:], view.v[held:]
            self._changed()

    def _blocks_of(self, length: int) -> int:
        return -(-(length + self.views[-1].origin) // self.pool.block)

    def _passed(self) -> int:
        """Blocks that no token to come attends to."""
        return 0

    def _put(self, i: int, block: int) -> None:
        self.table[i : i + 1] = [block]
        for view, (k, v) in zip(self.views, self.pool.memory[block], strict=True):
            view.k[i : i + 1], view.v[i : i + 1] = [k], [v]

    def _drop(self, n: int) -> None:
        """Lets go of the first n blocks, which are the pool's again: slots are counted from the next."""
        del self.table[:n]
        for view in self.views:
            del view.k[:n], view.v[:n]
            view.length -= n * view.block
            view.origin -= n * view.block

    def _changed(self) -> None:
        for view in self.views:
            view.capacity = len(view.k) * view.block
            view.stamp += 1

"""KV caches: what was computed for earlier tokens, per layer.

A cache has one verb, `update_in_place(layer, k, v)`: it puts rows behind those that a layer holds and gives a
view of all, or None if it takes nothing in. Kinds that store the same dtype give the same bytes.

append        concatenates at every token
positional    memory for the whole context, claimed as tokens come
padded        the same, behind slots that stay unused
paged         blocks out of a pool for many sequences; `fork` shares them
sliding       paged, and holds no more than a window reaches
read-only     any other, which stays as it is
"""

from __future__ import annotations

import re

from ..backend.base import Backend
from ..backend.kv import row_bytes
from ..errors import InputError
from ..model.config import Config
from .append import AppendCache
from .base import DTYPES, Cache, check_dtype, extended
from .padded import PaddedCache
from .paged import BLOCK, BlockPool, PagedCache
from .positional import PositionalCache, block_of
from .readonly import ReadOnlyCache
from .sliding import SlidingCache, most_blocks

KINDS = ("append", "positional", "paged")  # by name; and "sliding:WINDOW"


def parse(kind: str) -> tuple[str, int]:
    """Name and window (0: none) of a kind. Raises InputError for an unknown one."""
    if kind in KINDS:
        return kind, 0
    found = re.fullmatch(r"sliding:([1-9][0-9]{0,11})", kind, re.ASCII) if isinstance(kind, str) else None
    if found:
        return "sliding", int(found[1])
    if isinstance(kind, str) and kind.partition(":")[0] == "sliding":
        raise InputError(f"KV cache {kind!r}: give the window in tokens, as in sliding:1024")
    raise InputError(f"there is no KV cache {kind!r}; there are {', '.join(KINDS)}, sliding:WINDOW")


def check(kind: str, config: Config, dtype: str) -> None:
    """Raises InputError for an unknown kind or dtype, or one that this kind or model does not have."""
    check_dtype(dtype, config, rows=parse(kind)[0] == "append")


def create(kind: str, ops: Backend, config: Config, capacity: int, dtype: str) -> Cache:
    """A cache for one sequence. Raises what `check` raises."""
    check(kind, config, dtype)
    name, window = parse(kind)
    if name == "append":
        return AppendCache(ops, config, capacity, dtype)
    if name == "positional":
        return PositionalCache(ops, config, capacity, dtype)
    pool = BlockPool(ops, config, -(-capacity // BLOCK), dtype)
    return SlidingCache(pool, capacity, window) if window else PagedCache(pool, capacity)


def n_bytes(config: Config, tokens: int, dtype: str) -> int:
    """Bytes of K and V of all layers for so many tokens."""
    return 2 * config.n_layers * config.n_kv_heads * row_bytes(dtype, config.head_dim) * tokens


def most_bytes(kind: str, config: Config, capacity: int, dtype: str, at_once: int) -> int:
    """Bytes of a cache that is full, its tokens having come `at_once` at a time."""
    name, window = parse(kind)
    step = {"append": 1, "positional": block_of(capacity)}.get(name, BLOCK)
    blocks = -(-capacity // step)
    if window:
        blocks = min(blocks, most_blocks(window, min(at_once, capacity), BLOCK))
    return n_bytes(config, blocks * step, dtype)


__all__ = [
    "BLOCK",
    "DTYPES",
    "KINDS",
    "AppendCache",
    "BlockPool",
    "Cache",
    "PaddedCache",
    "PagedCache",
    "PositionalCache",
    "ReadOnlyCache",
    "SlidingCache",
    "check",
    "create",
    "extended",
    "most_bytes",
    "n_bytes",
    "parse",
]

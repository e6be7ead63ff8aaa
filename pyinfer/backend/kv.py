"""Where a cache's keys and values lie and how they are stored: csrc/api.h, and csrc/NUMERICS.md section 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

F32 = NDArray[np.float32]
TILE = 16  # tokens to a tile of K
GROUP = 32  # values to a scale of q8_0


@dataclass(slots=True)
class KVBufferView:
    """Where a layer's cached keys and values lie: tokens first..length, in blocks of `block` tokens.

    layout "rows":  one block, k, v (block, n_kv_heads * head_dim)
    layout "tiles": k (n_kv_heads, block / 16, head_dim, 16), v (n_kv_heads, block, head_dim);
                    q8_0: bytes, k (n_kv_heads, block / 16, 17 * head_dim), v (n_kv_heads, block,
                    17 / 16 * head_dim), as csrc/api.h says
    """

    k: list[Any]
    v: list[Any]
    layout: str
    dtype: str  # "f32", "f16" or (tiles) "q8_0"
    n_kv_heads: int
    head_dim: int
    length: int  # the end of the tokens written
    capacity: int  # the end of room
    block: int
    first: int = 0  # the first token held
    window: int = 0  # a query sees itself and window - 1 tokens before; 0: all
    layer: int = 0
    stamp: int = 0  # counts changes of the lists k and v
    origin: int = 0  # tokens are counted in slots here; the slot of position 0, below 0 if it was given back
    handle: Any = None  # whatever the backend wants to keep with it

    def sees(self, tokens: int, t: int) -> tuple[int, int]:
        """The tokens from..to that query t of the last `tokens` attends to."""
        to = self.length - tokens + t + 1
        return max(self.first, to - self.window) if self.window else self.first, to


def check_rows(n_kv_heads: int, head_dim: int, k: Any, v: Any) -> None:
    """Raises InputError unless k and v are rows (tokens, n_kv_heads * head_dim)."""
    if k.shape != v.shape or k.shape[1:] != (n_kv_heads * head_dim,):
        raise InputError(
            f"K {k.shape} and V {v.shape} are no rows of the {n_kv_heads} heads of {head_dim} that this KV "
            "cache is for: make it with the config of the model that uses it"
        )


def row_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one head's K, or V, of a token."""
    return {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8_0": head_dim + head_dim // GROUP * 2}[dtype]


def block_shapes(
    dtype: str, n_kv_heads: int, head_dim: int, block: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a tiled block's K and V: of values, or of bytes for q8_0."""
    tiles = block // TILE
    if dtype == "q8_0":
        row = row_bytes(dtype, head_dim)
        return (n_kv_heads, tiles, TILE * row), (n_kv_heads, block, row)
    return (n_kv_heads, tiles, head_dim, TILE), (n_kv_heads, block, head_dim)


def narrow_q8_0(x: F32) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Codes (..., dim) and scales (..., dim / 32)."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    with np.errstate(all="ignore"):
        d = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
        d = np.where(np.isfinite(groups).all(axis=-1), d, np.float16(np.nan))
        s = d.astype(np.float32)
        inverse = np.where(s > 0, np.float32(1) / s, np.float32(0))
        codes = np.nan_to_num(np.clip(np.rint(groups * inverse[..., None]), -127, 127))
    return codes.reshape(x.shape).astype(np.int8), d


def widen_q8_0(codes: NDArray[np.int8], d: NDArray[np.float16]) -> F32:
    groups = codes.astype(np.float32).reshape(*codes.shape[:-1], -1, GROUP)
    return (groups * d.astype(np.float32)[..., None]).reshape(codes.shape)


def write(view: KVBufferView, k_block: NDArray[Any], v_block: NDArray[Any], at: int, k: F32, v: F32) -> None:
    """One token's k and v (n_kv_heads, head_dim) at place `at` of a block."""
    dim, lane = view.head_dim, at % TILE
    if view.layout == "rows":
        k_block[at], v_block[at] = k.reshape(-1), v.reshape(-1)
    elif view.dtype == "q8_0":
        tile = k_block[:, at // TILE]  # (n_kv_heads, bytes)
        codes, d = narrow_q8_0(k)
        tile[:, lane : TILE * dim : TILE] = codes.view(np.uint8)
        tile[:, TILE * dim :].view(np.float16)[:, lane::TILE] = d
        codes, d = narrow_q8_0(v)
        v_block[:, at, :dim], v_block[:, at, dim:] = codes.view(np.uint8), d.view(np.uint8)
    else:
        k_block[:, at // TILE, :, lane], v_block[:, at] = k, v


def keys(view: KVBufferView, k: NDArray[Any]) -> F32:
    """All keys of a block, (block, n_kv_heads * head_dim)."""
    if view.layout == "rows":
        return k.astype(np.float32)
    dim, heads = view.head_dim, len(k)
    if view.dtype == "q8_0":
        codes = k[..., : TILE * dim].view(np.int8).reshape(heads, -1, dim, TILE)
        d = k[..., TILE * dim :].view(np.float16).reshape(heads, -1, dim // GROUP, TILE)
        rows = widen_q8_0(codes.swapaxes(-1, -2), d.swapaxes(-1, -2))  # (heads, tiles, TILE, dim)
    else:
        rows = k.swapaxes(-1, -2).astype(np.float32)
    return rows.transpose(1, 2, 0, 3).reshape(-1, heads * dim)


def values(view: KVBufferView, v: NDArray[Any]) -> F32:
    """All values of a block, (block, n_kv_heads * head_dim)."""
    if view.layout == "rows":
        return v.astype(np.float32)
    dim, heads = view.head_dim, len(v)
    rows = (
        widen_q8_0(v[..., :dim].view(np.int8), v[..., dim:].view(np.float16)) if view.dtype == "q8_0" else v
    )
    return rows.transpose(1, 0, 2).reshape(-1, heads * dim).astype(np.float32)

"""A positional cache whose first slots stay unused: how a batch lines up sequences of different lengths."""

from __future__ import annotations

from ..backend.base import Backend
from ..model.config import Config
from .base import check_count
from .positional import PositionalCache


class PaddedCache(PositionalCache):
    """`pad` slots on the left hold nothing and are never read; `capacity` tokens come behind them.

    Token i lies in slot pad + i, and its position, for the model, is i: so the bytes are those of a sequence
    without padding.
    """

    kind = "padded"

    def __init__(self, ops: Backend, config: Config, capacity: int, dtype: str, pad: int) -> None:
        check_count("pad", pad, 0)
        super().__init__(ops, config, capacity, dtype, pad=pad)
        self.pad = pad

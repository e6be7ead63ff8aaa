"""The cos and sin of rope, by position, made as far as a sequence has come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..backend.base import Backend, Tensor
from .config import Config


class RopeTables:
    """`factors` (rope_dim / 2,) divide the frequencies, where a model brings them."""

    def __init__(self, ops: Backend, config: Config, factors: NDArray[np.float32] | None) -> None:
        self.ops, self.config, self.factors = ops, config, factors
        self.tables = self._make(256)

    def _make(self, n: int) -> tuple[Tensor, Tensor]:
        c = self.config
        return self.ops.rope_tables(0, n, c.rope_dim, c.rope_base, c.rope_scale, self.factors)

    def upto(self, n: int) -> tuple[Tensor, Tensor]:
        """cos and sin (at least n, rope_dim / 2) of positions from 0."""
        tables = self.tables  # once: another thread may put shorter ones in its place
        have = tables[0].shape[0]
        if n > have:
            tables = self.tables = self._make(max(n, 2 * have))
        return tables

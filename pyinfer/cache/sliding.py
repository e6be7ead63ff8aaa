"""A sequence that looks back over a window of tokens, and holds no block that the window has left behind."""

from __future__ import annotations

from ..errors import InputError
from .base import Cache, check_count
from .paged import BlockPool, PagedCache


class SlidingCache(PagedCache):
    """A token attends to itself and the window - 1 tokens before it.

    Blocks go back to the pool when the next tokens come; until then the sequence can be truncated as far as
    the window of its next token is still held.
    """

    kind = "sliding"

    def __init__(self, pool: BlockPool, capacity: int, window: int) -> None:
        check_count("window", window, 1)
        self.window = window
        super().__init__(pool, capacity)

    def reserve(self, n: int, at_once: int | None = None) -> None:
        if at_once and at_once < n:
            Cache.reserve(self, n)  # all of them have to fit into the context, only these into memory
            n = at_once
        super().reserve(n)

    def truncate(self, length: int) -> None:
        check_count("length", length, 0)
        given_back = -self.views[-1].origin
        if length == 0:  # from anew
            for view in self.views:
                view.length = view.origin = 0
        elif length < self.length and max(0, length + 1 - self.window) < given_back:
            raise InputError(
                f"length={length}: a window of {self.window} tokens needs tokens there that are no longer "
                f"held; go back to {given_back + self.window - 1} or more of {self.length}, or to 0"
            )
        super().truncate(length)

    def _passed(self) -> int:
        return max(0, self.views[-1].length + 1 - self.window) // self.pool.block


def most_blocks(window: int, at_once: int, block: int) -> int:
    """That a sequence holds at any time: an interval of window - 1 + at_once tokens, wherever it starts."""
    return -(-(window + at_once - 2) // block) + 1

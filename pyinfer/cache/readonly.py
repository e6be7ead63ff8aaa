"""A cache that stays as it is: many candidates scored against one prefix, each as if behind it alone."""

from __future__ import annotations

from ..backend.base import Tensor
from ..backend.kv import KVBufferView
from .base import Cache


class ReadOnlyCache(Cache):
    """The cache `inner`, which is never written: a forward over it attends to a copy that it extends
    (`extended`), and leaves nothing behind. So each forward starts at the same position.
    """

    kind = "read-only"
    frozen = True

    def __init__(self, inner: Cache) -> None:
        super().__init__(inner.ops, inner.config, inner.capacity, inner.dtype)
        self.inner = inner

    @property
    def length(self) -> int:
        return self.inner.length

    def view(self, layer: int) -> KVBufferView:
        return self.inner.view(layer)

    def update_in_place(self, layer: int, k: Tensor, v: Tensor) -> None:
        return None

    def truncate(self, length: int) -> None:
        """There is nothing to forget but what `inner` holds, and that stays."""

    def close(self) -> None:
        """Gives nothing back: it is all inner's."""

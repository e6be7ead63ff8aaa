"""The C calls of one forward pass, kept to be made again.

What changes from token to token: the token ids, the rope position, the lengths of the caches, and with them
now and then the plan of attention. The calls keep memory of their own: nothing else writes to it between two
of them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import _pi
from .kv import KVBufferView

if TYPE_CHECKING:
    from .native import CTensor, NativeBackend

FreeLists = dict[tuple[int, ...], list[Any]]  # shape -> (array, pointer) pairs not in use
N_POS, FIRST = 9, 10  # arguments of pi_rope: positions in its tables; the one to start from
MAPPED = slice(7 - 1, 9 - 1)  # of pi_attention: unit_of and tasks
Step = tuple[Sequence[KVBufferView], Sequence[int], int]  # of attention: views, queries to each, heads


class Capture:
    """Calls as they are made by one thread. `whole`: nothing happened outside of them."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.attention: list[tuple[int, Step]] = []  # which of the calls, and what is planned
        self.free: FreeLists = {}
        self.held: list[Any] = []  # what the calls point to and nobody else keeps for sure
        self.whole = True


class Replay:
    """A captured forward of n tokens over one cache, whose `views` it extends."""

    def __init__(
        self, ops: NativeBackend, capture: Capture, views: Sequence[KVBufferView], out: CTensor
    ) -> None:
        self.ops, self.views, self.out = ops, views, out
        self.memory = capture.free, capture.held
        self.calls = [(function, list(args)) for function, args in capture.calls]
        lib = _pi.lib
        (self.ids,) = (args[1] for function, args in self.calls if function is lib.pi_gather_rows)
        self.ropes = [args for function, args in self.calls if function is lib.pi_rope]
        self.positions = min(args[N_POS - 1] for args in self.ropes)
        # Layers that are alike have the same plan: one of them is asked for each token.
        self.plans: dict[Hashable, list[tuple[list[Any], Step]]] = {}
        for call, step in capture.attention:
            (v, *others), _, n_heads = step
            alike = ops.assignment(v.layer), len(others), n_heads, v.n_kv_heads, v.window
            self.plans.setdefault(alike, []).append((self.calls[call][1], step))
        self.ctx, self.code = ops.ctx, _pi.lib.PI_OK  # what calls get, and what they are to give back

    def idle(self) -> Replay:
        """One whose `run` does all that this one's does, but for what C does: without a context, each call
        comes back at once. What it takes is Python's share; its logits are those of the last run.
        """
        twin = copy.copy(self)
        twin.ctx, twin.code = _pi.ffi.NULL, _pi.lib.PI_EINVAL
        return twin

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits (n, n_vocab) of as many tokens as were captured."""
        start, ctx, code = self.views[0].length - self.views[0].origin, self.ctx, self.code
        self.ids[0 : len(tokens)] = tokens
        for args in self.ropes:
            args[FIRST - 1] = start
        for view in self.views:
            self.ops.handle(view)
            view.length += len(tokens)  # C sees this behind pi_kv_write, the plan now
        for layers in self.plans.values():
            args, step = layers[0]
            if tuple(args[MAPPED]) != self.ops.map_attention(*step):
                for args, step in layers:
                    args[MAPPED] = self.ops.map_attention(*step)
        for function, args in self.calls:
            if function(ctx, *args) != code:
                raise ValueError(
                    f"{function.__name__}: the C library refused to run again what it ran before"
                )
        return self.out.array.copy()

    def timed(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """As `run`, and when each call began and ended (n, 2)."""
        self.ops.op_times(len(self.calls), start=True)
        logits = self.run(tokens)
        return logits, self.ops.op_times(len(self.calls))

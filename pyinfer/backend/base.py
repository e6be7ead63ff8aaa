"""The ops a model is written in: primitives, and coarse ops whose defaults are made of primitives.

A backend that has the primitives is right; overriding a coarse op (a fusion) may change its speed and nothing
else. Tensors and weights are the backend's own handles: a tensor has a `shape`, `numpy()` shows its values.
Shapes below are (rows, columns). What each op computes, to the bit, is in csrc/NUMERICS.md.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..schedule import (
    INLINE,
    Assignment,
    AttentionSchedulePolicy,
    HeadPlan,
    Limits,
    Schedule,
    ScheduleDowngraded,
    Unit,
)
from . import kv
from .kv import KVBufferView

Tensor = Any
Weight = Any
Self = TypeVar("Self", bound="Backend")
log = logging.getLogger(__name__)
NOTHING = nullcontext()
COARSE = (
    *("matmul_many", "matmul_add", "rms_norm", "rms_norm_heads", "swiglu"),
    *("fused_attention", "batched_attention", "kv_write"),
)


class Replay(Protocol):
    """A forward pass that can be repeated, for positions below `positions`."""

    positions: int

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...

    def idle(self) -> Replay:
        """One that takes only the time that Python takes; it computes nothing."""


class Backend(ABC):
    """A set of ops. Primitive ops are abstract here; coarse ops have defaults."""

    name: str
    threads: int = 1
    concurrent: bool = True  # whether Python threads run its ops at the same time
    assigned: Mapping[int | None, Assignment] = {None: Assignment()}  # by layer; None: those not named

    def __init__(self) -> None:
        self.listeners: list[Callable[[ScheduleDowngraded], None]] = []
        self.emitted: set[ScheduleDowngraded] = set()

    # ---- how attention is mapped onto cores: moves no byte ------------------------------------------------

    def scheduled(
        self: Self,
        schedule: Schedule | None = None,
        policy: AttentionSchedulePolicy | None = None,
        *,
        layers: Collection[int] | None = None,
    ) -> Self:
        """The same backend with another schedule and policy of attention, in some layers, or (None) in all
        that have none of their own. schedule None: all threads that the backend has; policy None: Auto.
        """
        twin = copy.copy(self)
        given = Assignment(schedule) if policy is None else Assignment(schedule, policy)
        twin.assigned = {**self.assigned, **dict.fromkeys([None] if layers is None else layers, given)}
        return twin

    def emit(self, event: ScheduleDowngraded) -> None:
        """Logs an event and hands it to `listeners`, once."""
        if event not in self.emitted:
            self.emitted.add(event)
            log.info("%s", event)
            for listener in self.listeners:
                listener(event)

    def plan_attention(
        self, views: Sequence[KVBufferView], tokens: Sequence[int], n_heads: int, limits: Limits
    ) -> tuple[HeadPlan | None, int]:
        """The plan of a step of attention, None for inline, and the threads it may use."""
        view, n, seq_kv = views[0], len(views), 0
        for v, queries in zip(views, tokens, strict=True):
            seq_kv += queries * (v.length - v.sees(queries, 0)[0])
        return self.assignment(view.layer).plan(
            layer=view.layer,
            n_heads=n * n_heads,
            n_kv_heads=n * view.n_kv_heads,
            seq_kv=seq_kv,
            queries=max(tokens),
            limits=limits,
            emit=self.emit,
        )

    def assignment(self, layer: int) -> Assignment:
        return self.assigned.get(layer) or self.assigned[None]

    # ---- storage -------------------------------------------------------------------------------------------

    @abstractmethod
    def tensor(self, array: NDArray[Any]) -> Tensor:
        """A tensor with a copy of `array` (float32 or float16)."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> Tensor:
        """A tensor of zeros; the memory is only claimed when touched."""

    @abstractmethod
    def part(self, x: Tensor, index: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """x[index] as a tensor of `shape`, in the memory of x, which was made by `zeros`."""

    @abstractmethod
    def numpy(self, x: Tensor) -> NDArray[Any]:
        """The values of x. Those of a tensor made by `zeros` or `tensor` may be written to."""

    @abstractmethod
    def weight(
        self, type: int, rows: int, cols: int, data: NDArray[np.uint8], *, pack: bool = True
    ) -> Weight:
        """A matrix (rows, cols) from GGUF data of a GGML type; unless `pack`, it may keep and use `data`."""

    def kernels(self) -> dict[str, str]:
        """Which kernel runs each entry of the backend's table."""
        return {}

    def capture(
        self, forward: Callable[[], Tensor], views: Sequence[KVBufferView]
    ) -> tuple[Tensor, Replay | None]:
        """Runs forward(), and gives with its result what repeats it for the next token over the same cache,
        if the backend can.
        """
        return forward(), None

    # ---- for those who watch (tracing.py) ------------------------------------------------------------------

    def named(self, name: str, x: Tensor | Weight) -> None:
        """Told of each tensor of a model as it is loaded, with its name in the file."""
        return

    def span(self, kind: str, phase: str, tokens: int = 0, before: int = 0) -> AbstractContextManager[None]:
        """What the engine is at: a "forward" of `tokens` behind `before` others, or a "sample"; the phase is
        "prefill" or "decode".
        """
        return NOTHING

    def captured(self) -> int:
        """C calls that this thread has captured so far."""
        return 0

    def workers(self, spans: int) -> NDArray[np.int64]:
        """What the pool's threads did since the last call, (n, 3): thread, from, to, in nanoseconds of
        time.perf_counter_ns; and from now on room for so many more, 0: no longer noted down.
        """
        return np.zeros((0, 3), np.int64)

    # ---- primitives ----------------------------------------------------------------------------------------

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor | Weight) -> Tensor:
        """a (m, k) times a weight (n, k), transposed, or times a tensor (k, n)."""

    @abstractmethod
    def gather_rows(self, w: Weight, ids: Sequence[int]) -> Tensor:
        """Rows of a weight, dequantised: (len(ids), cols)."""

    @abstractmethod
    def transpose_2d(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def softmax_rows(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def scale(self, x: Tensor, factor: float, *, divide: bool = False) -> Tensor:
        """x * factor, or x / factor: they round differently."""

    @abstractmethod
    def add(self, a: Tensor, b: Tensor) -> Tensor: ...

    @abstractmethod
    def hadamard(self, a: Tensor, b: Tensor) -> Tensor: ...

    @abstractmethod
    def add_scalar(self, x: Tensor, c: float) -> Tensor: ...

    @abstractmethod
    def rsqrt_elem(self, x: Tensor) -> Tensor:
        """1 / sqrt(x), both rounded."""

    @abstractmethod
    def silu(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def sum_squares_axis(self, x: Tensor) -> Tensor:
        """(rows, 1): the fold of each row with itself."""

    @abstractmethod
    def broadcast_row_scalars(self, x: Tensor, cols: int) -> Tensor:
        """(rows, 1) -> (rows, cols)."""

    @abstractmethod
    def repeat_row_as_matrix(self, x: Tensor, rows: int) -> Tensor:
        """(1, cols) -> (rows, cols)."""

    @abstractmethod
    def reshape_data(self, x: Tensor, shape: tuple[int, ...]) -> Tensor: ...

    @abstractmethod
    def copy_2d_from_cols(self, x: Tensor, cols: int, first: int) -> Tensor:
        """Columns first..first+cols."""

    @abstractmethod
    def copy_2d_into_cols(self, out: Tensor, x: Tensor, first: int) -> None:
        """Overwrites columns first.. of `out` with x."""

    @abstractmethod
    def copy_rows_2d(self, x: Tensor, first: int, rows: int) -> Tensor:
        """Rows first..first+rows."""

    @abstractmethod
    def concat_dim0(self, a: Tensor, b: Tensor) -> Tensor: ...

    @abstractmethod
    def narrow_f16(self, x: Tensor) -> Tensor:
        """x rounded to float16, nearest even."""

    @abstractmethod
    def rope_tables(
        self, first: int, n: int, rot: int, base: float, scale: float, factors: NDArray[np.float32] | None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin (n, rot / 2) of positions first..first+n."""

    @abstractmethod
    def apply_rope(
        self, x: Tensor, cos: Tensor, sin: Tensor, first: int, head_dim: int, neox: bool
    ) -> Tensor:
        """Rotates each head of x (tokens, heads * head_dim) by table rows first..first+tokens."""

    # ---- coarse ops ----------------------------------------------------------------------------------------

    def matmul_many(self, x: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        """x times each weight: one quantisation of x and one parallel region, where a backend cares."""
        return [self.matmul(x, w) for w in weights]

    def matmul_add(self, x: Tensor, w: Weight, residual: Tensor) -> Tensor:
        return self.add(residual, self.matmul(x, w))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(x / rms(x)) * weight by row; weight (1, cols)."""
        rows, cols = x.shape
        mean = self.scale(self.reshape_data(self.sum_squares_axis(x), (rows, 1)), cols, divide=True)
        r = self.rsqrt_elem(self.add_scalar(mean, eps))
        scaled = self.hadamard(x, self.broadcast_row_scalars(r, cols))
        return self.hadamard(scaled, self.repeat_row_as_matrix(self.reshape_data(weight, (1, cols)), rows))

    def rms_norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm of each head of x (rows, heads * head_dim); weight (1, head_dim)."""
        head_dim = weight.shape[1]
        out = self.zeros(x.shape)
        for first in range(0, x.shape[1], head_dim):
            head = self.copy_2d_from_cols(x, head_dim, first)
            self.copy_2d_into_cols(out, self.rms_norm(head, weight, eps), first)
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.hadamard(self.silu(gate), up)

    def fused_attention(self, q: Tensor, view: KVBufferView, n_heads: int, scale: float) -> Tensor:
        """Causal attention of the last len(q) tokens over the cache: (tokens, n_heads * head_dim).

        The default is the per-head loop, over the layer's schedule; a mask is a loop bound.
        """
        tokens, layer = q.shape[0], view.layer
        schedule = self.assignment(layer).schedule or INLINE
        limits = Limits(
            schedule.parallelism if self.concurrent else 1,
            f"attention made of primitive ops runs on one thread over backend {self.name}",
            splits=False,
        )
        plan, threads = self.plan_attention((view,), (tokens,), n_heads, limits)
        schedule = INLINE if plan is None or threads == 1 else schedule
        keys, values = self.kv_rows(view)
        out = None
        for t in range(tokens):
            first, end = (at - view.first for at in view.sees(tokens, t))
            whole = tokens == 1 and first == 0
            row = self._attend(
                q if tokens == 1 else self.copy_rows_2d(q, t, 1),
                keys if whole else self.copy_rows_2d(keys, first, end - first),
                values if whole else self.copy_rows_2d(values, first, end - first),
                *(view, n_heads, scale, plan, schedule),
            )
            out = row if out is None else self.concat_dim0(out, row)
        return out

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        view: KVBufferView,
        n_heads: int,
        scale: float,
        plan: HeadPlan | None,
        schedule: Schedule,
    ) -> Tensor:
        """Of one query to all keys (n, n_kv_heads * head_dim): (1, n_heads * head_dim)."""
        out, dim, group = self.zeros(q.shape), view.head_dim, n_heads // view.n_kv_heads
        per = group if plan is not None and plan.unit is Unit.GROUP else 1  # heads to a unit

        def heads(lo: int, hi: int, slot: int) -> None:
            for h in range(lo * per, hi * per):
                kv = h // group * dim
                q_h = self.copy_2d_from_cols(q, dim, h * dim)
                k_h = self.copy_2d_from_cols(keys, dim, kv)
                v_h = self.copy_2d_from_cols(values, dim, kv)
                scores = self.scale(self.matmul(q_h, self.transpose_2d(k_h)), scale)
                context = self.matmul(self.softmax_rows(scores), v_h)
                self.copy_2d_into_cols(out, context, h * dim)

        schedule.for_range(n_heads // per, plan.grain if plan else 1, heads)
        return out

    def batched_attention(
        self, q: Tensor, views: Sequence[KVBufferView], tokens: Sequence[int], n_heads: int, scale: float
    ) -> Tensor:
        """fused_attention of several sequences at once: the first tokens[0] rows of q are queries of
        views[0], and so on; (sum of tokens, n_heads * head_dim).
        """
        out, at = None, 0
        for view, n in zip(views, tokens, strict=True):
            part = self.fused_attention(self.copy_rows_2d(q, at, n), view, n_heads, scale)
            out, at = part if out is None else self.concat_dim0(out, part), at + n
        return out

    # ---- the cache's memory: moves values, computes none --------------------------------------------------

    def kv_rows(self, view: KVBufferView) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens first..length, (tokens, n_kv_heads * head_dim), widened to f32."""
        blocks = range(view.first // view.block, -(-view.length // view.block))
        at = view.first - blocks.start * view.block
        k = np.concatenate([kv.keys(view, self.numpy(view.k[b])) for b in blocks])
        v = np.concatenate([kv.values(view, self.numpy(view.v[b])) for b in blocks])
        return tuple(self.tensor(x[at : at + view.length - view.first]) for x in (k, v))

    def kv_write(self, view: KVBufferView, k: Tensor, v: Tensor) -> None:
        """Writes rows k and v (tokens, n_kv_heads * head_dim) behind the view's length, and moves it on.

        Raises InputError for rows of another shape.
        """
        kv.check_rows(view.n_kv_heads, view.head_dim, k, v)
        heads = (-1, view.n_kv_heads, view.head_dim)
        for k_row, v_row in zip(*(self.numpy(x).reshape(heads) for x in (k, v)), strict=True):
            b, at = divmod(view.length, view.block)
            kv.write(view, self.numpy(view.k[b]), self.numpy(view.v[b]), at, k_row, v_row)
            view.length += 1


def unfused(backend: Backend, *ops: str) -> Backend:
    """The same backend with the named coarse ops run by their defaults; "all" of them. Raises InputError."""
    for op in ops:
        if op not in (*COARSE, "all"):
            raise InputError(f"there is no coarse op {op!r}; there are all, {', '.join(COARSE)}")
    ops, cls = COARSE if "all" in ops else ops, type(backend)
    plain = type(cls.__name__, (cls,), {op: getattr(Backend, op) for op in ops})
    twin: Backend = object.__new__(plain)
    twin.__dict__.update(backend.__dict__)
    return twin

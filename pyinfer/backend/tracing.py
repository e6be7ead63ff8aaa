"""Watching a backend at work: every call of an op, timed, told to observers.

`TracingBackend` wraps any backend and is only there when somebody asked. What it sees it gives to
`Observer`s: an op's `Call`s and the `Span`s that the engine opens around a forward pass and a pick of the
sampler. A decoded token is a replay of C calls (replay.py) and stays one: it is timed call by call, at the
price of reading a clock, and observers get all of a token's times at once.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ..schedule import AttentionSchedulePolicy, Schedule, ScheduleDowngraded
from .base import Backend, Replay, Tensor, Weight
from .kv import KVBufferView, row_bytes

STORAGE = {"tensor", "zeros", "part", "numpy", "kernels", "kv_rows"}  # no ops
SCHEDULING = {"scheduled", "emit", "plan_attention", "assignment"}
WATCHING = {"capture", "captured", "span", "named", "workers"}
NOT_OPS = STORAGE | SCHEDULING | WATCHING | {"weight"}
OPS = [
    name
    for name in vars(Backend)
    if not name.startswith("_") and callable(getattr(Backend, name)) and name not in NOT_OPS
]
DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}
BLOCK = re.compile(r"blk\.(\d+)\.")

clock = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the model: its name in the GGUF file, type, shape, and bytes there."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return prod(self.shape) // block * size

    @property
    def short(self) -> str:
        """Without what the layer says and what all have: "attn_q"."""
        return BLOCK.sub("", self.name).removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Attended:
    """What attention reads: where a query sees to, and how large a cached token is."""

    n_heads: int
    head_dim: int
    token_bytes: int  # of K and V of one token, all KV heads
    dtype: str
    window: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op. outer: the model, its cache or the sampler made it; else it is part of another, that
    ran its default. leaf: the backend's own; else that default. Times are of `clock`, in nanoseconds.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]  # of the tensors and weights given, then of the first result
    dtype: str
    weights: tuple[Named, ...]
    attends: Attended | None
    phase: str
    layer: int | None
    outer: bool
    leaf: bool
    thread: int
    start: int = 0
    end: int = 0
    result: Any = None

    @property
    def label(self) -> str:
        """The op and the weights it takes: "matmul_many attn_q attn_k attn_v"."""
        return " ".join((self.op, *(w.short for w in self.weights)))


@dataclass(slots=True)
class Span:
    """What the engine was at: a "forward" of `tokens` tokens behind `before` others, or a "sample"."""

    kind: str
    phase: str
    tokens: int
    before: int
    start: int = 0
    end: int = 0


class Observer:
    """What is told of a run. Methods are called by one thread at a time; those of a subclass that it does not
    need stay as they are.
    """

    replays = True  # whether it can do with the times of a replayed token; else each op is called by itself
    results = False  # whether Call.result is to hold what an op gave

    def attached(self, ops: TracingBackend) -> None:
        """Before anything else."""

    def loaded(self, facts: dict[str, Any]) -> None:
        """The model has been loaded: what it is and how it runs, as `Model.describe` gives it."""

    def call(self, call: Call) -> None:
        """An op has returned."""

    def replayed(self, calls: Sequence[Call], times: NDArray[np.int64]) -> None:
        """A token was decoded by the calls `calls`, of which the i-th ran from times[i, 0] to times[i, 1]."""
        for call, (start, end) in zip(calls, times.tolist(), strict=True):
            self.call(replace(call, start=start, end=end))

    def span(self, span: Span) -> None:
        """What a span holds has been told before."""

    def event(self, event: ScheduleDowngraded) -> None: ...

    def close(self) -> None:
        """After all else; once."""


class TracingBackend(Backend):
    """Any backend, with a count of calls to each op in `counts`, and observers.

    An op that the backend leaves at its default is not a call to it: the primitives that the default is made
    of are called through this wrapper, and counted.
    """

    def __init__(self, inner: Backend, observers: Sequence[Observer] = ()) -> None:
        self.inner, self.name, self.threads = inner, inner.name, inner.threads
        self.concurrent, self.assigned = inner.concurrent, inner.assigned
        self.listeners, self.emitted = inner.listeners, inner.emitted
        self.counts: Counter[str] = Counter()
        self.tensors: dict[int, tuple[Any, Named]] = {}  # by id; the tensor is held, so that ids stay its own
        self.observers = list(observers)
        self.results = any(o.results for o in observers)
        self._matrices: dict[int, tuple[str, tuple[int, int]]] = {}  # type and shape, by id
        self._at = _Where()
        self._lock = threading.RLock()  # attention at its default may run on several threads
        for o in observers:
            self.listeners.append(o.event)
            o.attached(self)

    def scheduled(
        self,
        schedule: Schedule | None = None,
        policy: AttentionSchedulePolicy | None = None,
        *,
        layers: Collection[int] | None = None,
    ) -> TracingBackend:
        twin = super().scheduled(schedule, policy, layers=layers)
        twin.inner = self.inner.scheduled(schedule, policy, layers=layers)
        return twin

    def report(self) -> str:
        """One line per op, sorted by name, under a line with the total."""
        head = f"[{self.name.upper()}] op invocation counts (total {sum(self.counts.values())}):"
        return "\n".join([head, *(f"  {op}: {n}" for op, n in sorted(self.counts.items()))])

    def loaded(self, facts: dict[str, Any]) -> None:
        for o in self.observers:
            o.loaded(facts)

    def close(self) -> None:
        """Nothing more will come."""
        while self.observers:
            self.observers.pop(0).close()

    # ---- what is told --------------------------------------------------------------------------------------

    def weight(
        self, type: int, rows: int, cols: int, data: NDArray[np.uint8], *, pack: bool = True
    ) -> Weight:
        made = self.inner.weight(type, rows, cols, data, pack=pack)
        self._matrices[id(made)] = GGMLQuantizationType(type).name, (rows, cols)
        return made

    def named(self, name: str, x: Tensor | Weight) -> None:
        type, shape = self._matrices.get(id(x)) or ("F32", tuple(x.shape))
        self.tensors[id(x)] = x, Named(name, type, shape)

    def span(self, kind: str, phase: str, tokens: int = 0, before: int = 0) -> _Opened:
        return _Opened(self, Span(kind, phase, tokens, before))

    def capture(
        self, forward: Callable[[], Tensor], views: Sequence[KVBufferView]
    ) -> tuple[Tensor, Replay | None]:
        """As the backend's own, where all observers can do with a replay; else op by op."""
        if not all(o.replays for o in self.observers):
            return forward(), None
        marks = self._at.marks = []
        try:
            out, replay = self.inner.capture(forward, views)
        finally:
            self._at.marks = None
        return out, None if replay is None else TracedReplay(self, replay, marks)

    def tell(self, calls: Sequence[Call], times: NDArray[np.int64], counts: Counter[str]) -> None:
        """Of a replayed token."""
        with self._lock:
            for op, n in counts.items():
                self.counts[op] += n
            for o in self.observers:
                o.replayed(calls, times)

    # ---- an op ---------------------------------------------------------------------------------------------

    def run(self, name: str, leaf: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """function(*args, **kwargs) as a call of op `name`."""
        at, thread = self._at, threading.get_ident()
        outer = at.depth == 0
        named: tuple[Named, ...] = ()
        view = None
        if outer:
            named, view = self._names(args)
            at.enter(named, view)
        if not leaf:
            at.depth += 1
        start = clock()
        try:
            result = function(*args, **kwargs)
        finally:
            end = clock()
            if not leaf:
                at.depth -= 1
        if self.observers:
            call = Call(
                op=name,
                shapes=_shapes(args, result),
                dtype=_dtype(result),
                weights=named,
                attends=_attended(args, view),
                phase=at.phase,
                layer=at.layer,
                outer=outer,
                leaf=leaf,
                thread=thread,
                start=start,
                end=end,
                result=result if self.results and outer else None,
            )
            with self._lock:
                if outer and at.marks is not None:
                    at.marks.append((call, self.inner.captured()))
                for o in self.observers:
                    o.call(call)
        return result

    def _names(self, args: Sequence[Any]) -> tuple[tuple[Named, ...], KVBufferView | None]:
        """What of the model, and of its cache, an op is given."""
        found, view = [], None
        for a in args:
            for x in a if isinstance(a, list | tuple) else (a,):
                if isinstance(x, KVBufferView):
                    view = x
                elif (known := self.tensors.get(id(x))) is not None:
                    found.append(known[1])
        return tuple(found), view

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


def watched(inner: Backend, observers: Sequence[Observer]) -> TracingBackend:
    """A backend with observers."""
    return TracingBackend(inner, observers)  # type: ignore[abstract]  # the ops are set below


@dataclass
class _Where:
    """Where in the model the coordinator is: shared by a backend and its scheduled twins."""

    phase: str = ""  # outside of all spans
    layer: int | None = None
    depth: int = 0  # of ops that run their default
    marks: list[tuple[Call, int]] | None = None  # of a capture: calls, and how many C calls came with them

    def enter(self, named: Sequence[Named], view: KVBufferView | None) -> None:
        """A layer begins with an op on one of its weights, and ends with an op on a weight of none."""
        if named:
            block = BLOCK.match(named[0].name)
            self.layer = int(block[1]) if block else None
        elif view is not None:
            self.layer = view.layer


class _Opened:
    """A span that is open in a `with` statement."""

    __slots__ = ("ops", "span")

    def __init__(self, ops: TracingBackend, span: Span) -> None:
        self.ops, self.span = ops, span

    def __enter__(self) -> None:
        at = self.ops._at
        at.phase, at.layer = self.span.phase, None
        self.span.start = clock()

    def __exit__(self, *_: object) -> None:
        self.span.end = clock()
        self.ops._at.phase = ""
        with self.ops._lock:
            for o in self.ops.observers:
                o.span(self.span)


class TracedReplay:
    """A replay that tells the times of its calls."""

    def __init__(self, ops: TracingBackend, inner: Any, marks: Sequence[tuple[Call, int]]) -> None:
        self.ops, self.inner, self.positions = ops, inner, inner.positions
        self.calls = [replace(call, phase="decode", start=0, end=0, result=None) for call, _ in marks]
        behind = np.array([n for _, n in marks])  # C calls of an op and all before
        self.first, self.last = np.array([0, *behind[:-1]]), behind - 1
        self.several = bool((self.first != self.last).any())  # whether there are ops of several C calls
        self.counts = Counter(call.op for call in self.calls)

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        logits, times = self.inner.timed(tokens)
        if self.several:
            times = np.stack([times[self.first, 0], times[self.last, 1]], axis=1)
        self.ops.tell(self.calls, times, self.counts)
        return logits

    def idle(self) -> Replay:
        return self.inner.idle()


def _shapes(args: Sequence[Any], result: Any) -> tuple[tuple[int, ...], ...]:
    found = []
    for a in (*args, result):
        for x in a if isinstance(a, list | tuple) else (a,):
            shape = getattr(x, "shape", None)
            if shape is not None:
                found.append(tuple(shape))
    return tuple(found)


def _dtype(result: Any) -> str:
    first = result[0] if isinstance(result, list | tuple) and result else result
    dtype = getattr(getattr(first, "array", first), "dtype", None)
    return DTYPES.get(dtype, "")


def _attended(args: Sequence[Any], view: KVBufferView | None) -> Attended | None:
    """fused_attention's view and heads."""
    if view is None or len(args) < 3 or not isinstance(args[2], int):
        return None
    token = 2 * view.n_kv_heads * row_bytes(view.dtype, view.head_dim)
    return Attended(args[2], view.head_dim, token, view.dtype, view.window)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: TracingBackend, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


def _traced(name: str) -> Callable[..., Any]:
    default = getattr(Backend, name)
    abstract = getattr(default, "__isabstractmethod__", False)

    def call(self: TracingBackend, *args: Any, **kwargs: Any) -> Any:
        if not abstract and getattr(type(self.inner), name) is default:
            return self.run(name, False, partial(default, self), args, kwargs)
        self.count(name)
        return self.run(name, True, getattr(self.inner, name), args, kwargs)

    return call


for _name in STORAGE | {"captured", "workers"}:
    setattr(TracingBackend, _name, _forward(_name))
for _name in OPS:
    setattr(TracingBackend, _name, _traced(_name))
TracingBackend.__abstractmethods__ = frozenset()

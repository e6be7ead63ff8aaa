"""A run as Chrome's trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is that of Google's "Trace Event Format": complete events (ph X) with times in microseconds, nested
by time on a thread: ops in layers in forwards. Beside the thread that runs the model each of the pool's has
its own; cache length and tokens per second are counters, changes of a schedule instants. What was run stands
in `otherData`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend.tracing import Call, Observer, Span, TracingBackend, clock
from ..schedule import ScheduleDowngraded
from .calls import shapes
from .phases import bucket
from .work import work

PID, COORDINATOR, WORKER = (
    1,
    0,
    100,
)  # a process; threads: the coordinator, 1.. other Python threads, 100.. the pool's
WORKER_SPANS = 1 << 16  # of one forward, at most
Event = dict[str, Any]
Calls = list[tuple[Call, int, int]]  # with start and end


class ChromeTrace(Observer):
    """Writes `path` when the model is closed. `measure`, called then, may add to `otherData` what the machine
    can do.
    """

    def __init__(
        self, path: str | Path, *, measure: Callable[[TracingBackend], dict[str, Any]] | None = None
    ) -> None:
        self.path, self.measure = Path(path), measure
        self.facts: dict[str, Any] = {}
        self._pending: list[tuple[Sequence[Call], NDArray[np.int64]] | Call] = []
        self._spans: list[tuple[Span, list[Any], NDArray[np.int64]]] = []
        self._downgrades: list[tuple[int, ScheduleDowngraded]] = []

    def attached(self, ops: TracingBackend) -> None:
        self.ops = ops
        ops.workers(WORKER_SPANS)

    def loaded(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.ops.workers(WORKER_SPANS)  # what came with loading is let go

    def call(self, call: Call) -> None:
        if call.phase:  # else the model is being loaded
            self._pending.append(call)

    def replayed(self, calls: Sequence[Call], times: NDArray[np.int64]) -> None:
        self._pending.append((calls, times))

    def span(self, span: Span) -> None:
        self._spans.append((span, self._pending, self.ops.workers(WORKER_SPANS)))
        self._pending = []

    def event(self, event: ScheduleDowngraded) -> None:
        self._downgrades.append((clock(), event))

    def close(self) -> None:
        self.ops.workers(0)
        if self.measure is not None:
            self.facts = {**self.facts, **self.measure(self.ops)}
        content = {"traceEvents": self.events(), "displayTimeUnit": "ms", "otherData": self.facts}
        try:
            self.path.write_text(json.dumps(content, separators=(",", ":")))
        except OSError as error:  # of a full disk, without a name
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def events(self) -> list[Event]:
        """All of the run, times from its first span on."""
        times = [span.start for span, _, _ in self._spans] + [at for at, _ in self._downgrades]
        zero = min(times, default=0)
        events: list[Event] = []
        threads: dict[int, int] = {}  # Python's ids to ours
        names = {COORDINATOR: "model"}
        for span, pending, workers in self._spans:
            calls = list(_calls(pending))
            if calls and not threads:
                threads[calls[0][0].thread] = COORDINATOR
            for call, _, _ in calls:
                tid = threads.setdefault(call.thread, len(threads))
                names.setdefault(tid, f"thread {tid}")
            events.append(
                _complete(_title(span), span.kind, span.start, span.end, COORDINATOR, zero, _facts(span))
            )
            events += _layers(calls, zero)
            for call, start, end in calls:
                args = _args(call, span)
                events.append(_complete(call.label, "op", start, end, threads[call.thread], zero, args))
            starts = [start for call, start, _ in calls if call.outer]
            outer = [call for call, _, _ in calls if call.outer]
            for slot, start, end in workers[workers[:, 1] >= span.start].tolist():
                at = bisect_right(starts, start) - 1
                label = outer[at].label if at >= 0 else "region"
                names[WORKER + slot] = f"pool {slot}"
                events.append(_complete(label, "region", start, end, WORKER + slot, zero, {}))
            if span.kind == "forward":
                length = {"tokens": span.before + span.tokens}
                rate = {span.phase: span.tokens / max(span.end - span.start, 1) * 1e9}
                events.append(_counter("cache length", span.end, zero, length))
                events.append(_counter("tokens/s", span.end, zero, rate))
        for at, e in self._downgrades:
            args = {"requested": e.requested, "used": e.used, "layer": e.layer, "reason": e.reason}
            events.append(
                _event("i", "schedule downgraded", at, COORDINATOR, zero, args)
                | {"cat": "schedule", "s": "p"}
            )
        heads = [
            ("process_name", COORDINATOR, "pyinfer"),
            *(("thread_name", t, n) for t, n in sorted(names.items())),
        ]
        about = [{"ph": "M", "name": kind, "pid": PID, "tid": t, "args": {"name": n}} for kind, t, n in heads]
        return about + sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0)))


def _calls(pending: Sequence[Any]) -> Iterator[tuple[Call, int, int]]:
    for item in pending:
        if isinstance(item, Call):
            yield item, item.start, item.end
        else:
            calls, times = item
            yield from ((call, *at) for call, at in zip(calls, times.tolist(), strict=True))


def _layers(calls: Calls, zero: int) -> Iterator[Event]:
    """A span over each run of outer calls in one layer."""
    outer = [c for c in calls if c[0].outer and c[0].layer is not None]
    for layer, found in groupby(outer, key=lambda c: c[0].layer):
        inside = list(found)
        yield _complete(f"layer {layer}", "layer", inside[0][1], inside[-1][2], COORDINATOR, zero, {})


def _title(span: Span) -> str:
    return f"{span.phase} {span.tokens}" if span.kind == "forward" else span.kind


def _facts(span: Span) -> dict[str, Any]:
    if span.kind != "forward":
        return {"phase": span.phase}
    return {"phase": span.phase, "tokens": span.tokens, "before": span.before}


def _args(call: Call, span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {
        "shapes": shapes(call),
        "dtype": call.dtype,
        "phase": span.phase,
        "leaf": call.leaf,
    }
    if call.layer is not None:
        args["layer"] = call.layer
    if call.outer:
        n_bytes, macs = work(call, span.tokens, span.before)
        args |= {"bucket": bucket(call), "bytes": n_bytes, "macs": macs}
    return args


def _event(ph: str, name: str, at: int, tid: int, zero: int, args: dict[str, Any]) -> Event:
    return {"ph": ph, "name": name, "ts": (at - zero) / 1e3, "pid": PID, "tid": tid, "args": args}


def _complete(name: str, cat: str, start: int, end: int, tid: int, zero: int, args: dict[str, Any]) -> Event:
    return _event("X", name, start, tid, zero, args) | {"cat": cat, "dur": (end - start) / 1e3}


def _counter(name: str, at: int, zero: int, values: Mapping[str, float]) -> Event:
    return _event("C", name, at, COORDINATOR, zero, dict(values))

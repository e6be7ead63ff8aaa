"""Counting backend calls, per op, around any backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from threading import Lock
from typing import Any

from ..schedule import AttentionSchedulePolicy, Schedule
from .base import Backend

STORAGE = {"tensor", "zeros", "part", "numpy", "weight", "kernels", "kv_rows"}  # no ops
SCHEDULING = {"scheduled", "emit", "plan_attention", "assignment"}
NOT_OPS = STORAGE | SCHEDULING | {"capture"}  # its default runs op by op, so that each is counted
OPS = [
    name
    for name in vars(Backend)
    if not name.startswith("_") and callable(getattr(Backend, name)) and name not in NOT_OPS
]


class TracingBackend(Backend):
    """Any backend, with a count of calls to each op in `counts`.

    An op that the backend leaves at its default is not a call to it: the primitives that the default is made
    of are called through this wrapper, and counted.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner, self.name, self.threads = inner, inner.name, inner.threads
        self.concurrent, self.assigned = inner.concurrent, inner.assigned
        self.listeners, self.emitted = inner.listeners, inner.emitted
        self.counts: Counter[str] = Counter()
        self._counting = Lock()

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


def _forward(name: str) -> Callable[..., Any]:
    def call(self: TracingBackend, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


def _traced(name: str) -> Callable[..., Any]:
    default = getattr(Backend, name)
    abstract = getattr(default, "__isabstractmethod__", False)

    def call(self: TracingBackend, *args: Any, **kwargs: Any) -> Any:
        if not abstract and getattr(type(self.inner), name) is default:
            return default(self, *args, **kwargs)
        with self._counting:  # attention at its default may run on several threads
            self.counts[name] += 1
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name in STORAGE:
    setattr(TracingBackend, _name, _forward(_name))
for _name in OPS:
    setattr(TracingBackend, _name, _traced(_name))
TracingBackend.__abstractmethods__ = frozenset()

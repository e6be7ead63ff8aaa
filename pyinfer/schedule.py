"""How independent work is mapped onto cores; what is computed never depends on it.

A `Schedule` forks ranges of units and joins them. An `AttentionSchedulePolicy` says what a unit of attention
is. Both belong to a backend (`Backend.scheduled`), for all layers or for some; model code knows neither. The
default attention runs its plan through `Schedule.for_range`; a native backend maps the same plan onto the C
library's own pool, in one call. What was asked for and cannot be had is said: `ScheduleDowngraded`.

A leaf: it imports nothing that computes.
"""

from __future__ import annotations

import contextvars
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from .errors import InputError

MAX_PARALLELISM = 256
FORK_SCORES = 64  # below so many scores to a query head, a fork costs more than it saves
SPLIT_KEYS = 64  # keys to a unit of Split's first phase, as in csrc/attention.c

Body = Callable[[int, int, int], None]
_here = threading.local()  # .slot: the slot of the region that this thread is in


# ---- schedules ---------------------------------------------------------------------------------------------


def n_tasks(units: int, grain: int, parallelism: int) -> int:
    """How many tasks a region of `units`, handed out `grain` at a time, is worth."""
    return min(parallelism, -(-units // grain))


class Schedule(ABC):
    """Runs the units of a region, on at most `parallelism` cores at once."""

    parallelism: int

    def for_range(self, units: int, grain: int, body: Body) -> None:
        """Calls body(lo, hi, slot) for disjoint ranges that cover 0..units, each of at most `grain` units
        (where there is but one task: all of them).

        Ranges that run at the same time have different slots, below `parallelism`: scratch may be kept by
        slot. Returns when all have ended. The first failure cancels the ranges not yet begun, and is raised.
        A region inside a region runs inline, in the slot that it is in. Raises InputError for a grain below
        1.
        """
        if grain < 1:
            raise InputError(f"grain={grain!r}: give a whole number of units, at least 1")
        slot = getattr(_here, "slot", None)
        tasks = n_tasks(units, grain, self.parallelism)
        if tasks > 1 and slot is None:
            self._fork(units, grain, tasks, body)
        elif units > 0:
            body(0, units, slot or 0)

    @abstractmethod
    def _fork(self, units: int, grain: int, tasks: int, body: Body) -> None: ...


class Inline(Schedule):
    """All in the thread that asks."""

    parallelism = 1

    def _fork(self, units: int, grain: int, tasks: int, body: Body) -> None:
        raise AssertionError("a region of one task is not forked")

    def __repr__(self) -> str:
        return "Inline()"


class Pool(Schedule):
    """On n threads, the one that asks among them; the others start when first needed, and stay.

    `regions` counts the regions forked. Raises InputError for an n that is out of range.
    """

    def __init__(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_PARALLELISM:
            raise InputError(f"Pool({n!r}): give a whole number of threads, from 1 to {MAX_PARALLELISM}")
        self.parallelism, self.regions = n, 0
        self._threads: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def _fork(self, units: int, grain: int, tasks: int, body: Body) -> None:
        left, failures = deque(range(0, units, grain)), deque[BaseException]()

        def take(slot: int) -> None:
            _here.slot = slot
            try:
                while left:
                    try:
                        lo = left.popleft()
                    except IndexError:  # another task took the last one
                        return
                    body(lo, min(lo + grain, units), slot)
            except BaseException as error:
                failures.append(error)
                left.clear()
            finally:
                _here.slot = None

        with self._starting:
            self.regions += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.parallelism - 1, "pyinfer")
        others: list[Future[None]] = []
        try:
            for slot in range(1, tasks):  # with what the caller has set for its thread, as np.errstate is
                run = partial(contextvars.copy_context().run, take, slot)
                others.append(self._threads.submit(run))
            take(0)
        finally:
            left.clear()
            _join(others)
        if failures:
            raise failures[0]

    def __repr__(self) -> str:
        return f"Pool({self.parallelism})"


def _join(tasks: list[Future[None]]) -> None:
    """Waits for those that have begun; an interrupt is raised behind that."""
    running = [task for task in tasks if not task.cancel()]
    try:
        wait(running)
    except BaseException:
        wait(running)
        raise


INLINE = Inline()


# ---- policies ----------------------------------------------------------------------------------------------


class Unit(Enum):
    """What a task takes at a time of a step of attention."""

    GROUP = "group"  # the query heads of one KV head
    HEAD = "head"  # one query head
    SPLIT = "split"  # a KV head's scores of some keys; then some of its value dimensions


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A region of attention: so many units of a kind, `grain` of them to a range. Raises InputError."""

    units: int
    grain: int
    unit: Unit

    def __post_init__(self) -> None:
        if self.units < 1 or self.grain < 1 or not isinstance(self.unit, Unit):
            raise InputError(f"{self!r}: units and grain are at least 1, and unit is a schedule.Unit")

    def tasks(self, parallelism: int, queries: int = 1) -> int:
        """Of a step of so many queries to a sequence, by which units may be divided further."""
        return n_tasks(self.units * queries, self.grain, parallelism)


class AttentionSchedulePolicy(ABC):
    """Plans a step of attention. A policy has no state: two of a kind are equal."""

    @abstractmethod
    def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan | None:
        """The region to open for a step; None: the coordinator runs it inline.

        n_heads, n_kv_heads  of the step: of several sequences at once, the heads of all
        seq_kv               keys that a query head is scored against: for several queries, the sum of theirs
        parallelism          threads that may take part

        Split is for one query to a sequence, groups are of more than one head: in another step its unit is
        replaced, and unless the policy is Auto that is a downgrade.
        """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Sequential(AttentionSchedulePolicy):
    """Always inline."""

    def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan | None:
        return None


class PerHead(AttentionSchedulePolicy):
    def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan:
        return HeadPlan(n_heads, 1, Unit.HEAD)


class PerKVGroup(AttentionSchedulePolicy):
    """K and V of a KV head are read once, for all its query heads."""

    def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan:
        return HeadPlan(n_kv_heads, 1, Unit.GROUP)


class Split(AttentionSchedulePolicy):
    """Over keys while scores are made, over value dimensions while values are added up."""

    def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan:
        return HeadPlan(n_kv_heads * -(-seq_kv // SPLIT_KEYS), 1, Unit.SPLIT)


class Auto(AttentionSchedulePolicy):
    """Inline on one core or for few keys; split where there are more cores than heads; by KV groups where
    there are groups, and enough for the cores; else by heads.
    """

    def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan | None:
        if parallelism == 1 or seq_kv < FORK_SCORES:
            return None
        policy = Split() if parallelism > n_heads else by_heads(n_heads, n_kv_heads, parallelism)
        return policy.plan(n_heads, n_kv_heads, seq_kv, parallelism)


AUTO = Auto()


def by_heads(n_heads: int, n_kv_heads: int, parallelism: int) -> PerKVGroup | PerHead:
    return PerKVGroup() if parallelism <= n_kv_heads < n_heads else PerHead()


POLICIES: dict[str, type[AttentionSchedulePolicy]] = {
    "auto": Auto,
    "sequential": Sequential,
    "per-head": PerHead,
    "per-kv-group": PerKVGroup,
    "split": Split,
}


def policy_of(policy: str | AttentionSchedulePolicy) -> AttentionSchedulePolicy:
    """By name, or as it is. Raises InputError for what is neither."""
    if isinstance(policy, AttentionSchedulePolicy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InputError(f"there is no attention policy {policy!r}; there are {', '.join(POLICIES)}")
    return POLICIES[policy]()


# ---- what is asked for, and what is done -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleDowngraded:
    """A schedule or policy that was asked for and could not be had, in a layer; bytes do not depend on it."""

    requested: str
    used: str
    layer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What an implementation of attention can do: run on so many threads, and why not more; split or not."""

    threads: int
    reason: str
    splits: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """What maps a layer's attention. schedule None: nobody asked for one, and the implementation uses all its
    threads.
    """

    schedule: Schedule | None = None
    policy: AttentionSchedulePolicy = AUTO

    def plan(
        self,
        *,
        layer: int,
        n_heads: int,
        n_kv_heads: int,
        seq_kv: int,
        queries: int,
        limits: Limits,
        emit: Callable[[ScheduleDowngraded], None],
    ) -> tuple[HeadPlan | None, int]:
        """The plan of a step and the threads it may use, within the limits; emits what they forbid."""
        asked = limits.threads if self.schedule is None else self.schedule.parallelism
        parallelism = min(asked, limits.threads)
        if asked > parallelism:
            used = repr(Pool(parallelism) if parallelism > 1 else INLINE)
            emit(ScheduleDowngraded(repr(self.schedule), used, layer, limits.reason))
        plan = self.policy.plan(n_heads, n_kv_heads, seq_kv, parallelism)
        if plan is None:
            return None, parallelism
        if not isinstance(plan, HeadPlan):
            raise InputError(f"{self.policy!r} planned {plan!r}; a plan is a HeadPlan or None")
        reason = None
        if plan.unit is Unit.SPLIT and queries > 1:
            reason = "several queries of a sequence are split by heads"
        elif plan.unit is Unit.SPLIT and not limits.splits:
            reason = "attention made of primitive ops is split by heads"
        elif plan.unit is Unit.GROUP and n_heads == n_kv_heads:
            reason = "each query head has a KV head of its own"
        if reason:
            instead = by_heads(n_heads, n_kv_heads, parallelism)
            plan = replace(instead.plan(n_heads, n_kv_heads, seq_kv, parallelism), grain=plan.grain)
            if not isinstance(self.policy, Auto):
                emit(ScheduleDowngraded(repr(self.policy), repr(instead), layer, reason))
        return plan, parallelism

"""A trace in numbers: the file that ChromeTrace wrote, read back and added up."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from statistics import median
from typing import Any

from ..bench import Limits
from ..errors import InputError

PHASES = ("prefill", "decode")
FLOATS = {"F32", "F16", "BF16"}
KINDS = ("forward", "sample", "op")
SLOWEST, OF_A_KIND = 12, 3
NANOSECOND = 1e-3  # times are microseconds with three decimals: sums of two may be off by one


@dataclass(slots=True)
class Bucket:
    """What a bucket of observe.phases took in one phase, the bytes of weights and cache that its ops read,
    and their multiply-adds.
    """

    name: str
    calls: int = 0
    us: float = 0.0
    bytes: int = 0
    macs: int = 0

    @property
    def gb(self) -> float:
        """1e9 bytes per second."""
        return self.bytes / max(self.us, NANOSECOND) / 1e3

    @property
    def gmac(self) -> float:
        """1e9 multiply-adds per second."""
        return self.macs / max(self.us, NANOSECOND) / 1e3

    @property
    def intensity(self) -> float:
        """Multiply-adds per byte; 0 where nothing is read."""
        return self.macs / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """All time of a phase, by bucket, the largest first."""

    name: str
    tokens: int
    us: float
    buckets: list[Bucket]


@dataclass(slots=True)
class Op:
    """The calls of an op with one set of weights, of all layers; bucket None if it was part of another."""

    label: str
    bucket: str | None
    us: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)  # by phase

    @property
    def mean_us(self) -> float:
        return self.us / self.calls.total()


@dataclass(frozen=True, slots=True)
class Step:
    """A decoding forward: tokens in the cache after it, tokens per second, and the median around it."""

    context: int
    rate: float
    median: float


@dataclass(frozen=True, slots=True)
class Span:
    """Steps next to each other: the first and last context, the rates."""

    first: int
    last: int
    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Slow:
    """One call of an op; median_us is that of its like in the same phase, `at_ms` from the first forward."""

    label: str
    bucket: str | None
    phase: str
    layer: int | None
    shapes: str
    us: float
    median_us: float
    at_ms: float


@dataclass(frozen=True, slots=True)
class Downgrade:
    """A schedule that could not be had, in so many events."""

    requested: str
    used: str
    reason: str
    layers: str
    times: int
    at_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a trace says. first_ms: to the first logits, as Model.metrics has it; None, like `rate`, where no
    token was picked or decoded.
    """

    facts: Mapping[str, Any]  # the trace's otherData
    limits: Limits | None
    tokens_in: int
    tokens_out: int
    first_ms: float | None
    rate: float | None  # decoded tokens per second, of their forwards
    phases: list[Phase]
    ops: list[Op]  # the backend's own, the dearest first
    steps: list[Step]  # by context
    slowest: list[Slow]
    downgrades: list[Downgrade]

    def peak(self, bucket: str) -> float | None:
        """GMAC/s at most: of floats in attention, and where no matrix is quantised."""
        if self.limits is None:
            return None
        floats = bucket.startswith("attn.") or set(self.facts.get("tensor_types", ())) <= FLOATS
        return self.limits.f32_gmac if floats else self.limits.int8_gmac


def read(path: Path) -> Report:
    """The report on a file. Raises InputError where there is no trace of pyinfer, or nothing in it."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    return report(content, str(path))


def report(trace: Any, name: str = "the trace") -> Report:
    """A trace's content added up; `name` is for errors. Raises InputError as `read`."""
    try:
        facts, limits, events, notes = _parse(trace)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{name} is no trace of pyinfer (`--trace` writes one): {type(error).__name__}, {error}"
        ) from None
    forwards = [e for e in events if e.kind == "forward"]
    if not forwards:
        raise InputError(f"{name} is empty: nothing was run while it was taken")
    samples = [e for e in events if e.kind == "sample"]
    decoded = [e for e in forwards if e.phase == "decode"]
    took = sum(e.us for e in decoded)
    zero = forwards[0].start
    return Report(
        facts=facts,
        limits=limits,
        tokens_in=sum(e.tokens for e in forwards if e.phase == "prefill"),
        tokens_out=len(samples),
        first_ms=(samples[0].start - zero) / 1e3 if samples else None,
        rate=sum(e.tokens for e in decoded) / took * 1e6 if took else None,
        phases=_phases(events),
        ops=_ops(events),
        steps=_steps(decoded),
        slowest=_slowest(events, zero),
        downgrades=_downgrades(notes, zero),
    )


# ---- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Event:
    """A span of the engine's, or an op."""

    kind: str
    name: str
    start: float  # microseconds, as `us`
    us: float
    phase: str
    tokens: int = 0
    before: int = 0
    leaf: bool = False
    bucket: str | None = None  # of ops that are no part of another
    layer: int | None = None
    shapes: str = ""
    bytes: int = 0
    macs: int = 0


def _parse(trace: Any) -> tuple[dict[str, Any], Limits | None, list[_Event], list[dict[str, Any]]]:
    """What run it was, the machine's limits, spans and ops in order, and events of the schedule."""
    facts: dict[str, Any] = _is(trace["otherData"], dict)
    _is(facts["backend"], str)
    _is(facts.get("tensor_types", {}), dict)
    _is(facts.get("kernels", {}), dict)
    limits = None
    if facts.get("limits") is not None:
        found = facts["limits"]
        limits = Limits(
            _number(found["read_gb"]),
            *(None if found[key] is None else _number(found[key]) for key in ("int8_gmac", "f32_gmac")),
        )
    events, notes = [], []
    for e in _is(trace["traceEvents"], list):
        if e["ph"] == "X" and e["cat"] in KINDS:
            events.append(_event(e))
        elif e["ph"] == "i" and e["cat"] == "schedule":
            notes.append(e["args"] | {"ts": _number(e["ts"], low=-math.inf)})
    return facts, limits, sorted(events, key=lambda e: (e.start, -e.us)), notes


def _event(e: Mapping[str, Any]) -> _Event:
    args, kind = _is(e["args"], dict), e["cat"]
    found: dict[str, Any] = {}
    if kind == "forward":
        found = {key: _is(args[key], int) for key in ("tokens", "before")}
    elif kind == "op":
        found = {"leaf": args["leaf"], "shapes": _is(args["shapes"], str)}
        if "layer" in args:
            found["layer"] = _is(args["layer"], int)
        if "bucket" in args:
            found["bucket"] = _is(args["bucket"], str)
            found |= {key: _number(args[key]) for key in ("bytes", "macs")}
    start, us = _number(e["ts"], low=-math.inf), _number(e["dur"])
    return _Event(kind, _is(e["name"], str), start, us, _is(args["phase"], str), **found)


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _number(value: Any, low: float = 0.0) -> Any:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < low:
        raise ValueError(f"{value!r:.40} is no number that could be")
    return value


# ---- adding up ---------------------------------------------------------------------------------------------


def _phases(events: Sequence[_Event]) -> list[Phase]:
    """As PhaseProfile has it: "sample" is all of a span, "python" what a forward takes beyond its ops."""
    sums: dict[str, dict[str, Bucket]] = defaultdict(dict)
    tokens: Counter[str] = Counter()

    def add(e: _Event, name: str, us: float, calls: int = 1) -> None:
        b = sums[e.phase].setdefault(name, Bucket(name))
        b.calls, b.us, b.bytes, b.macs = b.calls + calls, b.us + us, b.bytes + e.bytes, b.macs + e.macs

    span: _Event | None = None
    for e in events:
        if e.kind != "op":
            span = e
            tokens[e.phase] += e.tokens if e.kind == "forward" else 0
            add(e, "python" if e.kind == "forward" else "sample", e.us)
            continue
        if e.bucket is None:
            continue
        inside = span is not None and e.start < span.start + span.us - NANOSECOND
        if span is None or not inside or span.kind == "forward":
            add(e, e.bucket, e.us)
            if span is not None and inside:
                add(span, "python", -e.us, 0)
    order = sorted(sums, key=lambda name: (name not in PHASES, PHASES.index(name) if name in PHASES else 0))
    return [
        Phase(name, tokens[name], sum(b.us for b in found), sorted(found, key=lambda b: (-b.us, b.name)))
        for name in order
        if (found := list(sums[name].values()))
    ]


def _ops(events: Sequence[_Event]) -> list[Op]:
    ops: dict[str, Op] = {}
    for e in events:
        if e.leaf:
            op = ops.setdefault(e.name, Op(e.name, e.bucket))
            op.us += e.us
            op.calls[e.phase] += 1
    return sorted(ops.values(), key=lambda op: (-op.us, op.label))


def _steps(decoded: Sequence[_Event]) -> list[Step]:
    found = sorted((e.before + e.tokens, e.tokens / max(e.us, NANOSECOND) * 1e6) for e in decoded)
    width = min(max(9, len(found) // 20), 65)
    middle = running_median([rate for _, rate in found], width)
    return [Step(context, rate, m) for (context, rate), m in zip(found, middle, strict=True)]


def running_median(values: Sequence[float], width: int) -> list[float]:
    """The median of the `width` values around each, of fewer at both ends."""
    half = width // 2
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def spans(steps: Sequence[Step], most: int) -> list[Span]:
    """Steps in up to `most` groups of about the same size."""
    n = min(most, len(steps))
    groups = [steps[i * len(steps) // n : (i + 1) * len(steps) // n] for i in range(n)]
    rates = [[s.rate for s in group] for group in groups]
    return [
        Span(group[0].context, group[-1].context, median(r), min(r), max(r))
        for group, r in zip(groups, rates, strict=True)
    ]


def _slowest(events: Sequence[_Event], zero: float) -> list[Slow]:
    """Of the same op in the same phase the OF_A_KIND slowest: it may be slow each time."""
    alike: dict[tuple[str, str], list[_Event]] = defaultdict(list)
    for e in events:
        if e.leaf:
            alike[e.name, e.phase].append(e)
    usual = {kind: median(e.us for e in found) for kind, found in alike.items()}
    worst = [e for found in alike.values() for e in nlargest(OF_A_KIND, found, key=lambda e: e.us)]
    return [
        Slow(
            *(e.name, e.bucket, e.phase, e.layer, e.shapes, e.us),
            median_us=usual[e.name, e.phase],
            at_ms=(e.start - zero) / 1e3,
        )
        for e in nlargest(SLOWEST, worst, key=lambda e: e.us)
    ]


def _downgrades(notes: Sequence[Mapping[str, Any]], zero: float) -> list[Downgrade]:
    """Those that say the same of other layers, or say it again, once."""
    alike: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for note in notes:
        alike[str(note.get("requested")), str(note.get("used")), str(note.get("reason"))].append(note)
    return [
        Downgrade(*key, _layers(found), len(found), (min(n["ts"] for n in found) - zero) / 1e3)
        for key, found in alike.items()
    ]


def _layers(notes: Sequence[Mapping[str, Any]]) -> str:
    """ "0 to 29" where they follow each other."""
    found = sorted({n["layer"] for n in notes if isinstance(n.get("layer"), int)})
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))

"""Where the time of a run goes, by phase of a forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..backend.tracing import Call, Observer, Span

BUCKETS = (
    *("embed", "norm", "qkv", "rope", "attn.kvcache", "attn.fused_compute", "attn.fused_copy"),
    *("o_proj", "mlp", "head", "sample", "python"),
)
BY_OP = {
    "gather_rows": "embed",
    "rms_norm": "norm",
    "rms_norm_heads": "norm",
    "apply_rope": "rope",
    "rope_tables": "rope",
    "kv_write": "attn.kvcache",
    "narrow_f16": "attn.kvcache",
    "concat_dim0": "attn.fused_copy",
    "fused_attention": "attn.fused_compute",
    "batched_attention": "attn.fused_compute",
    "swiglu": "mlp",
    "copy_rows_2d": "head",
    "softmax_rows": "sample",
}
MOST_WAITING = 256  # replayed tokens
BY_WEIGHT = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "attn_output": "o_proj"}


def bucket(call: Call) -> str:
    """The bucket of an outer call."""
    if not call.op.startswith("matmul"):
        return BY_OP.get(call.op, "python")
    weight = call.weights[0].short if call.weights else ""
    return BY_WEIGHT.get(weight) or ("mlp" if weight.startswith("ffn_") else "head")


class PhaseProfile(Observer):
    """Calls and time by phase and bucket, taken on the thread that runs the model.

    `calls` and `ns` are by (phase, bucket), phase "prefill" or "decode". "python" is what a forward takes
    beyond its ops, "sample" all that picking a token takes.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], int] = defaultdict(int)
        self._ns: dict[tuple[str, str], int] = defaultdict(int)
        self._inside = 0  # of a span, what its ops took
        self._calls_of: Sequence[Call] = ()  # of the replays that wait to be added up
        self._waiting: list[NDArray[np.int64]] = []

    @property
    def calls(self) -> dict[tuple[str, str], int]:
        self._add_up()
        return self._calls

    @property
    def ns(self) -> dict[tuple[str, str], int]:
        self._add_up()
        return self._ns

    def call(self, call: Call) -> None:
        if call.outer and call.phase:
            took, name = call.end - call.start, bucket(call)
            self._inside += took
            if name != "sample":
                self._add(call.phase, name, 1, took)

    def replayed(self, calls: Sequence[Call], times: NDArray[np.int64]) -> None:
        if self._calls_of is not calls or len(self._waiting) == MOST_WAITING:
            self._add_up()
            self._calls_of = calls
        self._waiting.append(times)

    def _add_up(self) -> None:
        """The tokens that wait: not one by one, since a token of a small model takes some milliseconds."""
        if not self._waiting:
            return
        took = np.diff(np.stack(self._waiting))[..., 0].sum(axis=0).tolist()
        for call, ns in zip(self._calls_of, took, strict=True):
            self._add("decode", bucket(call), len(self._waiting), ns)
        self._add("decode", "python", 0, -sum(took))
        self._waiting.clear()

    def span(self, span: Span) -> None:
        took = span.end - span.start
        if span.kind == "sample":
            self._add(span.phase, "sample", 1, took)
        else:
            self._add(span.phase, "python", 1, took - self._inside)
        self._inside = 0

    def _add(self, phase: str, name: str, calls: int, ns: int) -> None:
        self._calls[phase, name] += calls
        self._ns[phase, name] += ns

    def report(self) -> str:
        """A table: for each phase and bucket calls, milliseconds, and the share of the phase."""
        phases = [p for p in ("prefill", "decode") if any(q == p for q, _ in self.ns)]
        lines = ["profile:"]
        lines.append(f"  {'':<20}" + "".join(f"{p + ' calls':>15}{'ms':>11}{'share':>8}" for p in phases))
        total = {p: sum(ns for (q, _), ns in self.ns.items() if q == p) for p in phases}
        for name in BUCKETS:
            if any((p, name) in self.ns for p in phases):
                cells = [(self.calls[p, name], self.ns[p, name], total[p]) for p in phases]
                lines.append(f"  {name:<20}" + "".join(_cell(n, ns, ns / all_ns) for n, ns, all_ns in cells))
        whole = [_cell(sum(n for (q, _), n in self.calls.items() if q == p), total[p], 1) for p in phases]
        return "\n".join([*lines, f"  {'total':<20}" + "".join(whole)])


def _cell(calls: int, ns: int, share: float) -> str:
    return f"{calls:>15,}{ns / 1e6:>11,.2f}{share:>8.1%}"

"""Two runs held against each other: where their bytes part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ..backend.tracing import Call, Observer, Span, TracingBackend
from ..errors import InputError
from .work import kernels

MOVES = {
    "kv_write",
    "concat_dim0",
    "narrow_f16",
    "copy_rows_2d",
    "rope_tables",
}  # outer ops that compute no row of a token
HASH_BYTES = 8
Point = tuple[int | None, str, str]  # layer, label, kernels


class OpRecord(Observer):
    """A hash of what each op of the model gave for each token.

    Only ops that a model file calls are points of a record, not what they are made of: so runs compare
    whatever the backend, its fusions, the chunks and the cache. `points` has (layer, label, kernels) of each,
    in order, `positions` for each token their hashes in hexadecimal, one after the other. A token that runs
    again replaces what was recorded.
    """

    replays, results = False, True

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.positions: list[str] = []
        self._found: list[tuple[Point, list[str]]] = []

    def attached(self, ops: TracingBackend) -> None:
        self.ops, self.table = ops, ops.kernels()

    def call(self, call: Call) -> None:
        if not call.outer or call.op in MOVES:
            return
        several = isinstance(call.result, list)
        names = [f"{call.op} {w.short}" for w in call.weights] if several else [call.label]
        used = kernels(call, self.table)
        for name, x in zip(names, call.result if several else [call.result], strict=True):
            rows = [
                hashlib.blake2b(row.tobytes(), digest_size=HASH_BYTES).hexdigest()
                for row in self.ops.numpy(x)
            ]
            self._found.append(((call.layer, name, used), rows))

    def span(self, span: Span) -> None:
        found, self._found = self._found, []
        if span.kind != "forward" or not found:
            return
        self.points = [point for point, _ in found]
        del self.positions[span.before :]
        self.positions += ["".join(rows[t] for _, rows in found) for t in range(span.tokens)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `compare` reads it."""
        return {
            "backend": self.ops.name,
            "points": [list(p) for p in self.points],
            "positions": self.positions,
        }


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What differs between two digests (`Model.digest`), in lines; none if their logits are the same.

    Where both hold a record, the first position, layer and op that gave other bytes are named. Raises
    InputError for what is no digest.
    """
    _check("A", a)
    _check("B", b)
    lines = [
        f"{what}: {a[key]} and {b[key]}"
        for key, what in (
            ("numerics", "versions of the numerics differ"),
            ("model_sha256", "the models differ"),
        )
        if a[key] != b[key]
    ]
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a["tokens"], b["tokens"], strict=False))
    )
    if a["tokens"] != b["tokens"]:
        ends = [str(d["tokens"][same]) if same < len(d["tokens"]) else "the end" for d in (a, b)]
        lines.append(f"the tokens part at position {same}: {ends[0]} and {ends[1]}")
    if a["logits_sha256"] != b["logits_sha256"]:
        lines.append(f"the logits differ: {a['logits_sha256'][:16]} and {b['logits_sha256'][:16]}")
    if "record" in a and "record" in b:
        lines += _ops(a["record"], b["record"], same)
    elif lines:
        lines.append("which op is the first to differ: record both runs with --record ops")
    return lines


def _ops(a: Mapping[str, Any], b: Mapping[str, Any], same: int) -> Iterator[str]:
    """Of the tokens that both runs have, up to position `same`."""
    for i, (p, q) in enumerate(zip(a["points"], b["points"], strict=False)):
        if p[:2] != q[:2]:
            yield f"the models run other ops: op {i} is {_point(p)} and {_point(q)}"
            return
    width = 2 * HASH_BYTES
    for t, (p, q) in enumerate(zip(a["positions"][:same], b["positions"][:same], strict=False)):
        parted = [
            i
            for i in range(len(a["points"]))
            if p[i * width : (i + 1) * width] != q[i * width : (i + 1) * width]
        ]
        if parted:
            i = parted[0]
            yield f"bytes part first at position {t}, {_point(a['points'][i])}"
            yield f"  kernels: {_kernels(a, i)}, and {_kernels(b, i)}"
            yield f"  from there on {len(parted)} of {len(a['points'])} ops differ at this position"
            return
    both = min(same, len(a["positions"]), len(b["positions"]))
    yield f"all ops gave the same bytes at the {both} positions of both"


def _point(point: Sequence[Any]) -> str:
    layer, label, _ = point
    return f"layer {layer}, op {label}" if layer is not None else f"op {label}"


def _kernels(record: Mapping[str, Any], i: int) -> str:
    return f"{record['points'][i][2] or 'no kernel table'} ({record['backend']})"


def _check(which: str, digest: Mapping[str, Any]) -> None:
    kinds = {"numerics": int, "model_sha256": str, "tokens": list, "logits_sha256": str}
    for key, kind in kinds.items():
        if not isinstance(digest, Mapping) or not isinstance(digest.get(key), kind):
            raise InputError(
                f"{which} is no digest: {key} is missing or no {kind.__name__}; `pyinfer digest` makes one"
            )
    if "record" not in digest:
        return
    record = digest["record"]
    try:
        width = 2 * HASH_BYTES * len(record["points"])
        whole = all(len(p) == 3 and isinstance(p[1], str) for p in record["points"])
        whole = whole and all(isinstance(p, str) and len(p) == width for p in record["positions"])
        whole = whole and isinstance(record["backend"], str)
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise InputError(
            f"the record of {which} is not whole: make it again with `pyinfer digest --record ops`"
        )

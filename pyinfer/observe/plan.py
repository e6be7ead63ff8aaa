"""A forward pass as the ops that it will run, with their shapes and kernels; nothing is run or loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import cache
from ..backend.base import Backend
from ..backend.kv import KVBufferView
from ..backend.tracing import OPS, Call, Observer, Span, watched
from ..gguf_file import GGUFFile
from ..model import registry
from ..model.config import Config
from .calls import shapes
from .work import kernels

F32: np.dtype[Any] = np.dtype(np.float32)
F16: np.dtype[Any] = np.dtype(np.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """A tensor or weight of which only this is known."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = F32


def _rows(x: Shape, *_: Any) -> Shape:
    return Shape(x.shape)


RULES: dict[str, Callable[..., Any]] = {
    "matmul": lambda a, b: Shape((a.shape[0], b.shape[0 if isinstance(b, Matrix) else 1])),
    "gather_rows": lambda w, ids: Shape((len(ids), w.shape[1])),
    "transpose_2d": lambda x: Shape(x.shape[::-1]),
    "softmax_rows": _rows,
    "scale": lambda x, factor, divide=False: Shape(x.shape),
    "add": _rows,
    "hadamard": _rows,
    "add_scalar": _rows,
    "rsqrt_elem": _rows,
    "silu": _rows,
    "sum_squares_axis": lambda x: Shape((x.shape[0], 1)),
    "broadcast_row_scalars": lambda x, cols: Shape((x.shape[0], cols)),
    "repeat_row_as_matrix": lambda x, rows: Shape((rows, x.shape[1])),
    "reshape_data": lambda x, shape: Shape(tuple(shape)),
    "copy_2d_from_cols": lambda x, cols, first: Shape((x.shape[0], cols)),
    "copy_2d_into_cols": lambda out, x, first: None,
    "copy_rows_2d": lambda x, first, rows: Shape((rows, *x.shape[1:])),
    "concat_dim0": lambda a, b: Shape((a.shape[0] + b.shape[0], *a.shape[1:]), a.dtype),
    "narrow_f16": lambda x: Shape(x.shape, F16),
    "rope_tables": lambda first, n, rot, *_: (Shape((n, rot // 2)), Shape((n, rot // 2))),
    "apply_rope": lambda x, cos, sin, first, head_dim, neox: Shape(x.shape),
    "matmul_many": lambda x, weights: [Shape((x.shape[0], w.shape[0])) for w in weights],
    "matmul_add": lambda x, w, residual: Shape(residual.shape),
    "rms_norm": lambda x, weight, eps: Shape(x.shape),
    "rms_norm_heads": lambda x, weight, eps: Shape(x.shape),
    "swiglu": _rows,
    "fused_attention": lambda q, view, n_heads, scale: Shape(q.shape),
    "batched_attention": lambda q, views, tokens, n_heads, scale: Shape(q.shape),
}


class Matrix(Shape):
    """A weight."""


class ShapesBackend(Backend):
    """Ops that only say what shape comes out; `like` makes one that has the overrides of another backend."""

    @classmethod
    def like(cls, backend: Backend) -> Backend:
        own = {}
        for op in OPS:
            if op in RULES and getattr(type(backend), op) is not getattr(Backend, op):
                own[op] = _op(RULES[op])
        made: ShapesBackend = type("ShapesBackend", (cls,), own)()
        made.name, made.threads, made.table = backend.name, backend.threads, backend.kernels()
        return made

    table: dict[str, str]

    def tensor(self, array: NDArray[Any]) -> Shape:
        return Shape(array.shape)

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> Shape:
        return Shape(tuple(shape), F16 if dtype == "f16" else F32)

    def part(self, x: Shape, index: tuple[int, ...], shape: tuple[int, ...]) -> Shape:
        return Shape(tuple(shape), x.dtype)

    def numpy(self, x: Shape) -> NDArray[Any]:
        raise TypeError("a shape has no values")

    def weight(self, type: int, rows: int, cols: int, data: Any, *, pack: bool = True) -> Shape:
        return Matrix((rows, cols))

    def kernels(self) -> dict[str, str]:
        return self.table

    def kv_rows(self, view: KVBufferView) -> tuple[Shape, Shape]:
        rows = Shape((view.length - view.first, view.n_kv_heads * view.head_dim))
        return rows, rows

    def kv_write(self, view: KVBufferView, k: Shape, v: Shape) -> None:
        view.length += k.shape[0]


def _op(rule: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Backend, *args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs)

    return run


for _name in OPS:
    if getattr(getattr(Backend, _name), "__isabstractmethod__", False):
        setattr(ShapesBackend, _name, _op(RULES[_name]))
ShapesBackend.__abstractmethods__ = frozenset()


class _Forwards(Observer):
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.forwards: list[tuple[Span, list[Call]]] = []

    def call(self, call: Call) -> None:
        self.calls.append(call)

    def span(self, span: Span) -> None:
        self.forwards.append((span, self.calls))
        self.calls = []


def plan(
    file: GGUFFile, like: Backend, *, prompt: int, kv: str = "positional", kv_dtype: str = "f16", n_ctx: int
) -> list[str]:
    """The prefill of a prompt of so many tokens and the step after it, in lines, as backend `like` would run
    them: an op's name and weights, the shapes that go in and come out, its kernels and their levels. Layers
    that are alike are written once; ops that a default is made of are indented, and counted.

    Raises ModelError, InputError, ContextOverflowError.
    """
    config = Config.from_gguf(file)
    cache.check(kv, config, kv_dtype)
    config.check_ctx(n_ctx)
    seen = _Forwards()
    ops = watched(ShapesBackend.like(like), [seen])
    decoder = registry.load(file, ops, config=config, pack=False)
    held = cache.create(kv, ops, config, n_ctx, kv_dtype)
    for phase, n in (("prefill", prompt), ("decode", 1)):
        before = held.length
        held.reserve(n)
        with ops.span("forward", phase, n, before):
            decoder.forward([0] * n, held)
    name = file.metadata.get("general.name", file.path.stem)
    lines = [
        f"{name}: {config.arch}, {config.n_layers} layers; backend {like.name}; kv cache {kv}, {kv_dtype}"
    ]
    for span, calls in seen.forwards:
        lines += ["", f"{span.phase} of {span.tokens} behind {span.before}"]
        lines += _forward(calls, ops.kernels())
    return lines


def _forward(calls: Sequence[Call], table: dict[str, str]) -> Iterator[str]:
    """Blocks of a forward, each a layer or what stands outside of them; layers that are alike, once."""
    blocks: list[tuple[int | None, tuple[str, ...]]] = []
    for layer, found in groupby(calls, key=lambda c: c.layer):
        blocks.append((layer, tuple(_ops(list(found), table))))
    alike: dict[tuple[str, ...], list[int]] = {}
    for layer, lines in blocks:
        if layer is not None:
            alike.setdefault(lines, []).append(layer)
    for layer, lines in blocks:
        if layer is None:
            yield from (f"  {line}" for line in lines)
        elif alike[lines][0] == layer:
            yield f"  layers {_ranges(alike[lines])}"
            yield from (f"    {line}" for line in lines)


def _ops(calls: Sequence[Call], table: dict[str, str]) -> Iterator[str]:
    """A line for each outer op; under one that is made of others (they come before it), those, counted."""
    parts: dict[str, int] = {}
    for call in calls:
        types = " ".join(dict.fromkeys(w.type for w in call.weights))
        line = "  ".join(part for part in (call.label, shapes(call), types, kernels(call, table)) if part)
        if call.outer:
            yield line
            for part, n in parts.items():
                yield f"  {n} x {part}"
            parts = {}
        elif call.leaf:
            parts[line] = parts.get(line, 0) + 1


def _ranges(numbers: Sequence[int]) -> str:
    """0 1 2 5: "0-2, 5"."""
    found = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *rest = [n for _, n in run]
        found.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    return ", ".join(found)

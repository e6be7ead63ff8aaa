"""The ops a model is written in: primitives, and coarse ops whose defaults are made of primitives.

A backend that has the primitives is right; overriding a coarse op (a fusion) may change its speed and nothing
else. Tensors and weights are the backend's own handles: a tensor has a `shape`, `numpy()` shows its values.
Shapes below are (rows, columns). What each op computes, to the bit, is in csrc/NUMERICS.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import kv
from .kv import KVBufferView

Tensor = Any
Weight = Any


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

    # ---- storage -------------------------------------------------------------------------------------------

    @abstractmethod
    def tensor(self, array: NDArray[Any]) -> Tensor:
        """A tensor with a copy of `array` (float32 or float16)."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> Tensor:
        """A tensor of zeros; the memory is only claimed when touched."""

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

        The default is the per-head loop; a mask is a loop bound.
        """
        tokens, dim, group = q.shape[0], view.head_dim, n_heads // view.n_kv_heads
        keys, values = self.kv_rows(view)
        out = None
        for t in range(tokens):
            first, end = (at - view.first for at in view.sees(tokens, t))
            whole = tokens == 1 and first == 0
            q_t = q if tokens == 1 else self.copy_rows_2d(q, t, 1)
            k_t = keys if whole else self.copy_rows_2d(keys, first, end - first)
            v_t = values if whole else self.copy_rows_2d(values, first, end - first)
            row = self.zeros((1, n_heads * dim))
            for h in range(n_heads):
                kv = h // group * dim
                q_h = self.copy_2d_from_cols(q_t, dim, h * dim)
                k_h = self.copy_2d_from_cols(k_t, dim, kv)
                v_h = self.copy_2d_from_cols(v_t, dim, kv)
                scores = self.scale(self.matmul(q_h, self.transpose_2d(k_h)), scale)
                context = self.matmul(self.softmax_rows(scores), v_h)
                self.copy_2d_into_cols(row, context, h * dim)
            out = row if out is None else self.concat_dim0(out, row)
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
        """Writes rows k and v (tokens, n_kv_heads * head_dim) behind the view's length, and moves it on."""
        heads = (-1, view.n_kv_heads, view.head_dim)
        for k_row, v_row in zip(*(self.numpy(x).reshape(heads) for x in (k, v)), strict=True):
            b, at = divmod(view.length, view.block)
            kv.write(view, self.numpy(view.k[b]), self.numpy(view.v[b]), at, k_row, v_row)
            view.length += 1


def unfused(backend: Backend, *ops: str) -> Backend:
    """The same backend with the named coarse ops run by their defaults."""
    cls = type(backend)
    plain = type(cls.__name__, (cls,), {op: getattr(Backend, op) for op in ops})
    twin: Backend = object.__new__(plain)
    twin.__dict__.update(backend.__dict__)
    return twin

"""Picking a token from logits, the same one everywhere.

In order: repeat penalty, top-k, top-p, min-p, temperature, one draw. Greedy is temperature 0: the largest
logit, ties to the lowest id. Probabilities are the engine's own softmax (csrc/NUMERICS.md), their running sum
is float64 from the largest down, and the draws are Python's `random.Random(seed).random()`, a stream that is
fixed across versions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .backend.base import Backend
from .errors import InputError, NonFiniteLogitsError

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to pick: what each field's neutral value is, is its default. Raises InputError for one out of
    range.
    """

    temperature: float = 0.0
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the likeliest until their probabilities reach this
    min_p: float = 0.0  # drop what is less likely than this share of the likeliest
    repeat_penalty: float = 1.0  # over all tokens so far: divides positive logits, multiplies negative ones
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 1e6),
            ("top_k", 0, 1 << 31),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repeat_penalty", 1e-3, 1e6),
            ("seed", 0, 1 << 64),
        ):
            value = getattr(self, name)
            whole = name in ("top_k", "seed")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise InputError(f"{name}={value!r}: give a {'whole ' if whole else ''}number")
            if not low <= value <= high or (value == 0 and name == "top_p"):
                above = "above" if name == "top_p" else "at least"
                raise InputError(f"{name}={value!r}: give a number {above} {low:g} and at most {high:g}")


class Sampler:
    """Draws tokens for one sequence; `history` is every token so far, the prompt's included."""

    def __init__(self, ops: Backend, how: Sampling, history: Sequence[int]) -> None:
        self.ops, self.how = ops, how
        self.random = random.Random(how.seed)
        self.seen = set(history)

    def pick(self, logits: F32) -> int:
        """A token id, from logits (n_vocab,). Raises NonFiniteLogitsError."""
        if not np.isfinite(logits).all():
            bad = int(np.flatnonzero(~np.isfinite(logits))[0])
            raise NonFiniteLogitsError(
                f"the logit of token {bad} is {logits[bad]}: the weights or the input hold no number"
            )
        how = self.how
        if how.repeat_penalty != 1.0:
            logits = self._penalised(logits)
        token = int(logits.argmax()) if how.temperature == 0 else self._draw(logits)
        self.seen.add(token)
        return token

    def logprob(self, logits: F32, token: int) -> float:
        """The natural log of the token's probability under the model itself (temperature 1, nothing
        filtered).
        """
        p = float(self._softmax(logits)[token])
        return math.log(p) if p > 0 else -math.inf

    def _softmax(self, logits: F32) -> F32:
        out: F32 = self.ops.numpy(self.ops.softmax_rows(self.ops.tensor(logits[None])))[0]
        return out

    def _penalised(self, logits: F32) -> F32:
        logits, ids = logits.copy(), np.fromiter(self.seen, np.int64)
        penalty, seen = np.float32(self.how.repeat_penalty), logits[ids]
        with np.errstate(over="ignore"):
            logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        return logits

    def _draw(self, logits: F32) -> int:
        how, n = self.how, len(logits)
        ids = _largest(logits, min(how.top_k or n, n))
        if how.top_p < 1.0 or how.min_p > 0.0:
            p = self._softmax(logits[ids]).astype(np.float64)
            # At least the likeliest stays. cumsum is one running sum, in order.
            reached = np.cumsum(p) - p >= how.top_p
            keep = ~(reached | (p < how.min_p * p[0]))
            ids = ids[keep]
        with np.errstate(all="ignore"):
            colder = logits[ids] / np.float32(how.temperature)
        if not np.isfinite(colder[0]):  # so cold that the limit is meant, which is greedy
            return int(ids[0])
        p = self._softmax(colder).astype(np.float64)
        total = np.cumsum(p)
        return int(
            ids[
                min(int(np.searchsorted(total, self.random.random() * total[-1], side="right")), len(ids) - 1)
            ]
        )


def _largest(logits: F32, k: int) -> NDArray[np.int64]:
    """Ids of the k largest logits, largest first, ties to the lowest id."""
    if k < len(logits):
        kth = np.partition(logits, len(logits) - k)[len(logits) - k]
        ids = np.flatnonzero(logits >= kth)
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")][:k]

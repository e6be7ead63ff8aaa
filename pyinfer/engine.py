"""Token ids in, token ids out: a sequence over a decoder and its cache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from . import cache
from .backend.base import Replay
from .cache.base import check_count
from .errors import ContextOverflowError, InputError
from .model.registry import Decoder
from .sampling import Sampler, Sampling

PREFILL_CHUNK = 512  # tokens of a prompt run at once unless told; bounds the memory of a forward


class Session:
    """One sequence: the tokens run so far, as the cache holds them.

    chunk: tokens run at once. Raises InputError, also for a cache that was made for a model of another shape.
    """

    def __init__(self, decoder: Decoder, kv: cache.Cache, *, chunk: int | None = None) -> None:
        if chunk is not None:
            check_count("chunk", chunk, 1)
        has, wants = (
            f"{c.n_layers} layers of {c.n_kv_heads} KV heads of {c.head_dim}"
            for c in (kv.config, decoder.config)
        )
        if has != wants:
            raise InputError(
                f"the cache is for {has}, the model has {wants}: make it with the model's config"
            )
        self.decoder, self.cache, self.chunk = decoder, kv, chunk or PREFILL_CHUNK
        self.step: Replay | None = None  # a forward of one token

    def run(self, tokens: Sequence[int], *, all_logits: bool = False) -> Iterator[NDArray[np.float32]]:
        """Runs tokens in chunks; yields logits (chunk, n_vocab) of each, or only (1, n_vocab) of the very
        last token.

        Raises ContextOverflowError or CacheFullError before anything is computed. A run that breaks off, by
        an error or an interrupt, leaves the cache as after the last whole chunk. Over a read-only cache all
        tokens run at once, and are forgotten.
        """
        kv = self.cache
        chunk = max(1, len(tokens)) if kv.frozen else self.chunk
        kv.reserve(len(tokens), chunk)
        phase = "prefill" if len(tokens) > 1 or not kv.length else "decode"
        for at in range(0, len(tokens), chunk):
            part, before = tokens[at : at + chunk], kv.length
            try:
                if at:
                    kv.reserve(len(part))
                with self.decoder.ops.span("forward", phase, len(part), before):
                    logits = self._forward(part, all_logits)
            except BaseException:
                kv.truncate(before)
                raise
            if all_logits or at + chunk >= len(tokens):
                yield logits

    def _forward(self, tokens: Sequence[int], all_logits: bool) -> NDArray[np.float32]:
        decoder, kv = self.decoder, self.cache
        if len(tokens) > 1 or kv.views is None:
            return decoder.ops.numpy(decoder.forward(tokens, kv, last_only=not all_logits))
        if self.step is not None and kv.length < self.step.positions:
            return self.step.run(tokens)
        logits, self.step = decoder.ops.capture(lambda: decoder.forward(tokens, kv), kv.views)
        return decoder.ops.numpy(logits)


def generate(
    session: Session,
    prompt: Sequence[int],
    max_tokens: int,
    how: Sampling,
    forward_ms: list[float],
    *,
    logprobs: bool = False,
) -> Iterator[tuple[int, float | None]]:
    """Yields (token, logprob) until max_tokens or until the context is full; the caller stops it sooner.

    forward_ms grows by the milliseconds of each forward, the whole prompt's first.
    """
    _check_that_it_grows(session, max_tokens - 1)
    sampler = Sampler(session.decoder.ops, how, prompt)
    run: Sequence[int] = prompt
    for left in range(max_tokens, 0, -1):
        start = time.perf_counter()
        (logits,) = session.run(run)
        forward_ms.append((time.perf_counter() - start) * 1e3)
        with session.decoder.ops.span("sample", "prefill" if run is prompt else "decode"):
            token = sampler.pick(logits[0])
            logprob = sampler.logprob(logits[0], token) if logprobs else None
        yield token, logprob
        run = [token]
        if left > 1 and session.cache.length + 1 > session.cache.capacity:
            return


def digest(session: Session, prompt: Sequence[int], n: int) -> tuple[list[int], str]:
    """Greedy tokens, prompt included, and one sha256 over the little-endian float32 logits of every position
    of them.
    """
    sha, tokens = hashlib.sha256(), list(prompt)
    sampler = Sampler(session.decoder.ops, Sampling(), prompt)
    run: Sequence[int] = prompt
    _check_that_it_grows(session, n)
    if len(prompt) + n > session.cache.capacity:
        raise ContextOverflowError(
            f"a prompt of {len(prompt)} tokens and {n} more do not fit into {session.cache.capacity}; "
            "give fewer, or a larger ctx"
        )
    for step in range(n + 1):
        for logits in session.run(run, all_logits=True):
            sha.update(np.ascontiguousarray(logits, "<f4").data)
            last = logits[-1]
        if step < n:
            with session.decoder.ops.span("sample", "decode" if step else "prefill"):
                run = [sampler.pick(last)]
            tokens += run
    return tokens, sha.hexdigest()


def _check_that_it_grows(session: Session, steps: int) -> None:
    if steps and session.cache.frozen:
        raise InputError("a read-only KV cache takes no tokens in, so nothing can be generated over it")


def check_tokens(tokens: Sequence[int], n_vocab: int) -> list[int]:
    """The ids as plain ints. Raises InputError for none at all, or one that is no token."""
    if not isinstance(tokens, (Sequence, np.ndarray)) or isinstance(tokens, (bytes, bytearray)):
        raise InputError(f"a prompt is a str or a sequence of token ids, not {type(tokens).__name__}")
    ids = []
    for i, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < n_vocab:
            raise InputError(
                f"tokens[{i}] is {token!r}; a token id is a whole number from 0 to {n_vocab - 1}"
            )
        ids.append(int(token))
    if not ids:
        raise InputError("there are no tokens to run; give at least one, or some text")
    return ids

"""What a user holds: a loaded model, text or token ids in, text, tokens or logits out."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import NUMERICS, backend, cache, engine, memory
from .backend.tracing import Observer, TracingBackend, watched
from .cache.base import check_count
from .errors import ClosedError, ContextOverflowError, InputError, ModelError
from .fetch import resolve
from .gguf_file import GGUFFile
from .model import registry
from .model.config import Config
from .sampling import Sampling
from .schedule import AttentionSchedulePolicy, Schedule, policy_of
from .textstream import TextStream
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .chat import ChatTemplate

Prompt: TypeAlias = "str | Sequence[int]"
DEFAULT_CONTEXT = 8192  # tokens at most unless told: models say 131,072 and more


@dataclass(frozen=True, slots=True)
class Chunk:
    """A step of a stream. `text` is what may be shown now: it can lag behind `token`, which is None in a last
    chunk that only brings held-back text. `logprob` is the natural log of the token's probability under the
    model. `finish_reason` is None but in the last chunk: "stop" (the model ended, or a stop string came) or
    "length" (max_tokens, or the context is full).
    """

    text: str
    token: int | None
    logprob: float | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer: its text, the tokens generated (an end-of-text token included), why it ended, and how
    fast it was.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    metrics: Metrics


@dataclass(slots=True)
class Metrics:
    """Times of one generation, in milliseconds; `per_forward_ms` has the prompt's first."""

    n_prompt_tokens: int
    per_forward_ms: list[float] = field(default_factory=list)

    @property
    def time_to_first_token_ms(self) -> float | None:
        return self.per_forward_ms[0] if self.per_forward_ms else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """(n - 1) / (sum of forwards - first); None below two forwards."""
        rest = sum(self.per_forward_ms[1:])
        return (len(self.per_forward_ms) - 1) / rest * 1e3 if rest else None


def load(
    model: str | os.PathLike[str] = "smollm2",
    *,
    backend: str = "auto",
    threads: int | None = None,
    kv: str = "positional",
    kv_dtype: str = "f16",
    ctx: int | None = None,
    chunk: int | None = None,
    pack: bool = True,
    progress: bool = True,
    schedule: Schedule | None = None,
    attention_policy: str | AttentionSchedulePolicy = "auto",
    unfused: str | Sequence[str] = (),
    observers: Sequence[Observer] = (),
) -> Model:
    """Loads a model: "smollm2", a path to a .gguf file, or "hf:OWNER/REPO[:QUANT or FILE]".

    backend, threads   see `pyinfer.backends()`; threads None: one per physical core
    kv, kv_dtype       "positional", "paged", "append", or "sliding:N": a token sees itself and N - 1 before;
                       "f16", "f32", or "q8_0", which append does not store
    ctx                tokens the context holds; None: what the model was trained for, at most 8,192
    chunk              tokens of a prompt run at once; None: 512
    pack               copy the weights into the layout that kernels read; False: run from the mapped file,
                       slower, in less memory: the weights then are the system's file cache
    progress           show bars on stderr for what takes long
    schedule           for experiments, pyinfer.schedule.Inline() or Pool(n): on how many threads attention
                       runs; None: on all of the backend's
    attention_policy   for experiments, what a thread takes at a time of attention: "auto", "sequential",
                       "per-head", "per-kv-group", "split", or an AttentionSchedulePolicy. What cannot be had
                       is logged, as pyinfer.schedule.ScheduleDowngraded
    unfused            for experiments, coarse ops to be run by their defaults, of primitive ops; "all": all
    observers          who is told of each op, see pyinfer.observe; closed with the model. Where the logger
                       pyinfer.ops is set to level 5 (TRACE), a CallLog is added

    Of all these only the model, kv_dtype and a sliding window move a logit. Raises FetchError, ModelError,
    BackendError, InputError, OutOfMemoryError for a cache that this machine cannot hold.
    """
    if schedule is not None and not isinstance(schedule, Schedule):
        raise InputError(f"schedule={schedule!r}: give pyinfer.schedule.Inline() or Pool(n)")
    policy = policy_of(attention_policy)
    path = resolve(model, progress=progress)
    return Model(
        *(path, backend, threads, kv, kv_dtype, ctx, chunk, pack, progress, schedule, policy),
        *((unfused,) if isinstance(unfused, str) else unfused, observers),
    )


class Model:
    """A model, ready to run. Made by `load`; a context manager. Used after `close`, it raises ClosedError."""

    def __init__(
        self,
        path: Path,
        backend_name: str,
        threads: int | None,
        kv: str,
        kv_dtype: str,
        ctx: int | None,
        chunk: int | None,
        pack: bool,
        progress: bool,
        schedule: Schedule | None,
        policy: AttentionSchedulePolicy,
        unfused: Sequence[str],
        observers: Sequence[Observer],
    ) -> None:
        _check_counts(ctx=ctx, chunk=chunk)
        if not isinstance(pack, bool):
            raise InputError(f"pack={pack!r}: give True or False")
        ops = backend.create(backend_name, threads).scheduled(schedule, policy)
        self._ops = _watched(backend.unfused(ops, *unfused) if unfused else ops, observers)
        self._file = GGUFFile(path)
        try:
            self.config = Config.from_gguf(self._file)
            if ctx is not None:
                self.config.check_ctx(ctx)
            self.path, self.kv, self.kv_dtype, self._chunk = path, kv, kv_dtype, chunk
            self.n_ctx = ctx or min(self.config.n_ctx_train, DEFAULT_CONTEXT)
            self.metrics: Metrics | None = None
            cache.check(kv, self.config, kv_dtype)
            self._check_memory(pack)
            # First, since what its making takes for a while shall not come on top of the weights.
            try:
                self.tokenizer = Tokenizer.from_gguf(self._file.metadata)
            except ModelError as error:
                raise ModelError(f"{path}: {error}") from None
            memory.trim()
            self._decoder = registry.load(
                self._file, self._ops, config=self.config, pack=pack, progress=progress
            )
        except BaseException:
            self._file.close()
            raise
        self._closed = False
        self._watching = None
        if isinstance(self._ops, TracingBackend):
            self._ops.loaded(self.describe())
            self._watching = weakref.finalize(self, self._ops.close)  # at exit too, for who does not close

    @property
    def backend(self) -> str:
        """The name of the backend that runs the model."""
        self._open()
        return self._ops.name

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own chat template, or None if its file has none.

        Raises ChatError for one that cannot be used, with the reason; ClosedError.
        """
        from .chat import KEY, ChatTemplate  # jinja2, which nothing else needs

        metadata = self._open().metadata
        return ChatTemplate.from_gguf(metadata) if KEY in metadata else None

    def generate(
        self, prompt: Prompt, *, max_tokens: int = 128, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Generation:
        """The whole answer to a prompt, text or token ids. Keywords and errors: see `stream`."""
        steps, metrics = self._stream(prompt, max_tokens, stop, sampling, logprobs=False)
        chunks = list(steps)
        return Generation(
            "".join(c.text for c in chunks),
            [c.token for c in chunks if c.token is not None],
            chunks[-1].finish_reason or "length",
            metrics,
        )

    def stream(
        self, prompt: Prompt, *, max_tokens: int = 128, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Generator[Chunk, None, None]:
        """Yields a Chunk for each token as it comes.

        prompt      text, or token ids as they are (nothing is put before them)
        max_tokens  at least 1
        stop        texts that end the answer; neither they nor what follows are given out
        sampling    temperature=0.0 (greedy), top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=0

        Raises, before anything runs, InputError for a bad value, TypeError for an unknown keyword,
        ContextOverflowError for a prompt that does not fit, ClosedError; later NonFiniteLogitsError.
        `metrics` holds the times once the stream has ended or was closed.
        """
        return self._stream(prompt, max_tokens, stop, sampling, logprobs=True)[0]

    def _stream(
        self,
        prompt: Prompt,
        max_tokens: int,
        stop: str | Sequence[str],
        sampling: dict[str, Any],
        *,
        logprobs: bool,
    ) -> tuple[Generator[Chunk, None, None], Metrics]:
        self._open()
        how = Sampling(**sampling)
        check_count("max_tokens", max_tokens, 1)
        tokens, text = self._tokens(prompt), TextStream(self.tokenizer, stop)
        if len(tokens) > self.n_ctx:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and the context holds {self.n_ctx}; "
                "shorten it, or give a larger ctx"
            )
        metrics = Metrics(len(tokens))
        return self._chunks(tokens, max_tokens, text, how, metrics, logprobs), metrics

    def _chunks(
        self,
        tokens: list[int],
        max_tokens: int,
        text: TextStream,
        how: Sampling,
        metrics: Metrics,
        logprobs: bool,
    ) -> Generator[Chunk, None, None]:
        self._open()
        self.metrics = metrics
        steps = engine.generate(
            self._session(), tokens, max_tokens, how, metrics.per_forward_ms, logprobs=logprobs
        )
        for token, logprob in steps:
            if token in self.tokenizer.stop_ids:
                yield Chunk(text.flush(), token, logprob, "stop")
                return
            piece = text.feed(token)
            if text.stopped:
                yield Chunk(piece, token, logprob, "stop")
                return
            yield Chunk(piece, token, logprob, None)
            self._open()
        yield Chunk(text.flush(), None, None, "length")

    def logits(self, tokens: Prompt, *, chunk: int | None = None) -> NDArray[np.float32]:
        """Logits (n, n_vocab) of every position of a text or of token ids. chunk: tokens run at once; it
        moves no byte.

        Raises InputError, ContextOverflowError, ClosedError.
        """
        self._open()
        _check_counts(chunk=chunk)
        session = self._session(chunk)
        return np.concatenate(list(session.run(self._tokens(tokens), all_logits=True)))

    def digest(self, prompt: Prompt, n: int = 0) -> dict[str, Any]:
        """What to compare between machines and settings: `numerics`, `model_sha256`, the `tokens` of the
        prompt and of n greedy ones, and `logits_sha256`, over the little-endian float32 logits of every
        position of `tokens`.

        Equal to hashing `logits(tokens)`. Raises InputError, ContextOverflowError, NonFiniteLogitsError,
        ClosedError.
        """
        file = self._open()
        check_count("n", n, 0)
        tokens, sha = engine.digest(self._session(), self._tokens(prompt), n)
        return {"numerics": NUMERICS, "model_sha256": file.sha256(), "tokens": tokens, "logits_sha256": sha}

    def describe(self) -> dict[str, Any]:
        """Architecture, sizes, tensor types, and the kernel that each op uses here."""
        file, c = self._open(), self.config
        return {
            "model": str(file.metadata.get("general.name", self.path.stem)),
            "file": str(self.path),
            "file_bytes": file.size,
            "architecture": c.arch,
            "parameters": sum(int(np.prod(t.shape)) for t in file.tensors.values()),
            "layers": c.n_layers,
            "d_model": c.d_model,
            "heads": c.n_heads,
            "kv_heads": c.n_kv_heads,
            "head_dim": c.head_dim,
            "d_ff": c.d_ff,
            "vocabulary": c.n_vocab,
            "trained_context": c.n_ctx_train,
            "context": self.n_ctx,
            "kv_cache": f"{self.kv}, {self.kv_dtype}",
            "kv_cache_bytes": self._cache_bytes(self.kv, self.kv_dtype),
            "kv_caches_bytes": self._all_caches(),
            "tensor_types": dict(Counter(t.type.name for t in file.tensors.values())),
            "backend": self._ops.name,
            "threads": self._ops.threads,
            "kernels": self._ops.kernels(),
        }

    def close(self) -> None:
        """Gives back the weights' memory and the threads. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._file.close()
            del self._decoder, self._ops
            if self._watching is not None:
                self._watching()

    def __enter__(self) -> Model:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.backend}, {self.n_ctx} tokens"
        return f"<pyinfer.Model {self.path.name} ({state})>"

    def _open(self) -> GGUFFile:
        if self._closed:
            raise ClosedError(f"{self.path.name} was closed; load it again")
        return self._file

    def _cache_bytes(self, kv: str, dtype: str) -> int:
        """Of a full context."""
        return cache.most_bytes(kv, self.config, self.n_ctx, dtype, self._chunk or engine.PREFILL_CHUNK)

    def _all_caches(self) -> dict[str, int]:
        """Bytes of a full context in each kind and dtype that this model can have."""
        found = {}
        for kv in dict.fromkeys([*cache.KINDS, self.kv]):
            for dtype in cache.DTYPES:
                with contextlib.suppress(InputError):
                    cache.check(kv, self.config, dtype)
                    found[f"{kv}, {dtype}"] = self._cache_bytes(kv, dtype)
        return found

    def _check_memory(self, pack: bool) -> None:
        """Raises OutOfMemoryError. Weights that stay in the file are not counted: the system can let go of
        them.
        """
        memory.check(
            self._cache_bytes(self.kv, self.kv_dtype),
            weights=sum(t.nbytes for t in self._file.tensors.values()) if pack else 0,
            what=f"the KV cache ({self.kv}, {self.kv_dtype}) of a context of {self.n_ctx} tokens",
            instead="give a smaller ctx, a smaller kv_dtype, or a sliding window",
        )

    def _session(self, chunk: int | None = None) -> engine.Session:
        kv = cache.create(self.kv, self._ops, self.config, self.n_ctx, self.kv_dtype)
        return engine.Session(self._decoder, kv, chunk=chunk or self._chunk)

    def _tokens(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return engine.check_tokens(ids, self.config.n_vocab)


def _watched(ops: backend.Backend, observers: Sequence[Observer]) -> backend.Backend:
    """The backend itself, unless there is somebody to be told."""
    for o in observers:
        if not isinstance(o, Observer):
            raise InputError(f"observers: {o!r} is no pyinfer.observe.Observer")
    from .observe import calls

    logs = [calls.CallLog()] if calls.asked_for() else []
    return watched(ops, [*observers, *logs]) if observers or logs else ops


def _check_counts(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            check_count(name, value, 1)

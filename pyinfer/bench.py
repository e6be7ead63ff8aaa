"""Speeds of a model on this machine, beside what the machine could do.

Measured as llama-bench does: the prefill of a prompt of random tokens, and decoding token by token, each on
top of `depth` tokens, after a warm-up, several times. What a rate means shows beside it: bytes of weights and
cache per second against the speed at which this machine reads memory, multiply-adds per second against the
most that its level can do, and the part of a decoded token's time that Python takes.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from . import NUMERICS, _pi, backend, cache
from .backend.native import NativeBackend
from .engine import PREFILL_CHUNK, Session
from .errors import InputError
from .gguf_file import GGUFFile
from .model import registry
from .model.config import Config

FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
READ_BYTES = 256 << 20  # far more than caches keep
MULTIPLY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: prefill of `prompt` tokens and decoding of `generate`, 0 for neither, at each of
    `depths`, with each of `threads`, `repeats` times. Raises InputError, or BackendError for threads.
    """

    prompt: int = 512
    generate: int = 128
    depths: Sequence[int] = (0,)
    threads: Sequence[int] = (1,)
    repeats: int = 5
    kv_dtype: str = "f16"

    def __post_init__(self) -> None:
        for name, values, least in (
            ("prompt", (self.prompt,), 0),
            ("generate", (self.generate,), 0),
            ("depths", self.depths, 0),
            ("threads", self.threads, 1),
            ("repeats", (self.repeats,), 1),
        ):
            if not values:
                raise InputError(f"{name}: give at least one number")
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise InputError(f"{name}={value!r}: give whole numbers, at least {least}")
        if not self.prompt and not self.generate:
            raise InputError("prompt and generate are both 0: nothing is left to measure")
        if self.kv_dtype not in cache.DTYPES:
            raise InputError(f"kv_dtype={self.kv_dtype!r}: there are {', '.join(cache.DTYPES)}")
        for n in self.threads:
            backend.check_threads(n)

    @property
    def n_ctx(self) -> int:
        """Tokens that the longest test holds."""
        return max(self.depths) + max(self.prompt, self.generate)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do with some threads, in 1e9 per second; multiply-adds None at level ref."""

    read_gb: float
    int8_gmac: float | None
    f32_gmac: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """A test of a model: tokens per second of each repeat, and what they make of the machine.

    gb, gmac: 1e9 bytes read and multiply-adds made per second; of_read, of_multiply: their part of the
    limits, 1 being all, None if those are not known; python: the part of a decoded token's time outside of C,
    None for a prefill.
    """

    model: str
    type: str
    file_bytes: int
    parameters: int
    threads: int
    level: str
    test: str  # "pp512", "tg128"
    depth: int
    samples: list[float]
    median: float
    spread: float  # (max - min) / median
    gb: float
    gmac: float
    of_read: float | None
    of_multiply: float | None
    python: float | None
    load_seconds: float

    @property
    def label(self) -> str:
        return f"{self.test} @ {self.depth}" if self.depth else self.test


def tokens(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    """The same random token ids everywhere."""
    return random.Random(seed).choices(range(n_vocab), k=n)


class Work:
    """Bytes and multiply-adds that a model's tokens cost, as its file has the weights."""

    def __init__(self, file: GGUFFile, config: Config, kv_dtype: str) -> None:
        self.config, self.kv_dtype = config, kv_dtype
        self.head = "token_embd.weight" if config.tied else "output.weight"
        self.infos = file.tensors
        matrices = [i for i in file.tensors.values() if len(i.shape) == 2]
        self.matrices = [i for i in matrices if config.tied or i.name != "token_embd.weight"]

    @cached_property
    def weight_bytes(self) -> int:
        """Read once per forward: all but the embedding, of which a token reads one row."""
        vectors = sum(i.nbytes for i in self.infos.values() if len(i.shape) == 1)
        return vectors + sum(i.nbytes for i in self.matrices)

    @cached_property
    def quantised(self) -> bool:
        """Whether most multiply-adds are of bytes."""
        return 2 * sum(prod(i.shape) for i in self.matrices if i.type not in FLOATS) > sum(
            prod(i.shape) for i in self.matrices
        )

    @cached_property
    def type(self) -> str:
        """The type that most weights have."""
        share: dict[str, int] = {}
        for i in self.matrices:
            share[i.type.name] = share.get(i.type.name, 0) + prod(i.shape)
        return max(share, key=lambda name: share[name])

    def of(self, n: int, depth: int, at_once: bool) -> tuple[float, float]:
        """Bytes and multiply-adds of n tokens after `depth` others, in chunks of a prompt or one by one."""
        c = self.config
        forwards = -(-n // PREFILL_CHUNK) if at_once else n  # each makes the logits of its last token
        all_macs, head = sum(prod(i.shape) for i in self.matrices), prod(self.infos[self.head].shape)
        keys = n * depth + n * (n + 1) // 2  # that the queries meet in all
        macs = n * (all_macs - head) + forwards * head + 2 * c.n_layers * c.n_heads * c.head_dim * keys
        read_keys = forwards * (depth + n) if at_once else keys
        return forwards * self.weight_bytes + cache.n_bytes(c, read_keys, self.kv_dtype), macs


def limits(ops: NativeBackend) -> Limits:
    """Measures this machine, with the threads and at the level of `ops`: the best of several tries each."""
    ffi, lib = _pi.ffi, _pi.lib
    data = np.ones(READ_BYTES, np.uint8)
    source, total, macs = ffi.from_buffer(data), ffi.new("uint64_t *"), ffi.new("int64_t *")

    def read() -> None:
        lib.pi_measure_read(ops.ctx, source, READ_BYTES, total)

    def multiply(type: int) -> float | None:
        steps = 1000

        def run() -> None:  # several units to a thread: one that loses its core holds up less
            lib.pi_measure_multiply(ops.ctx, type, 8 * ops.threads, steps, macs)

        while (seconds := _best(run, 3)) < MULTIPLY_SECONDS / 4 and macs[0]:
            steps *= max(2, int(MULTIPLY_SECONDS / 3 / seconds))
        return macs[0] / seconds / 1e9 if macs[0] else None

    return Limits(READ_BYTES / _best(read, 5) / 1e9, multiply(lib.PI_Q8_0), multiply(lib.PI_F32))


def _best(run: Callable[[], Any], tries: int) -> float:
    """Seconds of the fastest run: whatever else the machine does can only make one slower."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


class Bench:
    """Runs plans. `limits` has those of this machine by threads, as far as they were needed."""

    def __init__(
        self, say: Callable[[str], None] = lambda line: None, *, measure_limits: bool = True
    ) -> None:
        self.say, self.measure_limits = say, measure_limits
        self.limits: dict[int, Limits] = {}

    def check(self, path: Path, plan: Plan) -> None:
        """Raises ModelError for a file that cannot be run, InputError for a plan that it is too short for."""
        with GGUFFile(path) as file:
            config = Config.from_gguf(file)
        cache.check("positional", config, plan.kv_dtype)
        if plan.n_ctx > config.n_ctx_train:
            raise InputError(
                f"{path.name} was trained for {config.n_ctx_train} tokens, and the longest test has "
                f"{plan.n_ctx}; give a smaller depth or fewer tokens"
            )

    def run(self, path: Path, plan: Plan) -> Iterator[Result]:
        """Yields the results of a model as they come: by threads, then depth. Raises what `check` raises, and
        BackendError.
        """
        self.check(path, plan)
        for n_threads in plan.threads:
            ops = backend.create("parallel", n_threads)
            assert isinstance(ops, NativeBackend)
            if self.measure_limits and n_threads not in self.limits:
                self.say(f"what {n_threads} thread(s) of this machine can do ...")
                self.limits[n_threads] = limits(ops)
            self.say(f"{path.name}, {n_threads} thread(s): loading ...")
            start = time.perf_counter()
            with GGUFFile(path) as file:
                decoder = registry.load(file, ops)
                seconds = time.perf_counter() - start
                yield from self._tests(file, decoder, ops, plan, seconds)

    def _tests(
        self, file: GGUFFile, decoder: registry.Decoder, ops: NativeBackend, plan: Plan, load_seconds: float
    ) -> Iterator[Result]:
        config = decoder.config
        session = Session(decoder, cache.create("positional", ops, config, plan.n_ctx, plan.kv_dtype))
        work = Work(file, config, plan.kv_dtype)
        prompt = tokens(plan.prompt, config.n_vocab)
        step = tokens(plan.generate, config.n_vocab, 1)
        best = self.limits.get(ops.threads)
        multiply = best and (best.int8_gmac if work.quantised else best.f32_gmac)

        def result(test: str, depth: int, n: int, seconds: list[float], python: float | None) -> Result:
            samples = [n / s for s in seconds]
            median = statistics.median(samples)
            n_bytes, macs = (x / n * median / 1e9 for x in work.of(n, depth, test.startswith("pp")))
            return Result(
                model=str(file.metadata.get("general.name", file.path.stem)),
                type=work.type,
                file_bytes=file.size,
                parameters=sum(prod(i.shape) for i in file.tensors.values()),
                threads=ops.threads,
                level=ops.level,
                test=test,
                depth=depth,
                samples=samples,
                median=median,
                spread=(max(samples) - min(samples)) / median,
                gb=n_bytes,
                gmac=macs,
                of_read=n_bytes / best.read_gb if best else None,
                of_multiply=macs / multiply if multiply else None,
                python=python,
                load_seconds=load_seconds,
            )

        for depth in plan.depths:
            for test, ids in ((f"pp{plan.prompt}", prompt), (f"tg{plan.generate}", step)):
                if not ids:
                    continue
                self.say(f"{file.path.name}, {ops.threads} thread(s): {test} at depth {depth} ...")
                if session.cache.length < depth:
                    list(session.run(tokens(depth, config.n_vocab, 2)[session.cache.length :]))
                one_by_one = test.startswith("tg")
                seconds = _repeat(session, ids, depth, one_by_one, plan.repeats)
                per_token = statistics.median(seconds) / len(ids)
                python = python_seconds(session, ids[0]) / per_token if one_by_one else None
                yield result(test, depth, len(ids), seconds, python)
                session.cache.truncate(depth)


def _repeat(session: Session, ids: Sequence[int], depth: int, one_by_one: bool, repeats: int) -> list[float]:
    """Seconds of each run of ids after `depth` tokens, at once or one by one, after a warm-up."""
    seconds = []
    for i in range(repeats + 1):
        session.cache.truncate(depth)
        start = time.perf_counter()
        if one_by_one:
            for token in ids if i else ids[:8]:
                list(session.run([token]))
        else:
            list(session.run(ids))
        if i:
            seconds.append(time.perf_counter() - start)
    return seconds


def python_seconds(session: Session, token: int) -> float:
    """Of one decoded token, the time outside of C: the step runs again with calls that return at once (and,
    C doing nothing in between, in warm caches).
    """
    step, length = session.step, session.cache.length - 1
    if step is None or length < 0:
        raise InputError("the session has decoded nothing yet; run a token first")
    session.step = step.idle()
    try:
        runs = []
        for _ in range(50):
            session.cache.truncate(length)
            start = time.perf_counter()
            list(session.run([token]))
            runs.append(time.perf_counter() - start)
    finally:
        session.step = step
    return statistics.median(runs)


def machine() -> dict[str, Any]:
    """This machine and build, in words and numbers."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numerics": NUMERICS,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def as_dict(results: Sequence[Result], bench: Bench) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "machine": machine(),
        "limits": {str(n): asdict(found) for n, found in bench.limits.items()},
        "results": [asdict(r) for r in results],
    }

"""The worker pool: many small regions, contexts that come and go, several Python threads; nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from kernels.cases import CASES, expected
from kernels.harness import LEVELS, Native, Out, check, ffi, lib, raw_weight, values

LIMIT = 60.0  # seconds; each of these takes about one


def within_limit(*jobs: Callable[[], None]) -> None:
    """Runs the jobs side by side; one that hangs or fails fails the test."""
    failed: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT)
        assert not t.is_alive(), "hangs"
    if failed:
        raise failed[0]


class Small:
    """A matmul of a few chunks, again and again on one set of buffers."""

    def __init__(self, native: Native) -> None:
        self.native, self.rows = native, 161
        self.raw, self.x = raw_weight("Q4_1", "random", self.rows, 32, 1), values("random", (1, 32), 2)
        self.w = native.weight("Q4_1", self.raw, self.rows, 32)
        self.y = np.empty((1, self.rows), np.float32)
        x, y = native.pointer(self.x), native.pointer(self.y)
        null = ffi.NULL
        self.args = [native.ctx, self.w.ptr, null, null, x, 1, null, y, null, null]

    def run(self, times: int, want: np.ndarray) -> None:
        for i in range(times):
            self.y.fill(np.nan)
            assert self.native.call("pi_matmul", self.args) == 0
            if not np.array_equal(self.y, want):
                check(
                    f"matmul, call {i} on {self.native.threads} threads",
                    self.native.level,
                    1,
                    want.shape,
                    self.y,
                    want,
                )


@pytest.fixture(scope="module")
def want() -> np.ndarray:
    one = Small(Native("ref"))
    assert one.native.call("pi_matmul", one.args) == 0
    return one.y


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_many_small_regions(threads: int, want: np.ndarray) -> None:
    small = Small(Native(LEVELS[-1], threads))
    within_limit(lambda: small.run(3000, want))


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_regions_with_pauses(threads: int, want: np.ndarray) -> None:
    """Workers fall asleep between these and must be woken."""
    small, pause = Small(Native(LEVELS[-1], threads)), threading.Event()

    def job() -> None:
        for _ in range(100):
            small.run(1, want)
            pause.wait(0.001)

    within_limit(job)


def test_contexts_come_and_go(want: np.ndarray) -> None:
    def job() -> None:
        for i in range(150):
            small = Small(Native(LEVELS[i % len(LEVELS)], i % 5 + 1))
            if i % 3:
                small.run(i % 4, want)

    within_limit(job)


@pytest.mark.parametrize("threads", [1, 3])
def test_two_contexts_in_two_threads(threads: int, want: np.ndarray) -> None:
    pair = [Small(Native(level, threads)) for level in (LEVELS[0], LEVELS[-1])]
    within_limit(*(lambda s=s: s.run(1000, want) for s in pair))


@pytest.mark.parametrize("threads", [1, 3])
def test_one_context_in_three_threads(threads: int, want: np.ndarray) -> None:
    native = Native(LEVELS[-1], threads)
    trio = [Small(native) for _ in range(3)]
    within_limit(*(lambda s=s: s.run(700, want) for s in trio))


def test_every_op_in_two_threads_at_once(native: Native) -> None:
    """Contexts share nothing, scratch least of all."""
    want = {name: expected(name) for name in CASES}  # before the clock runs

    def job(threads: int) -> None:
        mine = Native(native.level, threads)
        for name, case in CASES.items():
            for got, right in zip(case(mine), want[name], strict=True):
                check(name, native.level, 0, right.shape, got, right)

    within_limit(lambda: job(1), lambda: job(2))


RANGE = 16384  # values to a range of an elementwise op
SEEDS = (1, 2, 3, 255, 2**31, 2**32 - 1)


def add_in_place(native: Native, x: np.ndarray, n: int, to: int = 0) -> None:
    """x[i + to] = x[i] + 1 for i < n."""
    one = np.ones(n, np.float32)
    args = [native.pointer(a) for a in (x, one)] + [n, native.pointer(x[to:])]
    assert native.call("pi_add", [native.ctx, *args]) == 0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_every_unit_is_taken_once_in_any_order(threads: int, seed: int) -> None:
    native = Native(LEVELS[-1], threads)
    lib.pi_ctx_scramble(native.ctx, seed)
    for ranges in (*range(1, 34), 63, 64, 65, 96, 97):
        x = np.zeros(ranges * RANGE - 7, np.float32)
        add_in_place(native, x, x.size)
        assert (x == 1).all(), f"{ranges} ranges"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scrambled_order_is_another(seed: int) -> None:
    """Each range adds to the next: ascending, the last is the number of ranges."""
    native = Native(LEVELS[-1])
    for ranges in (3, 16, 33):
        last = []
        for order in (0, seed):
            lib.pi_ctx_scramble(native.ctx, order)
            x = np.zeros((ranges + 1) * RANGE, np.float32)
            add_in_place(native, x, ranges * RANGE, RANGE)
            last.append(x[-1])
        assert last[0] == ranges > last[1]


def test_a_large_call_after_a_small_one_grows_the_scratch(native: Native) -> None:
    many = Native(native.level, 2)
    raw = raw_weight("Q8_0", "random", 16, 512, 1)
    w = many.weight("Q8_0", raw, 16, 512)
    x = values("random", (200, 512), 2)
    for tokens in (1, 200, 3):
        got = many.op("pi_matmul", w, None, None, x[:tokens], tokens, None, Out((tokens, 16)), None, None)
        if tokens == 1:
            first = got
        check("matmul", native.level, 1, tokens, got[:1], first)

"""Schedules: a region's semantics, what policies plan, what is said when it cannot be had; and that no
mapping of attention onto cores moves a byte.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_parity import COARSE, first_difference, rows
from tiny import write_tiny

import pyinfer
from pyinfer import InputError, backend, cache
from pyinfer._pi import lib
from pyinfer.backend import TracingBackend, native
from pyinfer.backend.base import Backend
from pyinfer.backend.native import NativeBackend
from pyinfer.backend.reference import ReferenceBackend
from pyinfer.engine import Session
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry
from pyinfer.model.config import Config
from pyinfer.schedule import (
    POLICIES,
    Auto,
    HeadPlan,
    Inline,
    PerHead,
    PerKVGroup,
    Pool,
    Schedule,
    ScheduleDowngraded,
    Sequential,
    Split,
    Unit,
)

LEVELS = [level for level, runs in native.levels().items() if runs]

# ---- regions -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pools() -> dict[int, Pool]:
    return {n: Pool(n) for n in (1, 2, 3, 5)}


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("grain", [1, 3, 7, 100])
@pytest.mark.parametrize("units", [0, 1, 2, 7, 20])
def test_ranges_are_disjoint_and_cover(n, grain, units, pools):
    pool, taken, tasks = pools[n], [], min(n, -(-units // grain))
    before = pool.regions
    pool.for_range(units, grain, lambda lo, hi, slot: taken.append((lo, hi, slot)))
    assert [u for lo, hi, _ in sorted(taken) for u in range(lo, hi)] == list(range(units))
    assert pool.regions - before == (tasks > 1)
    assert {slot for *_, slot in taken} <= set(range(max(1, tasks)))
    if tasks > 1:
        assert all(hi - lo <= grain for lo, hi, _ in taken)
    elif units:
        assert taken == [(0, units, 0)]


def test_inline_is_one_range_in_this_thread():
    taken = []
    Inline().for_range(9, 2, lambda *range: taken.append((*range, threading.get_ident())))
    assert taken == [(0, 9, 0, threading.get_ident())]


def test_tasks_run_at_the_same_time_with_a_slot_each():
    """Each waits for the others; and while a range runs its slot is nobody else's."""
    together, busy, slots = threading.Barrier(3, timeout=20), set(), set()

    def body(lo: int, hi: int, slot: int) -> None:
        assert slot not in busy
        busy.add(slot)
        slots.add((slot, threading.get_ident()))
        if lo < 3:
            together.wait()
        time.sleep(0.001)
        busy.remove(slot)

    Pool(3).for_range(30, 1, body)
    assert sorted(slot for slot, _ in slots) == [0, 1, 2]  # a slot is one thread's for all of the region
    assert (0, threading.get_ident()) in slots


def test_joins_all_before_it_returns():
    done: list[int] = []

    def body(lo: int, hi: int, slot: int) -> None:
        time.sleep(0.02 if slot else 0)
        done.append(lo)

    pool = Pool(3)
    for _ in range(5):
        done.clear()
        pool.for_range(8, 1, body)
        assert sorted(done) == list(range(8))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("slot_at_fault", [0, 1])
@pytest.mark.parametrize("both_fail", [False, True])
def test_first_failure_cancels_the_rest_and_is_raised(both_fail, slot_at_fault, error):
    """The other range that runs comes to its end; none begins after, and the pool goes on."""
    together, begun, ended, failed = threading.Barrier(2, timeout=20), [], [], threading.Event()

    def body(lo: int, hi: int, slot: int) -> None:
        begun.append(lo)
        if lo < 2:
            together.wait()
        if slot == slot_at_fault:
            failed.set()
            raise error(f"unit {lo}")
        assert failed.wait(20)
        time.sleep(0.05)  # until the failure is known
        ended.append(lo)
        if both_fail:
            raise RuntimeError("a later failure")

    pool = Pool(2)
    with pytest.raises(error, match=r"unit [01]"):
        pool.for_range(100, 1, body)
    assert sorted(begun) == [0, 1]
    assert len(ended) == 1
    taken = []
    pool.for_range(4, 1, lambda lo, hi, slot: taken.append(lo))
    assert sorted(taken) == [0, 1, 2, 3]


def test_an_interrupt_while_joining_waits_for_the_tasks(monkeypatch):
    from pyinfer import schedule

    wait, calls, ended = schedule.wait, [], threading.Event()

    def interrupted(tasks: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        wait(tasks)

    monkeypatch.setattr(schedule, "wait", interrupted)
    together = threading.Barrier(2, timeout=20)

    def body(lo: int, hi: int, slot: int) -> None:
        together.wait()
        if slot:
            time.sleep(0.05)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        Pool(2).for_range(2, 1, body)
    assert ended.is_set()


@pytest.mark.parametrize("inner", [Pool(2), Inline()], ids=repr)
def test_nested_regions_run_inline_in_their_slot(inner):
    pool, taken, together = Pool(3), [], threading.Barrier(3, timeout=20)

    def body(lo: int, hi: int, slot: int) -> None:
        together.wait()
        me = threading.get_ident()
        for s in (inner, pool):
            s.for_range(5, 1, lambda a, b, s: taken.append((a, b, s == slot, threading.get_ident() == me)))

    pool.for_range(3, 1, body)
    assert taken == [(0, 5, True, True)] * 6
    assert pool.regions == 1
    together.reset()
    pool.for_range(3, 1, lambda lo, hi, slot: together.wait() and None)  # a region again, not inline
    assert pool.regions == 2


def test_a_failure_leaves_no_region_open():
    for schedule in (Pool(2), Inline()):
        with pytest.raises(ZeroDivisionError):
            schedule.for_range(2, 1, lambda lo, hi, slot: 1 // 0)
    pool = Pool(2)
    pool.for_range(2, 1, lambda lo, hi, slot: None)
    assert pool.regions == 1


def test_one_pool_in_several_threads():
    pool, found = Pool(2), np.zeros((4, 9), np.int64)

    def run(i: int) -> None:
        def body(lo: int, hi: int, slot: int) -> None:
            found[i, lo:hi] += range(lo, hi)

        for _ in range(50):
            pool.for_range(9, 1, body)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive(), "hangs"
    assert (found == 50 * np.arange(9)).all()
    assert pool.regions == 200


def test_tasks_see_the_callers_context():
    seen = []
    with np.errstate(divide="raise"):
        Pool(2).for_range(4, 1, lambda lo, hi, slot: seen.append(np.geterr()["divide"]))
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, it belonged to a thread
        assert seen == ["raise"] * 4


@pytest.mark.parametrize("n", [0, -1, 257, 1.5, "2", True, None])
def test_no_such_pool(n):
    with pytest.raises(InputError, match=r"Pool\(.*from 1 to 256"):
        Pool(n)


@pytest.mark.parametrize("schedule", [Inline(), Pool(2)], ids=repr)
def test_no_such_grain(schedule):
    with pytest.raises(InputError, match="grain=0"):
        schedule.for_range(4, 0, lambda lo, hi, slot: None)


# ---- plans -------------------------------------------------------------------------------------------------

G, H, S = Unit.GROUP, Unit.HEAD, Unit.SPLIT


@pytest.mark.parametrize(
    ("policy", "step", "plan"),
    [
        # heads, KV heads, keys, cores
        (Auto(), (16, 8, 63, 2), None),
        (Auto(), (16, 8, 64, 2), HeadPlan(8, 1, G)),
        (Auto(), (16, 8, 64, 1), None),
        (Auto(), (16, 8, 64, 8), HeadPlan(8, 1, G)),
        (Auto(), (16, 8, 64, 9), HeadPlan(16, 1, H)),
        (Auto(), (16, 8, 64, 16), HeadPlan(16, 1, H)),
        (Auto(), (16, 8, 64, 17), HeadPlan(8, 1, S)),
        (Auto(), (16, 8, 65, 17), HeadPlan(16, 1, S)),
        (Auto(), (16, 8, 63, 17), None),
        (Auto(), (8, 8, 4096, 2), HeadPlan(8, 1, H)),
        (Auto(), (9, 3, 4096, 2), HeadPlan(3, 1, G)),
        (Auto(), (9, 3, 4096, 4), HeadPlan(9, 1, H)),
        (Auto(), (4, 1, 4096, 2), HeadPlan(4, 1, H)),
        (Auto(), (1, 1, 4096, 2), HeadPlan(64, 1, S)),
        (Sequential(), (16, 8, 4096, 8), None),
        (PerHead(), (16, 8, 1, 8), HeadPlan(16, 1, H)),
        (PerHead(), (16, 8, 4096, 1), HeadPlan(16, 1, H)),
        (PerKVGroup(), (16, 8, 1, 64), HeadPlan(8, 1, G)),
        (Split(), (16, 8, 1, 2), HeadPlan(8, 1, S)),
        (Split(), (16, 8, 129, 2), HeadPlan(24, 1, S)),
    ],
)
def test_plan(policy, step, plan):
    assert policy.plan(*step) == plan


@pytest.mark.parametrize(
    ("plan", "parallelism", "queries", "tasks"),
    [
        (HeadPlan(8, 1, H), 2, 1, 2),
        (HeadPlan(8, 1, H), 16, 1, 8),
        (HeadPlan(8, 1, H), 16, 2, 16),
        (HeadPlan(8, 3, H), 16, 1, 3),
        (HeadPlan(8, 8, H), 16, 1, 1),
    ],
)
def test_tasks_of_a_plan(plan, parallelism, queries, tasks):
    assert plan.tasks(parallelism, queries) == tasks


def test_policies_are_values():
    assert PerHead() == PerHead() != PerKVGroup()
    assert len({policy() for policy in POLICIES.values()} | {Auto()}) == len(POLICIES) == 5
    assert repr(PerKVGroup()) == "PerKVGroup()"
    with pytest.raises(dataclasses.FrozenInstanceError):
        HeadPlan(1, 1, H).units = 2


# ---- models ------------------------------------------------------------------------------------------------

HEADS = [(8, 8), (8, 2), (4, 2), (6, 3), (9, 3), (16, 8)]
PROMPT, STEPS, LONG, LAYERS, N_VOCAB = 17, 6, 72, 2, 31
KV = ("append", "positional")
POLICY = {name: policy() for name, policy in POLICIES.items()}


class Case:
    """A tiny model, one native backend on two threads, and the logits wanted: of a prompt and its steps the
    reference's, of what follows, LONG tokens in all, those of plain C at every op's default.

    head_dim 40: Split has two ranges of value dimensions, one of them short.
    """

    def __init__(self, folder: Path, n_heads: int, n_kv_heads: int) -> None:
        self.heads, self.kv_heads = n_heads, n_kv_heads
        shape = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": 40, "n_vocab": N_VOCAB}
        self.path = write_tiny(
            folder / f"{n_heads}_{n_kv_heads}.gguf",
            "llama",
            **shape,
            **{"d_model": 24, "d_ff": 20, "n_layers": LAYERS},
            tokenizer=False,
        )
        self.tokens = [int(t) for t in np.random.RandomState(7).randint(0, N_VOCAB, LONG)]
        self.ops = backend.create("parallel", 2)
        self.decoder = registry.load(GGUFFile(self.path), self.ops)
        self.reference = registry.load(GGUFFile(self.path), ReferenceBackend())
        short = rows(
            self.session(self.reference, self.reference.ops, "append"), self.tokens[: PROMPT + STEPS]
        )
        plain = backend.unfused(backend.create("scalar"), *COARSE)
        long = rows(self.session(registry.load(GGUFFile(self.path), plain), plain, "append"), self.tokens)
        self.want = np.concatenate([short, long[len(short) :]])

    def session(self, decoder: registry.Decoder, ops: Backend, kv: str) -> Session:
        """Over a decoder that was loaded for ops, or for a twin of it."""
        decoder.ops = ops
        return Session(decoder, cache.create(kv, ops, decoder.config, 128, "f32"))

    def check(self, got: np.ndarray, *where: object) -> None:
        difference = first_difference(got, self.want[: len(got)])
        assert difference is None, f"{where}: {difference}"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Case]:
    folder = tmp_path_factory.mktemp("schedule")
    return {heads: Case(folder, *heads) for heads in HEADS}


def regions_of_a_step(case: Case, policy: str, threads: int, keys: int, queries: int) -> int:
    """Regions of the C pool that attention opens in one layer."""
    if threads == 1 or policy == "sequential" or (policy == "auto" and keys * queries < 64):
        return 0
    if policy == "split" and queries == 1:
        return 2 + (keys > 64 or case.kv_heads > 1)
    return 1


ORDERS = {"ascending": 0, "descending": 2**32 - 1, "shuffled 5": 5, "shuffled 7": 7, "shuffled 1234": 1234}
MAPPED = {"inline": (Inline(), 0)} | {f"pool, {name}": (Pool(2), seed) for name, seed in ORDERS.items()}


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}x{h[1]}")
def test_grid(heads, policy, kv, cases):
    """A prefill and decode steps, on every schedule: the bytes of the reference, in the regions planned."""
    case = cases[heads]
    parts = [case.tokens[:PROMPT], *([t] for t in case.tokens[PROMPT : PROMPT + STEPS])]
    base = regions(case, case.ops.scheduled(Inline()), kv, parts)[1]
    for name, (schedule, seed) in MAPPED.items():
        lib.pi_ctx_scramble(case.ops.ctx, seed)
        try:
            got, opened = regions(case, case.ops.scheduled(schedule, POLICY[policy]), kv, parts)
        finally:
            lib.pi_ctx_scramble(case.ops.ctx, 0)
        case.check(got, name)
        end = 0
        for part, n, without in zip(parts, opened, base, strict=True):
            end += len(part)
            want = regions_of_a_step(case, policy, schedule.parallelism, end, len(part))
            assert n - without == want * LAYERS, (name, end)


def regions(case: Case, ops: NativeBackend, kv: str, parts: list[list[int]]) -> tuple[np.ndarray, list[int]]:
    """Logits, and the regions that were opened for each part."""
    session, logits, opened = case.session(case.decoder, ops, kv), [], []
    for part in parts:
        before = lib.pi_ctx_regions(ops.ctx)
        logits.append(rows(session, part))
        opened.append(lib.pi_ctx_regions(ops.ctx) - before)
    assert (session.step is None) == (session.cache.views is None)  # where memory stays, steps are replayed
    return np.concatenate(logits), opened


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (9, 3)], ids=lambda h: f"{h[0]}x{h[1]}")
def test_around_64_keys(heads, policy, cases):
    """Auto begins to fork here, and Split to have more than one range of keys: in a step that is replayed."""
    case = cases[heads]
    parts = [case.tokens[:58], *([t] for t in case.tokens[58:])]
    base = regions(case, case.ops.scheduled(Inline()), "positional", parts)[1]
    got, opened = regions(case, case.ops.scheduled(Pool(2), POLICY[policy]), "positional", parts)
    case.check(got)
    for keys, n, without in zip(range(58, LONG + 1), opened, base, strict=True):
        want = regions_of_a_step(case, policy, 2, keys, 1 if keys > 58 else 58)
        assert n - without == want * LAYERS, keys


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("level", LEVELS)
def test_levels(level, policy, cases, monkeypatch):
    monkeypatch.setenv("PYINFER_CPU", level)
    case = cases[8, 2]
    ops = backend.create("parallel", 3).scheduled(policy=POLICY[policy])
    session = case.session(registry.load(GGUFFile(case.path), ops), ops, "positional")
    case.check(rows(session, case.tokens[:60], *([t] for t in case.tokens[60:])), level, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", [(4, 2), (6, 3)], ids=lambda h: f"{h[0]}x{h[1]}")
def test_default_attention(heads, policy, cases):
    """Over the reference, in Python threads, and over the C library, inline: both equal the fused one."""
    case, pool = cases[heads], Pool(2)
    parts = [case.tokens[:PROMPT], [case.tokens[PROMPT]]]
    session = case.session(case.reference, case.reference.ops.scheduled(pool, POLICY[policy]), "positional")
    case.check(rows(session, *parts), "reference")
    forked = LAYERS * (0 if policy == "sequential" else PROMPT + (policy != "auto"))  # Auto: not for 18 keys
    assert pool.regions == forked
    plain = backend.unfused(case.ops, "fused_attention").scheduled(pool, POLICY[policy])
    case.check(rows(case.session(case.decoder, plain, "positional"), *parts), "unfused")
    assert pool.regions == forked


def test_traced_counts_do_not_depend_on_the_schedule(cases):
    case, counts = cases[9, 3], []
    for schedule in (Inline(), Pool(3)):
        ops = TracingBackend(ReferenceBackend()).scheduled(schedule, PerHead())
        case.check(rows(case.session(case.reference, ops, "append"), case.tokens[:4]))
        counts.append(ops.counts)
    assert counts[0] == counts[1]
    assert counts[0]["softmax_rows"] == LAYERS * 4 * 9
    assert ops.assigned == ops.inner.assigned


# ---- several sequences at once -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(cases: dict[tuple[int, int], Case]) -> Config:
    return cases[8, 2].decoder.config


STEP = [(1, 1), (17, 17), (40, 1), (65, 1), (130, 2), (33, 9)]  # length, queries
DECODE = [(n, 1) for n in (1, 15, 16, 64, 65, 200)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("sequences", [STEP, DECODE, DECODE[-1:]], ids=["mixed", "decode", "one"])
def test_a_batch_equals_each_alone(sequences, kv, dtype, policy, config):
    r, dim = np.random.RandomState(3), config.head_dim
    q = r.standard_normal((sum(n for _, n in sequences), config.n_heads * dim)).astype(np.float32)
    kvs = [r.standard_normal((2, n, config.n_kv_heads * dim)).astype(np.float32) for n, _ in sequences]
    tokens, scale, found = [n for _, n in sequences], dim**-0.5, {}
    some = [ReferenceBackend(), backend.create("simd"), backend.create("parallel", 3)]
    for ops in some if (kv, policy) == ("positional", "auto") else some[1:]:
        views = []
        for k, v in kvs:
            held = cache.create(kv, ops, config, 256, dtype)
            views.append(held.update_in_place(0, ops.tensor(k), ops.tensor(v)))
        ops = ops.scheduled(policy=POLICY[policy])
        got = ops.numpy(ops.batched_attention(ops.tensor(q), views, tokens, config.n_heads, scale))
        at = 0
        for view, n in zip(views, tokens, strict=True):
            part = ops.tensor(q[at : at + n])
            alone = ops.numpy(ops.fused_attention(part, view, config.n_heads, scale))
            assert first_difference(got[at : at + n], alone) is None, (ops.name, view.length, n)
            at += n
        found[ops.name] = got
    for a, b in pairwise(found.values()):
        assert first_difference(a, b) is None


# ---- what cannot be had ------------------------------------------------------------------------------------


def run(case: Case, ops: Backend, *parts: list[int]) -> list[ScheduleDowngraded]:
    """The events of a prefill and two steps, or of `parts`; the bytes stay."""
    events: list[ScheduleDowngraded] = []
    ops.listeners.append(events.append)
    t = case.tokens
    decoder = registry.load(GGUFFile(case.path), ops)
    case.check(rows(case.session(decoder, ops, "positional"), *(parts or (t[:3], [t[3]], [t[4]]))))
    return events


def fresh(name: str = "parallel", threads: int | None = 2) -> Backend:
    """One that has said nothing so far."""
    return backend.create(name, threads)


def each_layer(requested: str, used: str, reason: str) -> list[ScheduleDowngraded]:
    return [ScheduleDowngraded(requested, used, layer, reason) for layer in range(LAYERS)]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_can_be_had_is_no_event(policy, cases):
    case = cases[8, 2]
    assert run(case, fresh().scheduled(Pool(2), POLICY[policy]), *([t] for t in case.tokens[:3])) == []
    assert run(case, fresh().scheduled(policy=Auto())) == []
    assert run(case, fresh("simd", 1).scheduled(Inline(), PerHead())) == []
    assert run(case, backend.unfused(fresh(), "fused_attention")) == []  # nobody asked for two threads


def test_more_threads_than_the_backend_has(cases):
    want = each_layer("Pool(3)", "Pool(2)", "backend parallel has 2 threads")
    assert run(cases[8, 2], fresh().scheduled(Pool(3))) == want
    want = each_layer("Pool(2)", "Inline()", "backend simd has 1 thread")
    assert run(cases[8, 2], fresh("simd", 1).scheduled(Pool(2))) == want


def test_split_prefill(cases):
    reason = "several queries of a sequence are split by heads"
    want = each_layer("Split()", "PerKVGroup()", reason)
    assert run(cases[8, 2], fresh().scheduled(policy=Split())) == want
    want = each_layer("Split()", "PerHead()", reason)
    assert run(cases[8, 8], fresh().scheduled(policy=Split())) == want


def test_no_groups(cases):
    want = each_layer("PerKVGroup()", "PerHead()", "each query head has a KV head of its own")
    assert run(cases[8, 8], fresh().scheduled(policy=PerKVGroup())) == want


def test_ops_that_run_on_one_thread(cases):
    ops = backend.unfused(fresh(), "fused_attention").scheduled(Pool(2), PerHead())
    reason = "attention made of primitive ops runs on one thread over backend parallel"
    assert run(cases[8, 2], ops) == each_layer("Pool(2)", "Inline()", reason)
    reason = "attention made of primitive ops is split by heads"
    ops = ReferenceBackend().scheduled(policy=Split())
    assert run(cases[8, 2], ops, cases[8, 2].tokens[:1]) == each_layer("Split()", "PerKVGroup()", reason)


def test_auto_asks_for_nothing_that_could_be_refused(cases):
    """More cores than heads: decoding is split, a prefill and attention at its default are not."""
    case, t = cases[4, 2], cases[4, 2].tokens
    assert run(case, fresh(threads=6), t[:66], *([x] for x in t[66:70])) == []
    pool = Pool(6)
    assert run(case, ReferenceBackend().scheduled(pool), t[:9]) == []
    assert pool.regions == LAYERS * 9


def test_events_are_logged_once(cases, caplog):
    case, ops = cases[8, 2], fresh("simd", 1).scheduled(Pool(2), Split())
    with caplog.at_level(logging.INFO, logger="pyinfer"):
        events = run(case, ops)
        assert run(case, ops) == []  # said before
    assert len(events) == len(set(events)) == 2 * LAYERS
    assert [r.args[0] for r in caplog.records] == events
    assert all(r.levelname == "INFO" for r in caplog.records)
    assert "Pool(2)" in caplog.text
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].layer = 5


def test_a_layer_of_its_own(cases):
    case = cases[8, 8]
    ops = fresh().scheduled(Pool(2), PerHead()).scheduled(Pool(5), PerKVGroup(), layers=[1])
    assert [(e.requested, e.layer) for e in run(case, ops)] == [("Pool(5)", 1), ("PerKVGroup()", 1)]
    parts = [[t] for t in case.tokens[:4]]
    ops = case.ops.scheduled(Inline()).scheduled(Pool(2), PerHead(), layers=range(1, 2))
    base = regions(case, case.ops.scheduled(Inline()), "positional", parts)[1]
    got, opened = regions(case, ops, "positional", parts)
    case.check(got)
    assert [n - without for n, without in zip(opened, base, strict=True)] == [1] * 4
    assert case.ops.assignment(1) == backend.create("simd").assignment(1)  # a twin leaves the first as it was


def test_a_policy_of_ones_own(cases):
    """Splits where it must not, with a grain: planned anew, in two ranges."""

    class Odd(Auto):
        def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan | None:
            return HeadPlan(n_heads, 4, S)

    for ops in (fresh(threads=3), ReferenceBackend().scheduled(Pool(3))):
        assert run(cases[8, 8], ops.scheduled(ops.assignment(0).schedule, Odd())) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: 5, r"Broken\(\) planned 5; a plan is a HeadPlan or None"),
        (lambda: HeadPlan(0, 1, H), r"HeadPlan\(units=0.*units and grain are at least 1"),
        (lambda: HeadPlan(1, 0, H), r"HeadPlan\(units=1, grain=0"),
        (lambda: HeadPlan(1, 1, "head"), "unit is a schedule.Unit"),
    ],
)
def test_a_policy_that_plans_nonsense(made, message, cases):
    class Broken(Auto):
        def plan(self, n_heads: int, n_kv_heads: int, seq_kv: int, parallelism: int) -> HeadPlan | None:
            return made()

    with pytest.raises(InputError, match=message):
        run(cases[8, 8], fresh(threads=2).scheduled(None, Broken()))


# ---- the API -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("schedule") / "tiny.gguf", "llama", type="Q8_0")


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [(None, "per-head"), (Inline(), "split"), (Pool(2), "sequential"), (Pool(8), PerKVGroup())],
    ids=str,
)
def test_load(schedule: Schedule | None, policy: Any, file):
    tokens = [1, 260, 33, 7]
    with pyinfer.load(file, backend="scalar") as model:
        want = model.digest(tokens, 4)
    with pyinfer.load(file, threads=2, schedule=schedule, attention_policy=policy) as model:
        given = model._ops.assignment(0)
        assert given.schedule is schedule
        assert given.policy == POLICY.get(policy, policy) if isinstance(policy, str) else policy
        assert model.digest(tokens, 4) == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": 2}, r"schedule=2: give pyinfer.schedule.Inline\(\) or Pool\(n\)"),
        ({"schedule": "pool"}, "schedule='pool'"),
        (
            {"attention_policy": "fast"},
            "no attention policy 'fast'; there are auto, sequential, per-head, per-kv",
        ),
        ({"attention_policy": None}, "no attention policy None"),
        ({"attention_policy": Auto}, "no attention policy <class"),
    ],
)
def test_load_refuses(options, message):
    with pytest.raises(InputError, match=message):
        pyinfer.load("no such file", **options)


def test_command_line_knows_all_policies(capsys):
    from pyinfer.cli import main

    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert f"--attention-policy {{{','.join(POLICIES)}}}" in capsys.readouterr().out

"""Every kind of KV cache gives the same logits, and holds what it says it holds.

Logits are held to those of attention made of primitives over a positional cache that NumPy writes, and these,
as far as patience goes, to the NumPy reference.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import write_tiny

from pyinfer import backend, cache, engine
from pyinfer.backend import native
from pyinfer.backend.base import COARSE, Backend
from pyinfer.backend.kv import row_bytes
from pyinfer.cache.sliding import most_blocks
from pyinfer.engine import Session
from pyinfer.errors import CacheFullError, ContextOverflowError, InputError
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry
from pyinfer.model.config import Config
from pyinfer.sampling import Sampling

N, PROMPT, CONTEXT = 84, 37, 256
VOCAB, LAYERS, KV_HEADS, HEAD_DIM = 61, 2, 2, 32
TOKENS = [int(t) for t in np.random.RandomState(3).randint(0, VOCAB, N)]
BIG = 1000  # a window that no sequence here outgrows

Make = Callable[[Backend, Config, str], cache.Cache]


def paged(block: int, blocks: int = 40, window: int = 0) -> Make:
    def make(ops: Backend, config: Config, dtype: str) -> cache.Cache:
        pool = cache.BlockPool(ops, config, blocks, dtype, block=block)
        return cache.SlidingCache(pool, CONTEXT, window) if window else cache.PagedCache(pool, CONTEXT)

    return make


def padded(pad: int) -> Make:
    return lambda ops, config, dtype: cache.PaddedCache(ops, config, CONTEXT, dtype, pad)


KINDS: dict[str, Make] = {
    "append": lambda ops, config, dtype: cache.AppendCache(ops, config, CONTEXT, dtype),
    "positional": lambda ops, config, dtype: cache.PositionalCache(ops, config, CONTEXT, dtype),
    **{f"padded {pad}": padded(pad) for pad in (1, 16, 37)},
    **{f"paged {block}": paged(block) for block in (16, 64)},
    **{f"sliding {block}": paged(block, window=BIG) for block in (16, 64)},
}
KINDS_AND_DTYPES = [(k, d) for k in KINDS for d in cache.DTYPES if (k, d) != ("append", "q8_0")]


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        tmp_path_factory.mktemp("caches") / "tiny.gguf", getattr(request, "param", "qwen3"),
        n_layers=LAYERS, n_heads=4, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, d_model=24, d_ff=20,
        n_vocab=VOCAB, n_ctx=CONTEXT, tokenizer=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def start(path: Path) -> Callable[..., Session]:
    """A new session over a cache that `make` makes, or that is given."""
    loaded: dict[str, registry.Decoder] = {}

    def get(kv: Make | cache.Cache, dtype: str = "f16", name: str = "simd", chunk: int = 100) -> Session:
        if name not in loaded:
            ops = (
                backend.unfused(backend.create("scalar"), *COARSE)
                if name == "primitives"
                else backend.create(name, 3 if name == "parallel" else None)
            )
            loaded[name] = registry.load(GGUFFile(path), ops)
        decoder = loaded[name]
        made = kv if isinstance(kv, cache.Cache) else kv(decoder.ops, decoder.config, dtype)
        return Session(decoder, made, chunk=chunk)

    return get


@pytest.fixture(scope="module")
def wanted(start: Callable[..., Session]) -> Callable[..., np.ndarray]:
    """What logits of every position of TOKENS have to be."""
    made: dict[tuple[str, int], np.ndarray] = {}

    def get(dtype: str, window: int = 0) -> np.ndarray:
        if (dtype, window) not in made:
            seq = start(KINDS["positional"], dtype, "primitives")
            for view in seq.cache.views:
                view.window = window
            made[dtype, window] = logits(seq, TOKENS)
        return made[dtype, window]

    return get


@pytest.fixture(scope="module")
def expected(start: Callable[..., Session]) -> Callable[..., np.ndarray]:
    """Logits of any tokens, as the positional cache gives them."""
    return lambda tokens, dtype="f16": logits(start(KINDS["positional"], dtype), tokens)


def logits(seq: Session, *parts: Sequence[int]) -> np.ndarray:
    return np.concatenate([rows for part in parts for rows in seq.run(part, all_logits=True)])


def singly(tokens: Sequence[int]) -> list[Sequence[int]]:
    return [[t] for t in tokens]


def same(got: np.ndarray, want: np.ndarray) -> bool:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    wrong = np.flatnonzero((got.view(np.uint32) != want.view(np.uint32)).any(axis=1))
    assert not len(wrong), f"rows {wrong} differ"
    return True


def contents(kv: cache.Cache) -> str:
    """Of all that a cache holds."""
    sha = hashlib.sha256()
    for layer in range(LAYERS):
        view = kv.view(layer)
        sha.update(repr((view.first, view.length, view.origin)).encode())
        if view.length > view.first:
            for rows in kv.ops.kv_rows(view):
                sha.update(kv.ops.numpy(rows).tobytes())
    return sha.hexdigest()


def other(tokens: Sequence[int]) -> list[int]:
    return [(t + 1) % VOCAB for t in tokens]


# ---- the same bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["simd", "parallel"])
@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_chunks_steps_and_truncation(kind, dtype, name, start, wanted):
    want, seq = wanted(dtype), start(KINDS[kind], dtype, name, chunk=7)
    assert same(logits(seq, TOKENS[:PROMPT], *singly(TOKENS[PROMPT:])), want)
    assert (seq.step is None) == (kind == "append")  # or the steps were not replayed
    for kept in (80, 64, 33, 16, 5, 0):
        seq.cache.truncate(kept)
        assert seq.cache.length == kept
        wrong = other(TOKENS[kept:])
        logits(seq, wrong[:-3], *singly(wrong[-3:]))
        seq.cache.truncate(kept)
        rest = TOKENS[kept:]
        assert same(logits(seq, *singly(rest[:2]), rest[2:-2], *singly(rest[-2:])), want[kept:])


@pytest.mark.parametrize("dtype", cache.DTYPES)
@pytest.mark.parametrize("level", [level for level, runs in native.levels().items() if runs])
def test_levels(level, dtype, path, start, wanted):
    decoder = registry.load(GGUFFile(path), native.NativeBackend("simd", level, 1))
    kv = paged(16)(decoder.ops, decoder.config, dtype)
    assert same(logits(Session(decoder, kv, chunk=9), TOKENS[:60], *singly(TOKENS[60:])), wanted(dtype))


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_reference_backend(kind, dtype, start, wanted):
    seq = start(KINDS[kind], dtype, "reference", chunk=9)
    assert same(logits(seq, TOKENS[:17], *singly(TOKENS[17:20])), wanted(dtype)[:20])


def test_dtypes_differ(wanted):
    f32, f16, q8_0 = (wanted(dtype) for dtype in ("f32", "f16", "q8_0"))
    assert 0 < np.abs(f16 - f32).max() < np.abs(q8_0 - f32).max() < 1


@pytest.mark.parametrize("dtype", cache.DTYPES)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, BIG])
def test_windows(window, block, dtype, start, wanted):
    want = wanted(dtype, window)
    assert (window < N) == (want.tobytes() != wanted(dtype).tobytes())
    for chunk, prompt in ((7, 40), (100, 60), (1, 84)):
        seq = start(paged(block, window=window), dtype, chunk=chunk)
        got = []
        for part in (TOKENS[:prompt], *singly(TOKENS[prompt:])):
            got.append(logits(seq, part))
            held = most_blocks(window, min(chunk, prompt), block)
            assert seq.cache.pool.in_use == len(seq.cache.table) <= min(held, -(-seq.cache.length // block))
        assert same(np.concatenate(got), want)
        assert seq.cache.length == N
        assert len(seq.cache.pool.memory) <= most_blocks(window, min(chunk, prompt), block)
        seq.cache.close()
        assert (seq.cache.length, seq.cache.pool.in_use) == (0, 0)
        assert same(logits(seq, TOKENS[:20]), want[:20])


def test_reference_backend_slides(start, wanted):
    seq = start(paged(16, window=17), "q8_0", "reference", chunk=20)
    assert same(logits(seq, TOKENS[:40], *singly(TOKENS[40:50])), wanted("q8_0", 17)[:50])
    assert seq.cache.views[0].origin < 0


def test_a_window_goes_back_as_far_as_it_holds(start, wanted):
    want, seq = wanted("f16", 17), start(paged(16, window=17))
    logits(seq, TOKENS[:50], *singly(TOKENS[50:60]))
    assert seq.cache.views[0].origin == -32  # token 59 sees 43 to 59
    before = contents(seq.cache)
    for length in (47, 20, 1):
        with pytest.raises(InputError, match=rf"length={length}: .* go back to 48 or more of 60, or to 0"):
            seq.cache.truncate(length)
    assert contents(seq.cache) == before
    for length in (70, 60, 55, 48):
        seq.cache.truncate(length)
        assert seq.cache.length == min(length, 60)
        if length < 60:
            assert same(logits(seq, *singly(TOKENS[length:60])), want[length:60])
    seq.cache.truncate(0)
    assert same(logits(seq, TOKENS), want)


# ---- sharing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cache.DTYPES)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("prefix", [16, 37, 64])
def test_forks_in_turns(prefix, block, dtype, start, expected):
    """The parent and its children, one of them a child's, go on token by token, each with its own."""
    parent = start(paged(block), dtype)
    pool = parent.cache.pool
    logits(parent, TOKENS[:prefix])
    blocks = pool.in_use
    family = [parent, start(parent.cache.fork()), start(parent.cache.fork())]
    assert pool.in_use == blocks  # nothing was copied
    tails = [[(t + i) % VOCAB for t in TOKENS[prefix : prefix + 20]] for i in range(4)]
    got: list[list[np.ndarray]] = [[] for _ in tails]
    for step in range(20):
        if step == 5:
            family.append(start(family[1].cache.fork()))
            tails[3][:5], got[3][:] = tails[1][:5], got[1]
        for i, seq in enumerate(family):
            got[i].append(logits(seq, [tails[i][step]]))
    for rows, tail in zip(got, tails, strict=True):
        assert same(np.concatenate(rows), expected(TOKENS[:prefix] + tail, dtype)[prefix:])
    whole, end = prefix // block, -(-(prefix + 20) // block)
    grandchild = 0 if (prefix + 5) // block == whole else (prefix + 5) // block - whole
    assert pool.in_use == whole + 4 * (end - whole) - grandchild
    for seq in family:
        seq.cache.close()
    assert pool.in_use == 0
    assert not any(pool.counts)


def test_the_last_writer_keeps_the_block(start, expected):
    first = start(paged(16))
    pool = first.cache.pool
    logits(first, TOKENS[:20])
    second = start(first.cache.fork())
    assert pool.counts == [2, 2]
    logits(first, [1])
    assert pool.counts == [2, 1, 1]
    assert same(logits(second, [2]), expected([*TOKENS[:20], 2])[-1:])
    assert pool.counts == [2, 1, 1]
    assert same(logits(first, [3]), expected([*TOKENS[:20], 1, 3])[-1:])


def test_write_into_a_shared_block_after_truncation(start, expected):
    """Blocks were full when they were shared; the parent goes back into the middle of one."""
    parent = start(paged(16))
    logits(parent, TOKENS[:48])
    child = start(parent.cache.fork())
    parent.cache.truncate(20)
    tail = other(TOKENS[20:40])
    assert same(logits(parent, tail), expected([*TOKENS[:20], *tail])[20:])
    assert same(logits(child, TOKENS[48:60]), expected(TOKENS[:60])[48:])


def test_fork_leaves_out_what_is_only_reserved(start, expected):
    parent = start(paged(16))
    logits(parent, TOKENS[:16])
    parent.cache.reserve(40)
    child = start(parent.cache.fork())
    assert parent.cache.pool.counts == [2, 1, 1, 1]
    for seq, token in ((parent, 1), (child, 2), (parent, 3), (child, 4)):
        logits(seq, [token])
    assert same(logits(parent, [5]), expected([*TOKENS[:16], 1, 3, 5])[-1:])
    assert same(logits(child, [6]), expected([*TOKENS[:16], 2, 4, 6])[-1:])


def test_forks_that_slide(start, wanted):
    want, parent = wanted("f16", 17), start(paged(16, window=17))
    got = [logits(parent, TOKENS[:40])]
    child = start(parent.cache.fork())
    got += [logits(parent, *singly(TOKENS[40:70]))]
    assert same(np.concatenate(got), want[:70])
    assert same(logits(child, *singly(TOKENS[40:])), want[40:])
    parent.cache.close()
    child.cache.close()
    assert parent.cache.pool.in_use == 0


def test_threads_over_one_pool(start, expected):
    """Each forks the prefix, goes on, and gives its blocks to the others, again and again."""
    parent = start(paged(16, blocks=3 + 4 * 4), name="parallel")
    logits(parent, TOKENS[:PROMPT])
    tails = [[(t + i) % VOCAB for t in TOKENS[PROMPT : PROMPT + 24]] for i in range(4)]
    want = [expected(TOKENS[:PROMPT] + tail)[PROMPT:] for tail in tails]
    forks = [[parent.cache.fork() for _ in range(5)] for _ in tails]
    failed: list[object] = []

    def go_on(i: int) -> None:
        try:
            for kv in forks[i]:
                assert same(logits(start(kv, name="parallel"), tails[i][:8], *singly(tails[i][8:])), want[i])
                kv.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=go_on, args=(i,)) for i in range(len(tails))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert parent.cache.pool.in_use == 3
    assert set(parent.cache.pool.counts) == {0, 1}


# ---- read-only ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), [*KINDS_AND_DTYPES, ("window", "f16"), ("window", "q8_0")])
def test_read_only(kind, dtype, start, wanted):
    """Candidates of several lengths, longer than a chunk, too, behind one prefix that stays."""
    make, want = (
        (paged(16, window=17), wanted(dtype, 17)) if kind == "window" else (KINDS[kind], wanted(dtype))
    )
    inner = start(make, dtype)
    frozen = start(cache.ReadOnlyCache(inner.cache), chunk=2)
    for prefix in (0, 16, 37, 60):
        logits(inner, TOKENS[inner.cache.length : prefix]) if prefix else None
        before = contents(inner.cache)
        for n in (5, 1, 20):
            assert frozen.cache.update_in_place(0, None, None) is None
            assert same(logits(frozen, TOKENS[prefix : prefix + n]), want[prefix : prefix + n])
            assert frozen.cache.length == inner.cache.length == prefix
            assert contents(inner.cache) == before
    frozen.cache.close()
    assert same(logits(inner, *singly(TOKENS[60:70])), want[60:70])


@pytest.mark.parametrize("path", ["llama"], indirect=True)
def test_read_only_llama(start, wanted):
    test_read_only("paged 16", "q8_0", start, wanted)


def test_read_only_over_another_backend(start, wanted):
    inner = start(KINDS["paged 16"], "q8_0", "reference")
    logits(inner, TOKENS[:20])
    frozen = start(cache.ReadOnlyCache(inner.cache), name="reference")
    assert same(logits(frozen, TOKENS[20:23]), wanted("q8_0")[20:23])


def test_read_only_generates_nothing(start):
    inner = start(KINDS["positional"])
    frozen = start(cache.ReadOnlyCache(inner.cache))
    with pytest.raises(InputError, match="read-only"):
        list(engine.generate(frozen, TOKENS[:4], 2, Sampling(), []))
    with pytest.raises(InputError, match="read-only"):
        engine.digest(frozen, TOKENS[:4], 1)
    assert len(list(engine.generate(frozen, TOKENS[:4], 1, Sampling(), []))) == 1
    assert inner.cache.length == 0
    with pytest.raises(ContextOverflowError, match="257 more do not fit into 256"):
        list(frozen.run([1] * 257))


# ---- room --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_context_overflow_changes_nothing(kind, start, wanted):
    seq = start(KINDS[kind], chunk=7)
    logits(seq, TOKENS[:20])
    before = contents(seq.cache)
    with pytest.raises(
        ContextOverflowError, match="20 tokens in the context and 237 more do not fit into 256"
    ):
        next(seq.run([1] * 237))
    assert contents(seq.cache) == before
    assert same(logits(seq, TOKENS[20:]), wanted("f16")[20:])
    list(seq.run([1] * (CONTEXT - N)))
    assert seq.cache.length == CONTEXT
    for step in (seq.step, None):  # replayed or not
        seq.step = step
        with pytest.raises(ContextOverflowError, match="256 tokens in the context and 1 more"):
            list(seq.run([1]))
        assert seq.cache.length == CONTEXT


@pytest.mark.parametrize("window", [0, BIG])
def test_a_full_pool_changes_nothing(window, start, wanted):
    seq = start(paged(16, blocks=3, window=window), chunk=7)
    logits(seq, TOKENS[:20])
    held, before = list(seq.cache.table), contents(seq.cache)
    if not window:  # what slides cannot know what it will need
        with pytest.raises(
            CacheFullError, match="2 more blocks of 16 tokens are needed, and 1 of the pool's 3"
        ):
            next(seq.run(TOKENS[20:49]))
        assert (seq.cache.table, contents(seq.cache)) == (held, before)
    got = [logits(seq, TOKENS[20:30], *singly(TOKENS[30:48]))]
    before, step = contents(seq.cache), seq.step
    for _ in range(2):
        with pytest.raises(CacheFullError, match="1 more blocks of 16 tokens are needed, and 0 of"):
            list(seq.run(TOKENS[48:49]))
        assert (seq.cache.length, seq.cache.pool.in_use, contents(seq.cache)) == (48, 3, before)
    assert seq.step is step
    seq.cache.truncate(40)
    got.append(logits(seq, TOKENS[40:48]))
    assert same(np.concatenate(got), np.concatenate([wanted("f16")[20:48], wanted("f16")[40:48]]))


def test_no_block_for_a_copy(start, expected):
    first = start(paged(16, blocks=2))
    logits(first, TOKENS[:20])
    second = start(first.cache.fork())
    for seq in (first, second):
        with pytest.raises(CacheFullError, match="1 more blocks"):
            logits(seq, [1])
        assert seq.cache.length == 20
    assert first.cache.pool.counts == [2, 2]
    second.cache.close()
    assert same(logits(first, [1]), expected([*TOKENS[:20], 1])[-1:])


def test_a_full_pool_of_sliding_sequences(start, wanted):
    """What one gives back in exchange is counted before it is given: two are enough for one that slides."""
    seq = start(paged(16, blocks=2, window=17))
    assert same(logits(seq, *singly(TOKENS[:80])), wanted("f16", 17)[:80])
    twin = seq.cache.fork()
    table, before = list(seq.cache.table), contents(seq.cache)
    with pytest.raises(CacheFullError, match="1 more blocks of 16 tokens are needed, and 0 of"):
        seq.cache.reserve(1)  # both would give the first block, but neither alone
    assert (seq.cache.table, contents(seq.cache)) == (table, before)
    twin.close()
    assert same(logits(seq, *singly(TOKENS[80:])), wanted("f16", 17)[80:])


def test_a_broken_run_gives_back_its_blocks(start, wanted):
    seq = start(paged(16), chunk=8)
    ops = seq.decoder.ops
    calls, swiglu = iter(range(1000)), ops.swiglu

    def interrupted(gate, up):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return swiglu(gate, up)

    ops.swiglu = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            logits(seq, TOKENS)
    finally:
        del ops.swiglu
    assert (seq.cache.length, seq.cache.pool.in_use) == (8, 1)
    assert same(logits(seq, TOKENS[8:]), wanted("f16")[8:])


def test_blocks_that_come_in_the_middle_of_replays(start, wanted):
    seq = start(paged(16))
    got = [logits(seq, TOKENS[:2]), logits(seq, TOKENS[2:3])]
    step = seq.step
    for token in TOKENS[3:]:
        got.append(logits(seq, [token]))
        assert seq.step is step is not None
        assert seq.cache.pool.in_use == -(-seq.cache.length // 16)
    assert same(np.concatenate(got), wanted("f16"))


def test_a_pool_claims_memory_as_it_is_used(start):
    seq = start(paged(16, blocks=1000), "q8_0")
    pool, row = seq.cache.pool, row_bytes("q8_0", HEAD_DIM)
    assert (pool.n_bytes, row) == (0, 34)
    logits(seq, TOKENS[:40])
    assert pool.n_bytes == 3 * 16 * 2 * LAYERS * KV_HEADS * row
    assert pool.n_bytes == sum(
        pool.ops.numpy(x).nbytes for block in pool.memory for pair in block for x in pair
    )
    seq.cache.close()
    logits(seq, TOKENS[:30])
    assert (len(pool.memory), pool.in_use) == (3, 2)  # used again


def test_a_forward_without_a_session(start, wanted):
    seq = start(KINDS["paged 16"])
    decoder, kv = seq.decoder, seq.cache
    decoder.forward(TOKENS[:20], kv)
    twin = kv.fork()
    decoder.forward(other(TOKENS[20:24]), twin)
    assert same(decoder.ops.numpy(decoder.forward(TOKENS[20:24], kv, last_only=False)), wanted("f16")[20:24])


# ---- by name -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*cache.KINDS, "sliding:17", "sliding:1000"])
def test_created_by_name(kind, start, wanted):
    seq = start(lambda ops, config, dtype: cache.create(kind, ops, config, N, dtype), chunk=8)
    assert seq.cache.kind == kind.partition(":")[0]
    want = wanted("f16", 17 if kind == "sliding:17" else 0)
    assert same(logits(seq, TOKENS[:-4], *singly(TOKENS[-4:])), want)
    with pytest.raises(ContextOverflowError):
        list(seq.run([1]))
    config = seq.decoder.config
    most = cache.most_bytes(kind, config, N, "f16", 8)
    if kind in ("append", "positional"):
        views = [seq.cache.view(layer) for layer in range(LAYERS)]
        ops = seq.decoder.ops
        assert most == sum(ops.numpy(x).nbytes for view in views for x in (*view.k, *view.v))
    else:
        assert most == seq.cache.pool.n_bytes


def test_a_window_bounds_memory(start):
    config = start(KINDS["append"]).decoder.config
    row = 2 * LAYERS * KV_HEADS * 2 * HEAD_DIM
    assert cache.most_bytes("sliding:1024", config, 100_000, "f16", 512) == row * 64 * (24 + 1)
    assert cache.most_bytes("sliding:1024", config, 100, "f16", 512) == row * 128
    assert cache.most_bytes("positional", config, 100, "f16", 512) == row * 112
    assert cache.most_bytes("append", config, 100, "q8_0", 512) == row * 100 * 17 // 32
    for window in (1, 2, 15, 16, 17, 33):
        for at_once in (1, 2, 15, 16, 17):
            spans = ((at + window - 1 + at_once - 1) // 16 - at // 16 + 1 for at in range(16))
            assert most_blocks(window, at_once, 16) == max(spans)


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("ring", "f16", "there is no KV cache 'ring'; there are append, positional, paged, sliding:WINDOW"),
        ("Paged", "f16", "there is no KV cache 'Paged'"),
        ("padded", "f16", "there is no KV cache 'padded'"),
        (None, "f16", "there is no KV cache None"),
        ("sliding", "f16", "KV cache 'sliding': give the window in tokens, as in sliding:1024"),
        ("sliding:0", "f16", "KV cache 'sliding:0': give the window"),
        ("sliding:-3", "f16", "'sliding:-3'"),
        ("sliding:1e3", "f16", "'sliding:1e3'"),
        ("sliding:٣", "f16", "give the window"),
        ("sliding:12 ", "f16", "give the window"),
        ("paged:3", "f16", "there is no KV cache 'paged:3'"),
        ("positional", "f8", "a KV cache does not store 'f8'; it stores f16, f32, q8_0"),
        ("positional", ["f16"], r"a KV cache does not store \['f16'\]"),
        ("append", "q8_0", "the KV cache append does not store q8_0; take f16 or f32, or another kind"),
    ],
)
def test_refused(kind, dtype, message, start):
    seq = start(KINDS["append"])
    with pytest.raises(InputError, match=message):
        cache.create(kind, seq.decoder.ops, seq.decoder.config, 16, dtype)


@pytest.mark.parametrize("other", [{"n_layers": 1}, {"n_kv_heads": 1}, {"head_dim": 64}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_made_for_another_model(kind, other, start):
    """Refused by a session, and by the cache itself, which would read past the rows."""
    decoder = start(KINDS[kind]).decoder
    config = replace(decoder.config, **other)
    kv = KINDS[kind](decoder.ops, config, "f16")
    with pytest.raises(InputError, match=r"the cache is for .*, the model has 2 layers of 2 KV heads of 32"):
        Session(decoder, kv)
    if "n_layers" not in other:
        for name in ("simd", "reference"):
            ops = start(KINDS[kind], name=name).decoder.ops
            kv = KINDS[kind](ops, config, "f16")
            rows = ops.zeros((3, KV_HEADS * HEAD_DIM))
            with pytest.raises(InputError, match=r"K \(3, 64\) and V \(3, 64\) are no rows of the"):
                kv.update_in_place(0, rows, rows)
            assert kv.length == 0


def test_queries_of_another_model(start):
    kv = start(KINDS["positional"]).cache
    rows, q = kv.ops.zeros((3, KV_HEADS * HEAD_DIM)), kv.ops.zeros((2, 4 * HEAD_DIM))
    view = kv.update_in_place(0, rows, rows)
    for bad in ({"q": kv.ops.zeros((2, 3 * HEAD_DIM))}, {"n_heads": 8}):
        with pytest.raises(InputError, match=r"q \(2, \d+\) is not \(2, \d+\)"):
            kv.ops.fused_attention(**{"q": q, "view": view, "n_heads": 4, "scale": 1.0} | bad)
    with pytest.raises(InputError, match=r"q \(2, 128\) is not \(3, 128\)"):
        kv.ops.batched_attention(q, [view], [3], 4, 1.0)


@pytest.mark.parametrize("chunk", [0, -5, True, 2.0])
def test_a_session_of_no_chunk(chunk, start):
    with pytest.raises(InputError, match=f"chunk={chunk}: give a whole number, at least 1"):
        start(KINDS["positional"], chunk=chunk)


def test_refused_when_made(start, tmp_path):
    seq = start(KINDS["append"])
    ops, config = seq.decoder.ops, seq.decoder.config
    for block in (0, 8, 24, 16.0, True):
        with pytest.raises(InputError, match=rf"block={block}: give a multiple of 16, at least 16"):
            cache.BlockPool(ops, config, 4, "f16", block=block)
    with pytest.raises(InputError, match="capacity=0: give a whole number, at least 1"):
        cache.BlockPool(ops, config, 0, "f16")
    with pytest.raises(InputError, match="pad=-1: give a whole number, at least 0"):
        cache.PaddedCache(ops, config, 16, "f16", -1)
    with pytest.raises(InputError, match="window=0: give a whole number, at least 1"):
        cache.SlidingCache(cache.BlockPool(ops, config, 4, "f16"), 16, 0)
    for kind in ("positional", "append"):
        with pytest.raises(InputError, match="capacity=-1: give a whole number, at least 1"):
            cache.create(kind, ops, config, -1, "f16")
    for make in KINDS.values():
        with pytest.raises(InputError, match="length=-1"):
            make(ops, config, "f16").truncate(-1)
    odd = write_tiny(tmp_path / "odd.gguf", head_dim=40, n_layers=1, n_vocab=VOCAB, tokenizer=False)
    config = Config.from_gguf(GGUFFile(odd))
    for kind in ("positional", "paged", "sliding:3"):
        with pytest.raises(InputError, match="q8_0 stores values by 32, and this model's heads have 40"):
            cache.create(kind, ops, config, 16, "q8_0")

"""Backend calls for one token, by op: a 28-layer Qwen3 with 16 query heads and 8 KV heads, tiny widths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from tiny import write_tiny

from pyinfer import backend, cache, engine
from pyinfer.backend import TracingBackend
from pyinfer.backend.base import Backend
from pyinfer.backend.reference import ReferenceBackend
from pyinfer.engine import Session
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry
from pyinfer.sampling import Sampling

LAYERS, HEADS, KV_HEADS = 28, 16, 8
WEIGHTS = 7 * LAYERS + 1  # matmuls of a layer: q, k, v, attn_output, gate, up, down; and the output head
NORMS = (
    LAYERS * (2 + HEADS + KV_HEADS) + 1
)  # of a layer's input twice and of each head of q and k; before the output head

# A decode step, the second forward after a one-token prompt, when attention is a loop over heads.
PRIMITIVES = {
    "copy_2d_from_cols": 3 * LAYERS * HEADS
    + LAYERS * (HEADS + KV_HEADS),  # q, k and v of a head; heads to norm
    "hadamard": 2 * NORMS + LAYERS,
    "reshape_data": 2 * NORMS,
    "scale": NORMS + LAYERS * HEADS,
    "copy_2d_into_cols": LAYERS * HEADS + LAYERS * (HEADS + KV_HEADS),
    "matmul": WEIGHTS + 2 * LAYERS * HEADS,
    "sum_squares_axis": NORMS,
    "rsqrt_elem": NORMS,
    "repeat_row_as_matrix": NORMS,
    "broadcast_row_scalars": NORMS,
    "add_scalar": NORMS,
    "softmax_rows": LAYERS * HEADS,
    "transpose_2d": LAYERS * HEADS,
    "concat_dim0": 2 * LAYERS,
    "apply_rope": 2 * LAYERS,
    "add": 2 * LAYERS,
    "silu": LAYERS,
    "gather_rows": 1,
}
# The same in numbers, as the engine that set this table counted them: 13,091 in all. Where ours differ: its
# apply_rope_single_row is apply_rope here; its copy_row_2d, of the last row, is not needed for one row;
# its argmax_with_prob and the 449th softmax_rows belong to the sampler (see test_the_samplers_softmax).
TABLE = {
    "copy_2d_from_cols": 2016,
    "hadamard": 1486,
    "reshape_data": 1458,
    "scale": 1177,
    "copy_2d_into_cols": 1120,
    "matmul": 1093,
    "sum_squares_axis": 729,
    "rsqrt_elem": 729,
    "repeat_row_as_matrix": 729,
    "broadcast_row_scalars": 729,
    "add_scalar": 729,
    "softmax_rows": 448,
    "transpose_2d": 448,
    "concat_dim0": 56,
    "apply_rope": 56,
    "add": 56,
    "silu": 28,
    "gather_rows": 1,
}
PER_HEAD = LAYERS * HEADS
FUSED = (
    Counter(TABLE)
    - Counter(
        copy_2d_from_cols=3 * PER_HEAD,
        transpose_2d=PER_HEAD,
        matmul=2 * PER_HEAD,
        scale=PER_HEAD,
        softmax_rows=PER_HEAD,
        copy_2d_into_cols=PER_HEAD,
    )
    + Counter(fused_attention=LAYERS)
)
FINER = ("matmul_many", "matmul_add", "swiglu", "rms_norm", "rms_norm_heads")  # coarse ops but attention

Forwards = Callable[..., tuple[Session, TracingBackend]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Forwards:
    path = write_tiny(
        tmp_path_factory.mktemp("counts") / "tiny.gguf",
        n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=8, d_model=16, d_ff=24, n_vocab=31,
        tokenizer=False,
    )  # fmt: skip

    def make(ops: Backend, kv: str = "append", dtype: str = "f32") -> tuple[Session, TracingBackend]:
        ops = TracingBackend(ops)
        decoder = registry.load(GGUFFile(path), ops)
        return Session(decoder, cache.create(kv, ops, decoder.config, 16, dtype)), ops

    return make


def decode_step(seq: Session, ops: TracingBackend) -> Counter[str]:
    """Counts of the second forward, after a one-token prompt."""
    list(seq.run([3]))
    ops.counts.clear()
    list(seq.run([5]))
    return Counter(ops.counts)


def test_table_adds_up():
    assert PRIMITIVES == TABLE
    assert sum(TABLE.values()) == 13_091 - 3  # copy_row_2d, argmax_with_prob, the sampler's softmax_rows
    assert sum(FUSED.values()) == 9_087 - 3


@pytest.mark.parametrize("name", ["reference", "scalar", "simd", "parallel"])
def test_default_attention(name, traced):
    counts = decode_step(*traced(backend.unfused(backend.create(name), "fused_attention", *FINER)))
    assert counts == TABLE
    assert (counts["matmul"], counts["transpose_2d"], counts["softmax_rows"]) == (1093, 448, 448)


@pytest.mark.parametrize("name", ["scalar", "simd", "parallel"])
def test_fused_attention(name, traced):
    counts = decode_step(*traced(backend.unfused(backend.create(name), *FINER)))
    assert counts == FUSED
    assert (counts["matmul"], counts["fused_attention"]) == (197, 28)
    assert not counts.keys() & {"transpose_2d", "softmax_rows"}


def test_only_attention_unfused(traced):
    """Coarse ops that stay are counted as themselves: of 197 weight matmuls one is left bare."""
    counts = decode_step(*traced(backend.unfused(backend.create("simd"), "fused_attention")))
    assert counts["matmul"] == 1 + 2 * PER_HEAD
    assert counts["matmul_many"] + counts["matmul_add"] + counts["swiglu"] == (2 + 2 + 1) * LAYERS
    assert 3 * LAYERS + 2 * LAYERS + counts["matmul_add"] + 1 == WEIGHTS


def test_as_it_runs(traced):
    """All that the native backends fuse."""
    counts = decode_step(*traced(backend.create("simd")))
    assert counts == {
        "gather_rows": 1,
        "rms_norm": 2 * LAYERS + 1,
        "rms_norm_heads": 2 * LAYERS,
        "matmul_many": 2 * LAYERS,
        "apply_rope": 2 * LAYERS,
        "concat_dim0": 2 * LAYERS,
        "fused_attention": LAYERS,
        "matmul_add": 2 * LAYERS,
        "swiglu": LAYERS,
        "matmul": 1,
    }


@pytest.mark.parametrize(
    ("kv", "dtype", "instead"),
    [
        ("append", "f16", {"concat_dim0": 2 * LAYERS, "narrow_f16": 2 * LAYERS}),
        ("positional", "f32", {"kv_write": LAYERS}),
        ("positional", "f16", {"kv_write": LAYERS}),
        ("paged", "f16", {"kv_write": LAYERS}),
        ("sliding:8", "f16", {"kv_write": LAYERS}),
    ],
)
def test_other_caches(kv, dtype, instead, traced):
    counts = decode_step(*traced(backend.unfused(backend.create("simd"), *FINER), kv, dtype))
    assert counts == FUSED - Counter(concat_dim0=2 * LAYERS) + Counter(instead)


def test_the_samplers_softmax(traced):
    """With log-probabilities, a step of generation has the 449 softmax_rows of the table's engine."""
    seq, ops = traced(backend.unfused(backend.create("simd"), "fused_attention", *FINER))
    steps = engine.generate(seq, [3], 2, Sampling(), [], logprobs=True)
    next(steps)
    ops.counts.clear()
    next(steps)
    assert ops.counts == {**TABLE, "softmax_rows": 449}


def test_tracing_changes_nothing(traced):
    seq, ops = traced(backend.create("simd"))
    (with_trace,) = seq.run([3, 5, 7])
    assert (ops.name, ops.threads, ops.kernels()) == ("simd", 1, ops.inner.kernels())
    seq.cache.truncate(0)
    seq.decoder.ops = seq.cache.ops = ops.inner  # the same weights, without the wrapper
    before = Counter(ops.counts)
    (without,) = seq.run([3, 5, 7])
    assert ops.counts == before
    assert with_trace.tobytes() == without.tobytes()


def test_report():
    ops = TracingBackend(ReferenceBackend())
    assert ops.report() == "[REFERENCE] op invocation counts (total 0):"
    x = ops.tensor([[1.0, 2.0]])
    ops.silu(ops.add(x, ops.add(x, x)))
    ops.swiglu(x, x)  # at its default: a silu and a hadamard
    assert ops.report() == "[REFERENCE] op invocation counts (total 5):\n  add: 2\n  hadamard: 1\n  silu: 2"

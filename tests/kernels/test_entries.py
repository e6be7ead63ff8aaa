"""Every C entry looks at what it is given: a bad argument is an error code, never a crash."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernels.harness import TYPES, Native, ffi, lib, raw_weight

NULL = ffi.NULL
HUGE = 2**63 - 1
ROWS, COLS = 17, 64


class Given:
    """A good call of every entry, and the storage it needs."""

    def __init__(self, level: str) -> None:
        self.native = Native(level)
        self.c = self.native.ctx
        self.raw = raw_weight("Q8_0", "random", ROWS, COLS, 1)
        self.src = ffi.from_buffer(self.raw)
        self.w = self.native.weight("Q8_0", self.raw, ROWS, COLS).ptr
        self.other = self.native.weight("F32", raw_weight("F32", "random", 5, 32, 1), 5, 32).ptr
        self.x, self.z, self.w1 = (ffi.new("float[]", [1.0] * 4096) for _ in range(3))
        self.y, self.y1, self.y2 = (ffi.new("float[]", 4096) for _ in range(3))
        self.k_blocks, self.v_blocks = (ffi.new("void *[]", [p, p + 256]) for p in (self.z, self.w1))
        self.views: tuple[Any, ...] = ()
        self.h = ffi.new("uint16_t[]", 4096)
        self.ids = ffi.new("int32_t[]", [0, ROWS - 1])
        self.out = ffi.new("pi_weight **")
        self.stripe, self.starts, self.n, self.sum = (
            ffi.new("char[]", 1 << 16),
            ffi.new("int64_t[]", 9),
            ffi.new("int64_t *"),
            ffi.new("uint64_t *"),
        )

    def view(self, **changed: Any) -> Any:
        """Tiles of two KV heads of 8 dimensions: 32 tokens in two blocks, 20 of them written. Or rows."""
        tiles = changed.get("layout", lib.PI_TILES) == lib.PI_TILES
        v = ffi.new("pi_kv_view *")
        v.k, v.v = self.k_blocks, self.v_blocks
        v.block, v.head_stride, v.row_stride = (16, 512, 0) if tiles else (32, 32, 64)
        v.length, v.capacity, v.dtype, v.n_kv_heads, v.head_dim = 20, 32, lib.PI_F32, 2, 8
        v.layout = lib.PI_TILES
        for name, value in changed.items():
            setattr(v, name, value)
        return v

    def sequences(self, *views: Any) -> Any:
        self.views = views  # kept alive
        return ffi.new("pi_kv_view *[]", views)

    def attention(self, views: list[Any], tokens: list[int], unit_of: int = lib.PI_UNIT_GROUP) -> list[Any]:
        counts = ffi.new("int64_t[]", tokens)
        return [self.c, self.x, len(tokens), self.sequences(*views), counts, 4, 0.5, unit_of, 1, self.y]

    def memory(self) -> list[bytes]:
        """What an entry may write to."""
        floats = (self.x, self.z, self.w1, self.y, self.y1, self.y2)
        buffers = (*floats, self.h, self.starts, self.n, self.sum, self.out)
        return [bytes(ffi.buffer(x)) for x in (*buffers, *filter(None, self.views))]

    def refuses(self, entry: str, args: list[Any], code: int = lib.PI_EINVAL) -> bool:
        """Whether the entry returns that code and writes nothing."""
        of_view = ffi.typeof("pi_kv_view *")
        self.views += tuple(a for a in args if isinstance(a, ffi.CData) and ffi.typeof(a) is of_view and a)
        before = self.memory()
        return getattr(lib, entry)(*args) == code and self.memory() == before

    def good(self) -> dict[str, list[Any]]:
        c, x, z, y = self.c, self.x, self.z, self.y
        return {
            "pi_weight_new": [c, lib.PI_Q8_0, ROWS, COLS, self.src, self.raw.nbytes, 1, self.out],
            "pi_gather_rows": [c, self.w, self.ids, 2, y],
            "pi_matmul": [c, self.w, self.w, self.w, x, 2, z, y, self.y1, self.y2],
            "pi_matmul_rows": [c, x, z, 3, 4, 5, y],
            "pi_attention": self.attention([self.view()], [2]),
            "pi_kv_write": [c, self.view(), x, x, 2],
            "pi_softmax_rows": [c, x, 3, 5, y],
            "pi_rms_norm": [c, x, z, 3, 5, 0.5, y],
            "pi_swiglu": [c, x, z, 9, y],
            "pi_silu": [c, x, 9, y],
            "pi_exp": [c, x, 9, y],
            "pi_add": [c, x, z, 9, y],
            "pi_hadamard": [c, x, z, 9, y],
            "pi_sum_squares": [c, x, 3, 5, y],
            "pi_narrow_f16": [c, x, 9, self.h],
            "pi_widen_f16": [c, self.h, 9, y],
            "pi_rope": [c, x, 2, 3, 8, 6, 1, z, z, 4, 2, y],
            "pi_rope_table": [3, 4, 6, 10000.0, 1.0, NULL, y, self.y1],
            "pi_string_starts": [self.stripe, 1 << 16, 8, self.starts, self.n],
            "pi_measure_read": [c, self.stripe, 1 << 16, self.sum],
            "pi_measure_multiply": [c, lib.PI_F32, 2, 3, self.n],
        }


@pytest.fixture(scope="module")
def given() -> Given:
    return Given("ref")


ENTRIES = [name for name in dir(lib) if name.startswith("pi_")]
OPS = list(Given("ref").good())
CONTEXT = ("new", "free", "level", "threads", "scramble", "regions", "spans", "op_times", "kernel_level")
OPTIONAL = {("pi_rope_table", 5), ("pi_matmul", 3), ("pi_matmul", 6)}  # pointers that may be NULL

# entry -> {argument: values that are wrong there}
WRONG: dict[str, dict[int, list[Any]]] = {
    "pi_weight_new": {
        2: [0, -1, 16, 18, 2**31, HUGE],
        3: [0, -32, 1, 33, 32, 2**31, HUGE],
        5: [0, -1, ROWS * 68 - 1, HUGE],
    },
    "pi_gather_rows": {3: [-1]},
    "pi_matmul": {5: [-1]},
    "pi_matmul_rows": {3: [-1], 4: [-1], 5: [-1]},
    "pi_attention": {
        2: [0, -1, 2**16 + 1, HUGE],
        5: [0, -2, 1, 3, 5, 4098, 2**31 - 2],
        7: [-1, 3, 2**31 - 1],
        8: [0, -1, -(2**31)],
    },
    "pi_kv_write": {4: [-1, 13, HUGE]},
    "pi_softmax_rows": {2: [-1], 3: [-1]},
    "pi_rms_norm": {3: [-1], 4: [-1, 0]},
    "pi_swiglu": {3: [-1]},
    "pi_silu": {2: [-1]},
    "pi_exp": {2: [-1]},
    "pi_add": {3: [-1]},
    "pi_hadamard": {3: [-1]},
    "pi_sum_squares": {2: [-1], 3: [-1]},
    "pi_narrow_f16": {2: [-1]},
    "pi_widen_f16": {2: [-1]},
    "pi_rope": {
        2: [-1],
        3: [0, -1],
        4: [0, 1, 4, -8],
        5: [0, 1, 3, 10, -2],
        9: [-1, 0, 3],
        10: [-1, 3, HUGE],
    },
    "pi_rope_table": {
        0: [-1, 2**32 - 3, HUGE],
        1: [-1, 2**32 - 2, HUGE],
        2: [0, 1, 7, -2, 4098],
        3: [1.0, 0.0, -5.0, 2.0**100, math.inf, math.nan],
        4: [0.0, -1.0, math.inf, math.nan],
    },
    "pi_string_starts": {1: [-1], 2: [-1]},
    "pi_measure_read": {2: [-1, 1, (1 << 16) - 1]},
    "pi_measure_multiply": {1: [lib.PI_F16, 99], 2: [-1], 3: [-1, HUGE]},
}


@pytest.mark.parametrize("entry", OPS)
def test_a_good_call_succeeds(given: Given, entry: str) -> None:
    assert getattr(lib, entry)(*given.good()[entry]) == lib.PI_OK
    if entry == "pi_weight_new":
        lib.pi_weight_free(given.out[0])


def test_every_op_is_here() -> None:
    assert set(WRONG) == set(OPS)
    asking = {
        "pi_numerics",
        "pi_level_count",
        "pi_level_name",
        "pi_level_available",
        "pi_kernel_count",
        "pi_kernel_name",
        "pi_clock",
    }
    contexts = {f"pi_ctx_{what}" for what in CONTEXT}
    assert set(ENTRIES) == set(OPS) | asking | contexts | {
        "pi_weight_free",
        "pi_weight_bytes",
        "pi_weight_memory",
    }


@pytest.mark.parametrize("entry", OPS)
def test_null(given: Given, entry: str) -> None:
    pointers = 0
    for i, value in enumerate(given.good()[entry]):
        if isinstance(value, ffi.CData) and (entry, i) not in OPTIONAL:
            args = given.good()[entry]
            args[i] = NULL
            pointers += 1
            assert given.refuses(entry, args), f"argument {i} of {entry}"
    assert pointers > 0


@pytest.mark.parametrize(("entry", "i"), [(entry, i) for entry in OPS for i in WRONG[entry]])
def test_wrong_numbers(given: Given, entry: str, i: int) -> None:
    for value in WRONG[entry][i]:
        args = given.good()[entry]
        args[i] = value
        assert given.refuses(entry, args), f"argument {i} of {entry} is {value}"


IN_ROWS = {"layout": lib.PI_ROWS}
IN_Q8_0 = {"dtype": lib.PI_Q8_0, "head_dim": 32, "head_stride": 1024}
FINE_VIEWS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": HUGE},
    {"first": 18},
    {"capacity": 22},
    {"row_stride": -1},
    {"head_stride": 516},
    {"dtype": lib.PI_F16, "head_stride": 258},
    IN_ROWS,
    IN_ROWS | {"block": HUGE},
    IN_ROWS | {"head_stride": 36, "row_stride": 76},
    IN_Q8_0,
    IN_Q8_0 | {"head_stride": 544},
]
WRONG_VIEWS: list[dict[str, Any]] = [
    {"k": NULL},
    {"v": NULL},
    {"block": 0},
    {"block": -16},
    {"block": 8},
    {"block": 17},
    {"block": 32},
    {"block": 2**63 - 16},
    {"block": -(2**63)},
    {"head_stride": 511},
    {"head_stride": 513},
    {"head_stride": 514},
    {"head_stride": -512},
    {"head_stride": 2**62},
    {"head_stride": -(2**63)},
    {"first": -1},
    {"first": 21},
    {"first": HUGE},
    {"first": -(2**63)},
    {"length": -1},
    {"length": 33},
    {"length": HUGE},
    {"length": -(2**63)},
    {"capacity": 19},
    {"capacity": -16},
    {"capacity": 2**31},
    {"capacity": 2**63 - 16, "head_stride": HUGE - 3},
    {"capacity": HUGE, "length": HUGE - 20},
    {"capacity": HUGE, "length": HUGE - 20, "first": HUGE - 100},
    {"length": -1, "capacity": 2**63 - 16},
    {"window": -1},
    {"window": -(2**63)},
    {"layout": 2},
    {"layout": -1},
    {"dtype": 2},
    {"dtype": -1},
    {"dtype": lib.PI_BF16},
    {"dtype": lib.PI_Q8_0},
    {"dtype": lib.PI_F16, "head_stride": 257},
    {"n_kv_heads": 0},
    {"n_kv_heads": -2},
    {"n_kv_heads": 4097},
    {"n_kv_heads": 2**31 - 1},
    {"head_dim": 0},
    {"head_dim": -8},
    {"head_dim": 9},
    {"head_dim": 1025, "head_stride": 2**20},
    {"head_dim": 2**31 - 1, "head_stride": 2**40},
    IN_Q8_0 | {"head_dim": 48},
    IN_Q8_0 | {"head_stride": 543},
    IN_Q8_0 | {"head_stride": 542},
    IN_Q8_0 | IN_ROWS | {"row_stride": 2048},
    IN_ROWS | {"block": 31},
    IN_ROWS | {"block": 0},
    IN_ROWS | {"head_stride": 28},
    IN_ROWS | {"head_stride": 34, "row_stride": 72},
    IN_ROWS | {"head_stride": HUGE - 3},
    IN_ROWS | {"row_stride": 60},
    IN_ROWS | {"row_stride": 66},
    IN_ROWS | {"row_stride": 2**60},
    IN_ROWS | {"row_stride": -64},
]


def with_view(given: Given, entry: str, changed: dict[str, Any]) -> list[Any]:
    view = given.view(**changed)
    args = given.good()[entry]
    return given.attention([view], [2]) if entry == "pi_attention" else [args[0], view, *args[2:]]


@pytest.mark.parametrize("changed", FINE_VIEWS, ids=str)
@pytest.mark.parametrize("entry", ["pi_attention", "pi_kv_write"])
def test_fine_views(given: Given, entry: str, changed: dict[str, Any]) -> None:
    """What the wrong ones differ from."""
    assert getattr(lib, entry)(*with_view(given, entry, changed)) == lib.PI_OK


@pytest.mark.parametrize("changed", WRONG_VIEWS, ids=str)
@pytest.mark.parametrize("entry", ["pi_attention", "pi_kv_write"])
def test_wrong_views(given: Given, entry: str, changed: dict[str, Any]) -> None:
    assert given.refuses(entry, with_view(given, entry, changed))


def test_kv_write_moves_the_length_on_once(given: Given) -> None:
    view = given.view(length=15)
    assert lib.pi_kv_write(given.c, view, given.x, given.x, 17) == lib.PI_OK
    assert view.length == 32
    assert given.refuses("pi_kv_write", [given.c, view, given.x, given.x, 1])


def test_wrong_sequences(given: Given) -> None:
    """In the first place or a later one."""
    g, fine = given, given.view()
    for tokens in (0, -1, 21, HUGE, -(2**63)):
        assert g.refuses("pi_attention", g.attention([fine], [tokens]))
        assert g.refuses("pi_attention", g.attention([fine, fine], [2, tokens]))
    assert g.refuses("pi_attention", g.attention([g.view(first=10)], [11]))
    assert g.refuses("pi_attention", g.attention([g.view(length=0)], [1]))
    assert g.refuses("pi_attention", g.attention([fine, NULL], [1, 1]))
    assert g.refuses("pi_attention", g.attention([NULL, fine], [1, 1]))
    for other in ({"n_kv_heads": 1}, {"head_dim": 7}, {"head_dim": 4}, {"window": -1}, {"k": NULL}):
        assert g.refuses("pi_attention", g.attention([fine, g.view(**other)], [1, 1]))
    assert g.refuses("pi_attention", g.attention([fine, fine], [1, 2], lib.PI_UNIT_SPLIT))
    for unit_of in (lib.PI_UNIT_GROUP, lib.PI_UNIT_HEAD, lib.PI_UNIT_SPLIT):
        assert lib.pi_attention(*g.attention([fine, g.view(**IN_ROWS)], [1, 1], unit_of)) == lib.PI_OK


def refused(f: Callable[..., int], *args: Any) -> None:
    assert f(*args) == lib.PI_EINVAL


def test_wrong_ids(given: Given) -> None:
    for bad in (-1, ROWS, 2**31 - 1, -(2**31)):
        for ids in ([bad], [0, bad], [bad, 0]):
            refused(lib.pi_gather_rows, given.c, given.w, ffi.new("int32_t[]", ids), len(ids), given.y)


def test_matrices_that_do_not_go_together(given: Given) -> None:
    g = given
    refused(lib.pi_matmul, g.c, g.w, g.other, NULL, g.x, 1, NULL, g.y, g.y1, NULL)
    refused(lib.pi_matmul, g.c, g.w, g.w, g.other, g.x, 1, NULL, g.y, g.y1, g.y2)
    refused(lib.pi_matmul, g.c, g.w, NULL, g.w, g.x, 1, NULL, g.y, g.y1, g.y2)


def test_outputs_that_lie_on_inputs(given: Given) -> None:
    """Where a result may be written before an input is read, one buffer cannot be both."""
    g = given
    refused(lib.pi_rope, g.c, g.x, 2, 3, 8, 6, 1, g.z, g.z, 2, 0, g.x)
    refused(lib.pi_matmul, g.c, g.w, NULL, NULL, g.x, 2, g.y, g.y, NULL, NULL)


def test_rope_factors_that_are_no_divisors(given: Given) -> None:
    for bad in (0.0, -1.0, math.inf, math.nan):
        refused(lib.pi_rope_table, 0, 1, 4, 10000.0, 1.0, ffi.new("float[]", [1.0, bad]), given.y, given.y1)


def test_unknown_weight_types(given: Given) -> None:
    for bad in {-1, 2, 9, 10**6, -(2**31)} - set(TYPES.values()):
        args = given.good()["pi_weight_new"]
        args[1] = bad
        assert lib.pi_weight_new(*args) == lib.PI_ETYPE


def test_a_size_that_overflows(given: Given) -> None:
    """(2^31 - 1)^2 float32 are 4 - 2^34 bytes modulo 2^64."""
    n = 2**31 - 1
    refused(lib.pi_weight_new, given.c, lib.PI_F32, n, n, given.src, 4 - 2**34, 1, given.out)


def test_contexts() -> None:
    for threads in (0, -1, 1025, 2**31 - 1):
        assert lib.pi_ctx_new(NULL, threads) == NULL
    lib.pi_ctx_free(NULL)
    lib.pi_weight_free(NULL)


def test_questions_about_nothing(given: Given) -> None:
    for i in (-1, 10**6):
        assert lib.pi_level_name(i) == NULL
        assert not lib.pi_level_available(i)
        assert lib.pi_kernel_name(i) == NULL
        assert lib.pi_ctx_kernel_level(given.c, i) == NULL
    assert lib.pi_ctx_level(NULL) == NULL
    assert lib.pi_ctx_kernel_level(NULL, 0) == NULL
    assert lib.pi_ctx_threads(NULL) == 0
    assert lib.pi_weight_bytes(NULL) == 0
    assert lib.pi_ctx_regions(NULL) == 0
    lib.pi_ctx_scramble(NULL, 1)


def test_times(given: Given) -> None:
    """What is asked for traces: never more than was noted or than there is room, and the last ops' times."""
    c, out = given.c, ffi.new("int64_t[]", 64)
    assert lib.pi_ctx_spans(NULL, out, 1, 1) == 0
    assert lib.pi_ctx_spans(c, NULL, 1, 1) == 0
    assert lib.pi_ctx_spans(c, out, -1, 0) == 0
    assert lib.pi_ctx_spans(c, out, 20, -1) == 0
    for bad in ((NULL, out, 1), (c, NULL, 1), (c, out, -1), (c, out, 2**62)):
        assert lib.pi_ctx_op_times(*bad) == lib.PI_EINVAL
    assert lib.pi_ctx_op_times(c, out, 3) == lib.PI_OK
    assert list(out[0:6]) == [0] * 6
    start = lib.pi_clock()
    for _ in range(5):
        lib.pi_exp(c, given.x, 5, given.y)
    assert lib.pi_ctx_op_times(c, out, 3) == lib.PI_OK
    assert lib.pi_ctx_op_times(c, out, 3) == lib.PI_OK  # asking is no op
    times = list(out[0:6])
    slack = 50_000  # of two clocks held against each other over a moment
    assert times == sorted(times)
    assert start - slack <= times[0]
    assert times[5] <= lib.pi_clock() + slack
    assert lib.pi_ctx_op_times(c, NULL, 0) == lib.PI_OK


def test_nothing_to_do_is_no_error(given: Given) -> None:
    c, x, y = given.c, given.x, given.y
    y[0] = 7.0
    assert lib.pi_matmul(c, given.w, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL) == lib.PI_OK
    assert lib.pi_gather_rows(c, given.w, NULL, 0, NULL) == lib.PI_OK
    assert lib.pi_exp(c, NULL, 0, NULL) == lib.PI_OK
    assert lib.pi_softmax_rows(c, x, 0, 5, y) == lib.PI_OK
    assert lib.pi_softmax_rows(c, x, 5, 0, y) == lib.PI_OK
    assert lib.pi_rms_norm(c, x, x, 0, 5, 0.5, y) == lib.PI_OK
    assert lib.pi_matmul_rows(c, x, x, 0, 3, 4, y) == lib.PI_OK
    assert lib.pi_rope(c, x, 0, 1, 4, 4, 0, x, x, 0, 0, y) == lib.PI_OK
    assert lib.pi_rope_table(0, 0, 4, 10000.0, 1.0, NULL, NULL, NULL) == lib.PI_OK
    assert y[0] == 7.0


def test_nan_and_infinity_do_not_crash(native: Native) -> None:
    """No byte is promised of them."""
    rng = np.random.default_rng(1)
    x = rng.choice(np.array([np.nan, np.inf, -np.inf, 1.0], np.float32), 4096)
    g = Given(native.level)
    ffi.memmove(g.x, x, x.nbytes)
    for entry, args in g.good().items():
        assert getattr(lib, entry)(*args) == lib.PI_OK

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
        self.h = ffi.new("uint16_t[]", 4096)
        self.ids = ffi.new("int32_t[]", [0, ROWS - 1])
        self.out = ffi.new("pi_weight **")
        self.stripe, self.n, self.sum = (
            ffi.new("char[]", 1 << 16),
            ffi.new("int64_t *"),
            ffi.new("uint64_t *"),
        )

    def view(self, **changed: Any) -> Any:
        """Tiles of two KV heads of 8 dimensions: 32 tokens, 20 of them written."""
        layout = changed.get("layout", lib.PI_TILES)
        v = ffi.new("pi_kv_view *")
        v.k, v.v = self.z, self.w1
        v.head_stride, v.row_stride = (256, 8) if layout == lib.PI_TILES else (8, 16)
        v.length, v.capacity, v.layout, v.dtype, v.n_kv_heads, v.head_dim = 20, 32, layout, lib.PI_F32, 2, 8
        for name, value in changed.items():
            setattr(v, name, value)
        return v

    def good(self) -> dict[str, list[Any]]:
        c, x, z, y = self.c, self.x, self.z, self.y
        return {
            "pi_weight_new": [c, lib.PI_Q8_0, ROWS, COLS, self.src, self.raw.nbytes, 1, self.out],
            "pi_gather_rows": [c, self.w, self.ids, 2, y],
            "pi_matmul": [c, self.w, self.w, self.w, x, 2, z, y, self.y1, self.y2],
            "pi_matmul_rows": [c, x, z, 3, 4, 5, y],
            "pi_attention": [c, x, 2, 4, self.view(), 0.5, y],
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
            "pi_measure_read": [c, self.stripe, 1 << 16, self.sum],
            "pi_measure_multiply": [c, lib.PI_F32, 2, 3, self.n],
        }


@pytest.fixture(scope="module")
def given() -> Given:
    return Given("ref")


ENTRIES = [name for name in dir(lib) if name.startswith("pi_")]
OPS = list(Given("ref").good())
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
    "pi_attention": {2: [0, -1, 21], 3: [0, -2, 1, 3, 5]},
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
    }
    contexts = {"pi_ctx_new", "pi_ctx_free", "pi_ctx_level", "pi_ctx_threads", "pi_ctx_kernel_level"}
    assert set(ENTRIES) == set(OPS) | asking | contexts | {"pi_weight_free", "pi_weight_bytes"}


@pytest.mark.parametrize("entry", OPS)
def test_null(given: Given, entry: str) -> None:
    pointers = 0
    for i, value in enumerate(given.good()[entry]):
        if isinstance(value, ffi.CData) and (entry, i) not in OPTIONAL:
            args = given.good()[entry]
            args[i] = NULL
            pointers += 1
            assert getattr(lib, entry)(*args) == lib.PI_EINVAL, f"argument {i} of {entry}"
    assert pointers > 0


@pytest.mark.parametrize(("entry", "i"), [(entry, i) for entry in OPS for i in WRONG[entry]])
def test_wrong_numbers(given: Given, entry: str, i: int) -> None:
    for value in WRONG[entry][i]:
        args = given.good()[entry]
        args[i] = value
        assert getattr(lib, entry)(*args) == lib.PI_EINVAL, f"argument {i} of {entry} is {value}"


@pytest.mark.parametrize(
    "changed",
    [
        {"k": NULL},
        {"v": NULL},
        {"length": -1},
        {"length": 33},
        {"length": HUGE},
        {"length": -(2**63)},
        {"capacity": 19},
        {"capacity": 33},
        {"capacity": -16},
        {"capacity": 2**63 - 16, "head_stride": HUGE},
        {"length": -1, "capacity": 2**63 - 16},
        {"head_stride": 255},
        {"head_stride": -256},
        {"layout": 2},
        {"layout": -1},
        {"dtype": 2},
        {"dtype": lib.PI_Q8_0},
        {"n_kv_heads": 0},
        {"n_kv_heads": -2},
        {"head_dim": 0},
        {"head_dim": -8},
        {"layout": lib.PI_ROWS, "head_stride": 7},
        {"layout": lib.PI_ROWS, "row_stride": 15},
        {"layout": lib.PI_ROWS, "head_stride": HUGE},
    ],
    ids=str,
)
@pytest.mark.parametrize("entry", ["pi_attention", "pi_kv_write"])
def test_wrong_views(given: Given, entry: str, changed: dict[str, Any]) -> None:
    args = given.good()[entry]
    at = 4 if entry == "pi_attention" else 1
    args[at] = given.view(**changed)
    assert getattr(lib, entry)(*args) == lib.PI_EINVAL


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

# ruff: noqa: E501 (the sources of kernels)
"""The stand-in for Metal: that it computes, that it refuses what Metal refuses, and that it shows what a GPU may or may not show.

Run by path, where clang 16 and GNUstep are installed: pytest tests/metal_host/test_host.py (tools/metal.sh does).
"""

import os
import re
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
Run = Callable[..., list[np.ndarray[Any, Any]]]
HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n#pragma METAL fp contract(off)\n"
LANE = "uint lane [[thread_index_in_simdgroup]]"
THREAD = "uint i [[thread_index_in_threadgroup]]"
CHECK = {"METAL_HOST_CHECK": "1"}


class KernelError(Exception):
    """The probe's message."""


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("probe") / "probe"
    runpy.run_path(str(HERE / "build.py"))["link"](out, [HERE / "probe.m"])
    return out


@pytest.fixture
def run(probe: Path, tmp_path: Path) -> Run:
    """Runs `kernel void k` once. Arrays become buffers and come back; bytes go by setBytes; None binds nothing."""

    def run(
        source: str,
        *data: np.ndarray[Any, Any] | bytes | None,
        groups: tuple[int, int, int] = (1, 1, 1),
        threads: tuple[int, int, int] = (32, 1, 1),
        group_bytes: int = 0,
        **environment: str,
    ) -> list[np.ndarray[Any, Any]]:
        (tmp_path / "source").write_text(HEAD + source)
        names = []
        for i, value in enumerate(data):
            path = tmp_path / str(i)
            if value is not None:
                path.write_bytes(value if isinstance(value, bytes) else value.tobytes())
            names.append("-" if value is None else f"={path}" if isinstance(value, bytes) else str(path))
        sizes = [",".join(map(str, s)) for s in (groups, threads)]
        command = [probe, "run", tmp_path / "source", "k", *sizes, str(group_bytes), *names]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise KernelError(done.stderr)
        arrays = [(i, a) for i, a in enumerate(data) if isinstance(a, np.ndarray)]
        return [np.fromfile(tmp_path / str(i), a.dtype).reshape(a.shape) for i, a in arrays]

    return run


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def seeds(n: int) -> list[dict[str, str]]:
    return [{"METAL_HOST_SEED": str(s)} for s in range(n)]


# ---- it computes


@pytest.mark.parametrize("host_threads", ["1", "3"])
def test_saxpy(run: Run, host_threads: str) -> None:
    x, y = np.arange(4096, dtype=np.float32), np.ones(4096, np.float32)
    source = """kernel void k(device float *y [[buffer(0)]], device const float *x [[buffer(1)]], constant float &a [[buffer(2)]],
                uint i [[thread_position_in_grid]]) { y[i] = fma(a, x[i], y[i]); }"""
    environment = {"METAL_HOST_THREADS": host_threads, "PROBE_TIMES": "2"}  # one dispatch after the other
    got, _ = run(source, y, x, f32(2).tobytes(), groups=(64, 1, 1), threads=(64, 1, 1), **environment)
    assert np.array_equal(got, 1 + 4 * x)


@pytest.mark.parametrize("check", ["0", "1"])
def test_places(run: Run, check: str) -> None:
    source = """kernel void k(device uint *y [[buffer(0)]], uint3 g [[thread_position_in_grid]],
        uint3 t [[thread_position_in_threadgroup]], uint3 p [[threadgroup_position_in_grid]], uint3 n [[threadgroups_per_grid]],
        uint3 s [[threads_per_threadgroup]], uint i [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
        ushort sg [[simdgroup_index_in_threadgroup]]) {
        uint group = p.x + n.x * (p.y + n.y * p.z);
        device uint *o = y + (group * s.x * s.y * s.z + i) * 8;
        o[0] = g.x; o[1] = g.y; o[2] = g.z; o[3] = t.x + s.x * (t.y + s.y * t.z); o[4] = i; o[5] = lane + 32 * sg; o[6] = n.x * n.y * n.z;
        o[7] = group; }"""
    groups, threads = (2, 3, 2), (5, 4, 3)
    (got,) = run(
        source, np.zeros((12, 60, 8), np.uint32), groups=groups, threads=threads, METAL_HOST_CHECK=check
    )
    for group in range(12):
        p = (group % 2, group // 2 % 3, group // 6)
        for i in range(60):
            t = (i % 5, i // 5 % 4, i // 20)
            in_grid = [p[k] * threads[k] + t[k] for k in range(3)]
            assert got[group, i].tolist() == [*in_grid, i, i, i, 12, group]


REDUCE = """kernel void k(device int *y [[buffer(0)]], device const int *x [[buffer(1)]], threadgroup int *sh [[threadgroup(0)]],
    uint g [[threadgroup_position_in_grid]], uint i [[thread_index_in_threadgroup]]) {
    sh[i] = x[g * 256 + i];
    for (uint n = 128; n > 0; n /= 2) {
        BARRIER
        if (i < n) sh[i] += sh[i + n];
    }
    if (i == 0) y[g] = sh[0];
}"""


def reduce_by(run: Run, barrier: str, **environment: str) -> bool:
    x = np.random.default_rng(0).integers(-99, 99, (8, 256), dtype=np.int32)
    source = REDUCE.replace("BARRIER", barrier)
    y = np.zeros(8, np.int32)
    got, _ = run(source, y, x, groups=(8, 1, 1), threads=(256, 1, 1), group_bytes=1024, **environment)
    return bool(np.array_equal(got, x.sum(1)))


@pytest.mark.parametrize("environment", [*seeds(4), CHECK, {"METAL_HOST_THREADS": "2"}], ids=str)
def test_barriers(run: Run, environment: dict[str, str]) -> None:
    assert reduce_by(run, "threadgroup_barrier(mem_flags::mem_threadgroup);", **environment)


def test_a_missing_barrier_shows_in_the_order(run: Run) -> None:
    assert not any(reduce_by(run, "", **s) for s in seeds(4))


@pytest.mark.parametrize(
    ("barrier", "what"),
    [("", "no barrier between"), ("threadgroup_barrier(mem_flags::mem_device);", "no barrier between")],
)
def test_a_missing_barrier_is_found(run: Run, barrier: str, what: str) -> None:
    """Also one that orders the wrong kind of memory, which no order of threads shows."""
    with pytest.raises(KernelError, match=what):
        reduce_by(run, barrier, **CHECK)


SIMD_EXCHANGE = """kernel void k(device int *y [[buffer(0)]], threadgroup int *sh [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]]) {
    sh[i] = int(i);
    BARRIER
    y[i] = sh[i ^ MASK];
}"""


@pytest.mark.parametrize(("mask", "good"), [(7, True), (32, False)])
def test_a_simdgroup_barrier_orders_its_simd_group_alone(run: Run, mask: int, good: bool) -> None:
    barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    source = SIMD_EXCHANGE.replace("BARRIER", barrier).replace("MASK", str(mask))
    options: dict[str, Any] = dict(threads=(64, 1, 1), group_bytes=256)
    if good:
        (y,) = run(source, np.zeros(64, np.int32), **options, **CHECK)
        assert y.tolist() == [i ^ mask for i in range(64)]
    else:
        with pytest.raises(KernelError, match=r"no barrier between"):
            run(source, np.zeros(64, np.int32), **options, **CHECK)


def test_threadgroups_that_meet_are_found(run: Run) -> None:
    source = "kernel void k(device int *y [[buffer(0)]], uint g [[threadgroup_position_in_grid]]) { y[g / 2] = int(g); }"
    with pytest.raises(
        KernelError,
        match=r"two writes by thread 0 of threadgroup \d and thread 0 of threadgroup \d, which nothing",
    ):
        run(source, np.zeros(4, np.int32), groups=(4, 1, 1), threads=(1, 1, 1), **CHECK)
    atomic = """kernel void k(device atomic_uint *y [[buffer(0)]], uint g [[threadgroup_position_in_grid]]) {
        atomic_store_explicit(y, 1u, memory_order_relaxed); }"""
    assert run(atomic, np.zeros(1, np.uint32), groups=(4, 1, 1), **CHECK)[0][0] == 1
    with pytest.raises(KernelError, match="outside of what is bound"):
        run(atomic.replace("(y,", "(y + 1,"), np.zeros(1, np.uint32), **CHECK)


def test_shared_reads_are_no_race(run: Run) -> None:
    source = f"kernel void k(device int *y [[buffer(0)]], device const int *x [[buffer(1)]], {THREAD}) {{ y[i] = x[0] + x[i]; }}"
    assert run(source, np.zeros(32, np.int32), np.arange(32, dtype=np.int32), **CHECK)[0].tolist() == list(
        range(32)
    )
    then_written = f"""kernel void k(device int *y [[buffer(0)]], {THREAD}) {{
        int sum = 0;
        for (int j = 0; j < 32; j++) sum += y[j];
        BARRIER
        y[i] = sum; }}"""
    with pytest.raises(
        KernelError,
        match=r"kernel k: a read and then a write of device memory|a write and then a read of device memory",
    ):
        run(then_written.replace("BARRIER", ""), np.ones(32, np.int32), **CHECK)
    barrier = "threadgroup_barrier(mem_flags::mem_device);"
    assert (
        run(then_written.replace("BARRIER", barrier), np.ones(32, np.int32), **CHECK)[0].tolist() == [32] * 32
    )


@pytest.mark.parametrize(("threads", "good"), [(32, True), (64, False)])
def test_what_a_simd_group_reads_it_may_write_behind_its_barrier(run: Run, threads: int, good: bool) -> None:
    source = f"""kernel void k(device int *y [[buffer(0)]], threadgroup int *sh [[threadgroup(0)]], {THREAD}) {{
        sh[i] = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int sum = 0;
        for (int j = 0; j < 32; j++) sum += sh[j];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        sh[i] = sum;
        y[i] = sh[i];
    }}"""
    options: dict[str, Any] = dict(threads=(threads, 1, 1), group_bytes=256)
    if good:
        assert run(source, np.zeros(32, np.int32), **options, **CHECK)[0].tolist() == [32] * 32
    else:
        with pytest.raises(KernelError, match=r"no barrier between"):
            run(source, np.zeros(64, np.int32), **options, **CHECK)


# ---- SIMD groups


@pytest.mark.parametrize("threads", [32, 96, 40])
def test_simd_operations(run: Run, threads: int) -> None:
    source = f"""kernel void k(device int *y [[buffer(0)]], device const int *x [[buffer(1)]], {THREAD}, {LANE}) {{
        y[i * 6] = simd_sum(x[i]); y[i * 6 + 1] = simd_max(x[i]); y[i * 6 + 2] = simd_min(x[i]);
        y[i * 6 + 3] = simd_shuffle(x[i], ushort(5)); y[i * 6 + 4] = simd_shuffle_xor(x[i], ushort(3)); y[i * 6 + 5] = int(simd_or(1u << lane)); }}"""
    x = np.random.default_rng(1).integers(-999, 999, threads, dtype=np.int32)
    y, _ = run(source, np.zeros((threads, 6), np.int32), x, threads=(threads, 1, 1), **CHECK)
    for i in range(threads):
        group = x[i // 32 * 32 : i // 32 * 32 + 32]
        both = 2 ** len(group) - 1
        assert y[i].tolist() == [
            group.sum(),
            group.max(),
            group.min(),
            group[5],
            group[i % 32 ^ 3],
            both - (2**32 if both >> 31 else 0),
        ]


def test_the_order_of_simd_sum_is_nobodys(run: Run) -> None:
    source = f"kernel void k(device float *y [[buffer(0)]], device const float *x [[buffer(1)]], {LANE}) {{ y[lane] = simd_sum(x[lane]); }}"
    x = np.random.default_rng(2).standard_normal(32).astype(np.float32)
    got = [run(source, np.zeros(32, np.float32), x, **s)[0] for s in seeds(6)]
    assert all(np.allclose(y, x.sum(), atol=1e-5) and len(set(y)) == 1 for y in got)
    assert len({y[0] for y in got}) > 1


MULTIPLY = """kernel void k(device float *c [[buffer(0)]], device const float *a [[buffer(1)]], device const float *b [[buffer(2)]],
                threadgroup float *t [[threadgroup(0)]]) {
    simdgroup_float8x8 A, B, C = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_load(A, a, 8);
    simdgroup_load(B, b, 16, ulong2(8, 0), true);
    simdgroup_multiply_accumulate(C, A, B, C);
    simdgroup_store(C, t, 8);
    BARRIER
    simdgroup_load(C, (threadgroup const float *)t, 8);
    simdgroup_store(C, c, 8);
}"""


def multiply(
    run: Run, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], barrier: str = "", **environment: str
) -> np.ndarray[Any, Any]:
    wide = np.zeros((8, 16), np.float32)
    wide[:, 8:] = b.T
    source = MULTIPLY.replace("BARRIER", barrier)
    return run(source, np.zeros((8, 8), np.float32), a, wide, group_bytes=256, **environment)[0]


@pytest.mark.parametrize("environment", [*seeds(4), CHECK], ids=str)
def test_matrix_multiply(run: Run, environment: dict[str, str]) -> None:
    a, b = np.random.default_rng(3).integers(-127, 127, (2, 8, 8)).astype(np.float32)
    assert np.array_equal(multiply(run, a, b, **environment), 1 + a @ b)


def test_the_order_of_matrix_multiply_is_nobodys(run: Run) -> None:
    a, b = np.random.default_rng(4).standard_normal((2, 8, 8)).astype(np.float32)
    got = [multiply(run, a, b, **s) for s in seeds(6)]
    assert all(np.allclose(y, 1 + a @ b, atol=1e-5) for y in got)
    assert len({y.tobytes() for y in got}) > 2


def test_a_matrix_needs_all_lanes(run: Run) -> None:
    source = "kernel void k(device float *c [[buffer(0)]]) { simdgroup_float8x8 A = make_filled_simdgroup_matrix<float, 8, 8>(1.0f); simdgroup_multiply_accumulate(A, A, A, A); simdgroup_store(A, c, 8); }"
    with pytest.raises(KernelError, match="fewer than 32 lanes"):
        run(source, np.zeros(64, np.float32), threads=(16, 1, 1))


# ---- what a kernel may not do


@pytest.mark.parametrize(
    "body",
    [
        "if (i < 7) threadgroup_barrier(mem_flags::mem_none);",
        "if (i < 7) y[i] = simd_sum(1.0f);",
        "if (i == 3) return; y[i] = simd_sum(1.0f);",
    ],
)
def test_divergence(run: Run, body: str) -> None:
    with pytest.raises(
        KernelError,
        match=r"threads wait at a threadgroup barrier or SIMD-group operation that the others do not",
    ):
        run(f"kernel void k(device float *y [[buffer(0)]], {THREAD}) {{ {body} }}", np.zeros(32, np.float32))


def test_lanes_meet_in_one_operation(run: Run) -> None:
    source = f"kernel void k(device float *y [[buffer(0)]], {THREAD}) {{ y[i] = i < 3 ? simd_sum(1.0f) : simd_max(1.0f); }}"
    with pytest.raises(KernelError, match="the lanes of a SIMD group meet in different operations"):
        run(source, np.zeros(32, np.float32))


@pytest.mark.parametrize("place", ["y[32]", "y[-1]", "y[i * 100000]"])
@pytest.mark.parametrize("access", ["{} = 1.0f", "y[0] = {}"])
def test_out_of_bounds(run: Run, place: str, access: str) -> None:
    """Beside a buffer lies memory that nobody may touch; checks find the rest."""
    source = (
        f"kernel void k(device float *y [[buffer(0)]], {THREAD}) {{ if (i == 5) {access.format(place)}; }}"
    )
    with pytest.raises(KernelError, match=r"kernel k: .*outside of what is bound"):
        run(source, np.zeros(32, np.float32), **CHECK)
    if place != "y[-1]":
        with pytest.raises(KernelError, match=r"kernel k: an access at .*outside of what is bound"):
            run(source, np.zeros(32, np.float32))


def test_out_of_threadgroup_memory(run: Run) -> None:
    source = f"kernel void k(device float *y [[buffer(0)]], threadgroup float *t [[threadgroup(0)]], {THREAD}) {{ t[i - 1u + 1u + 32u] = y[i]; }}"
    with pytest.raises(KernelError, match="outside its threadgroup memory"):
        run(source, np.zeros(32, np.float32), group_bytes=128, **CHECK)
    with pytest.raises(KernelError, match="outside of what is bound"):
        run(source, np.zeros(32, np.float32), group_bytes=128)


def test_nothing_is_zero_by_itself(run: Run) -> None:
    source = f"kernel void k(device float *y [[buffer(0)]], threadgroup float *t [[threadgroup(0)]], {THREAD}) {{ y[i] = t[i]; }}"
    assert np.isnan(run(source, np.zeros(32, np.float32), group_bytes=128)[0]).all()


# ---- arithmetic


def test_contraction_is_the_sources_choice(run: Run) -> None:
    a = np.float32(1 + 2**-12)
    source = "kernel void k(device float *y [[buffer(0)]]) { y[0] = y[1] * y[1] - y[2]; y[3] = fma(y[1], y[1], -y[2]); }"
    x = f32(0, a, a * a, 0)
    assert run(source, x, threads=(1, 1, 1))[0][0] == 0
    y = run(f"#pragma METAL fp contract(on)\n{source}", x, threads=(1, 1, 1))[0]
    assert y[0] == y[3] == np.float32(2**-24)


def test_fast_math_shows(run: Run) -> None:
    source = (
        "kernel void k(device float *y [[buffer(0)]]) { y[0] = (y[1] + y[2]) - y[1]; y[3] = y[3] == y[3]; }"
    )
    x = f32(9, 1e8, 1, np.nan)
    assert run(source, x, threads=(1, 1, 1))[0][[0, 3]].tolist() == [0, 0]
    assert run(source, x, threads=(1, 1, 1), PROBE_FAST="1")[0][[0, 3]].tolist() == [1, 1]


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals(run: Run, flush: bool) -> None:
    """Kept, or flushed on every host thread and behind every switch of fibers; those of half stay."""
    source = """kernel void k(device float *y [[buffer(0)]], device const half *h [[buffer(1)]], device float *z [[buffer(2)]],
        uint i [[thread_position_in_grid]]) {
        y[i] = y[i] * 0.5f;
        z[i] = float(h[0]);
        threadgroup_barrier(mem_flags::mem_device);
        y[i] = y[i] * simd_max(2.0f);
    }"""
    tiny, h = np.full(128, 2.0**-126, np.float32), np.array([2.0**-24], np.float16)
    environment = {"METAL_HOST_FTZ": str(int(flush)), "METAL_HOST_THREADS": "2"}
    y, _, z = run(source, tiny, h, np.zeros(128, np.float32), groups=(4, 1, 1), **environment)
    assert (y == (0 if flush else tiny)).all()
    assert (z == np.float32(2.0**-24)).all()


def test_half_and_vectors(run: Run) -> None:
    source = """kernel void k(device float *y [[buffer(0)]], device const half *h [[buffer(1)]], device const uchar4 *u [[buffer(2)]]) {
        y[0] = float(h[0] * h[0] + h[1]);
        float4 v = float4(char4(-1, 2, -3, 4));
        v.xy = float2(v.w, 7);
        y[1] = v.x + 10 * v.y + 100 * v.z;
        y[2] = as_type<float>(0x40490fdbu);
        y[3] = float(int(u[0].z)) + float4(u[1]).w + min(3, 4) + max(1.5f, 2.5f) + rint(2.5f) + precise::sqrt(9.0f) + abs(-4) + clamp(9, 1, 5);
        y[4] = fma(float4(2), float4(float3(1, 2, 3), 4), float4(1)).w;
        y[5] = select(1.0f, 2.0f, y[4] > 3);
    }"""
    h = np.array([1 + 2**-10, 1], np.float16)
    u = np.array([1, 2, 200, 4, 5, 6, 7, 8], np.uint8)
    y = run(source, np.zeros(6, np.float32), h, u, threads=(1, 1, 1))[0]
    twice = np.float16(np.float16(h[0] * h[0]) + h[1])
    assert y.tolist() == [
        float(twice),
        4 + 70 - 300,
        np.float32(np.pi),
        200 + 8 + 3 + 2.5 + 2 + 3 + 4 + 5,
        9,
        2,
    ]


# ---- what the compiler refuses


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (
            "kernel void k(device float *y [[buffer(0)]]) { y[0] = nope; }",
            "use of undeclared identifier 'nope'",
        ),
        (
            "kernel void k(device float *y [[buffer(0)]]) { thread float *p = y; p[0] = 1; }",
            "cannot initialize",
        ),
        (
            "void f(thread float &x); kernel void k(device float *y [[buffer(0)]]) { f(y[0]); }",
            "no matching function",
        ),
        (
            "kernel void k(device float *y [[buffer(0)]], threadgroup float *t [[threadgroup(0)]]) { y = (device float *)t; }",
            "address spaces",
        ),
        ("kernel void k(device const float *y [[buffer(0)]]) { y[0] = 1; }", "read-only|const"),
        ("kernel void k(device float *y [[buffer(31)]]) { y[0] = 1; }", "the index must be 0 to 30"),
        (
            "kernel void k(device float *y [[buffer(0)]], device float *x [[buffer(0)]]) { y[0] = x[0]; }",
            "twice",
        ),
        (
            "kernel void k(float *y [[buffer(0)]]) { y[0] = 1; }",
            "not a pointer or reference of its address space",
        ),
        ("kernel void k(device float *y) { y[0] = 1; }", "argument without an attribute"),
        (
            "kernel void k(device float *y [[buffer(0)]], float lane [[thread_index_in_simdgroup]]) { y[0] = lane; }",
            "is a uint or ushort",
        ),
        (
            "kernel void k(device float *y [[buffer(0)]], uint2 a [[thread_position_in_grid]], uint3 b [[threads_per_threadgroup]]) { y[0] = a.x + b.x; }",
            "number of components",
        ),
        (
            "kernel void k(device float *y [[buffer(0)]]) { threadgroup float t[4]; y[0] = t[0]; }",
            "by .*threadgroup",
        ),
        (
            "kernel void k(device float4 *y [[buffer(0)]], device int4 *x [[buffer(1)]]) { y[0] = (float4)x[0]; }",
            "write it as a constructor",
        ),
        ("kernel void k(device float4 *y [[buffer(0)]]) { y[0] = float4(1, 2, 3); }", "as many components"),
        ("kernel void k(device float *y [[buffer(0)]]) { y[0] = 0x1p-3f; }", "hexadecimal floating"),
        ("kernel void other(device float *y [[buffer(0)]]) { y[0] = 1; }", "no kernel k"),
    ],
)
def test_refused_sources(run: Run, source: str, what: str) -> None:
    with pytest.raises(KernelError, match=rf"(?s)refused: .*({what})"):
        run(source, np.zeros(4, np.float32))


def test_a_message_names_the_line(run: Run) -> None:
    with pytest.raises(KernelError, match="program_source:6:"):
        run("\nkernel void k(device float *y [[buffer(0)]]) { y[0] = nope; }")


# ---- what the framework refuses

MISUSES = {
    "nothing bound": r"kernel one: nothing is bound to buffer\(0\)",
    "pointer": "both multiples of 16384",
    "length": "both multiples of 16384",
    "bytes": "at most 4096",
    "index": "buffer index 31: 0 to 30",
    "bytes index": "buffer index 31: 0 to 30",
    "offset": "offset 64 into a buffer of 64 bytes",
    "threads": "1056 threads to a threadgroup: at most 1024",
    "no threads": "a size of 0",
    "no groups": "a size of 0",
    "its threads": "65 threads to a threadgroup: at most 64",
    "group memory": "at most 32768",
    "group memory by 16": "a multiple of 16",
    "group memory in all": "32784 bytes of threadgroup memory: at most 32768",
    "no group memory": r"no length is set for threadgroup\(1\)",
    "less than declared": r"12 bytes bound to buffer\(1\), which declares 16",
    "alignment": r"the offset 8 of buffer\(1\) is not aligned",
    "no pipeline": "without a pipeline",
    "open encoder": "commit before endEncoding",
    "two encoders": "while another encoder is open",
    "wait before commit": "waitUntilCompleted before commit",
    "encode after end": "setBuffer: after endEncoding",
    "commit twice": "commit of what is committed",
    "encoder after commit": "computeCommandEncoder after commit",
    "math mode": "setMathMode: is of macOS 15",
}


def test_limits_are_allowed(probe: Path) -> None:
    subprocess.run([probe, "misuse", "good"], check=True, timeout=60)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(probe: Path, name: str) -> None:
    env = {**os.environ, "METAL_HOST_MACOS": "14"}
    done = subprocess.run([probe, "misuse", name], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode < 0, done.stderr
    assert re.search(f"metal_host: .*{MISUSES[name]}", done.stderr), done.stderr

"""Attention of one query, on one thread, against the same as one writes it first (seed_attention.c: transpose
the keys, then saxpy rows, over a row-major f32 cache, compiled for this very machine).

    python bench/attention.py [--level LEVEL] [--keys N...] [--warm]

Heads are those of Qwen3 0.6B: 16 query heads and 8 KV heads of 128. Each call reads another layer of the
cache that a model has (positional), of so many that the processor's caches cannot hold them, as decoding
does; or, --warm, the same one, which a processor's cache may hold. Both sides run in turns, on the same
values; their results must be the same bytes. GB/s: K and V bytes read.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

from pyinfer.backend.kv import KVBufferView, row_bytes
from pyinfer.backend.native import NativeBackend
from pyinfer.bench import limits
from pyinfer.cache.positional import PositionalCache
from pyinfer.cli.bench import table

N_HEADS, N_KV, DIM = 16, 8, 128
SCALE = float(np.float32(1) / np.sqrt(np.float32(DIM)))
KEYS = (64, 511, 2048, 8191)
COLD_BYTES = 96 << 20  # of a cache of all layers, whatever its dtype
SECONDS = 1.5  # to measure one row of the table
DTYPES = ("f32", "f16", "q8_0")
ROOT = Path(__file__).resolve().parents[1]
SIGNATURE = """void seed_attention(const float *q, const float *k, const float *v, int64_t n_heads,
    int64_t n_kv_heads, int64_t dim, int64_t keys, float scale, float *scratch, float *out);"""
F32 = NDArray[np.float32]


@contextmanager
def compiled() -> Iterator[tuple[FFI, Any]]:
    """The library of seed_attention.c."""
    ffi = FFI()
    ffi.cdef(SIGNATURE)
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder) / "seed.so", Path(__file__).with_name("seed_attention.c")
        flags = ["-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno"]
        command = ["cc", *flags, "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", source, "-o", library, "-lm"]
        subprocess.run(command, check=True)
        yield ffi, ffi.dlopen(str(library))


def kv_views(ops: NativeBackend, dtype: str, layers: int, rows: F32) -> list[KVBufferView]:
    """So many layers of a cache, that hold rows (some, k and v, keys, N_KV * DIM) again and again."""
    shape = SimpleNamespace(n_layers=layers, n_kv_heads=N_KV, head_dim=DIM)
    kv = PositionalCache(ops, shape, rows.shape[2], dtype)
    for layer in range(layers):
        kv.update_in_place(layer, *(ops.tensor(x) for x in rows[layer % len(rows)]))
    return kv.views


def in_turns(calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """Of each side, the fewest seconds to a call in a round over its layers."""
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + SECONDS
    for round in range(1000):
        for side, layers in calls.items():
            start = time.perf_counter()
            for call in layers:
                call()
            best[side] = min(best[side], (time.perf_counter() - start) / len(layers))
        if round >= 2 and time.perf_counter() > end:
            break
    return best


def measure(ops: NativeBackend, ffi: FFI, seed: Any, keys: int, warm: bool) -> dict[str, float]:
    """Seconds to a call of each side; f32 is ours on the seed's own values."""
    rng, width = np.random.default_rng(keys), N_KV * DIM
    layers = {d: 1 if warm else max(2, COLD_BYTES // (2 * N_KV * keys * row_bytes(d, DIM))) for d in DTYPES}
    rows = rng.standard_normal((layers["f32"], 2, keys, width), np.float32)
    q, out = rng.standard_normal((1, N_HEADS * DIM), np.float32), np.empty((1, N_HEADS * DIM), np.float32)
    own_q, scratch = ops.tensor(q), np.empty(keys * (DIM + 1), np.float32)

    def pointer(x: F32) -> Any:
        return ffi.cast("float *", x.ctypes.data)

    def seed_call(kv: F32) -> Callable[[], object]:
        args = [pointer(q), pointer(kv[0]), pointer(kv[1]), N_HEADS, N_KV, DIM, keys, SCALE]
        return lambda: seed.seed_attention(*args, pointer(scratch), pointer(out))

    def own_call(view: KVBufferView) -> Callable[[], object]:
        return lambda: ops.fused_attention(own_q, view, N_HEADS, SCALE)

    calls: dict[str, list[Callable[[], object]]] = {"seed": [seed_call(kv) for kv in rows]}
    for dtype in DTYPES:
        calls[dtype] = [own_call(view) for view in kv_views(ops, dtype, layers[dtype], rows)]
    for theirs, ours in zip(calls["seed"], calls["f32"], strict=True):
        theirs()
        if ops.numpy(ours()).tobytes() != out.tobytes():
            raise SystemExit(f"at {keys} keys the results differ")
    return in_turns(calls)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--level", help="instruction set (the best here)")
    parser.add_argument("--keys", type=int, nargs="+", default=KEYS, help=f"lengths of the cache ({KEYS})")
    parser.add_argument("--warm", action="store_true", help="the same layer again and again")
    args = parser.parse_args(argv)
    ops = NativeBackend("bench", args.level, 1)
    with compiled() as (ffi, seed):
        rows = []
        for keys in args.keys:
            took = measure(ops, ffi, seed, keys, args.warm)
            speed = {d: 2 * N_KV * keys * row_bytes(d, DIM) / took[d] / 1e9 for d in DTYPES}
            rows.append(
                [f"{keys:,}", f"{took['seed'] * 1e6:.0f}", f"{took['f32'] * 1e6:.0f}"]
                + [f"{took['seed'] / took['f32']:.1f}x"]
                + [f"{took[d] * 1e6:.0f}" for d in DTYPES[1:]]
                + [f"{speed[d]:.1f}" for d in DTYPES]
            )
    heads = ["keys", "seed f32, us", "f32, us", "faster", "f16, us", "q8_0, us"]
    heads += [f"{dtype}, GB/s" for dtype in DTYPES]
    print(*table(heads, rows, markdown=True), sep="\n")
    speed_of_memory = limits(ops).read_gb
    print(
        f"\nLevel {ops.level}, one thread, which reads memory at {speed_of_memory:.1f} GB/s. All bytes equal."
    )


if __name__ == "__main__":
    main()

"""Attention on one core and on all, over the cache that concatenates and the one that does not.

    python bench/schedules.py [MODEL] [-p 512] [-n 32] [-t N]

Milliseconds of all layers and steps, by phase: attn.kvcache is what a cache takes to put new rows in,
attn.fused_copy what it copies of those that it held, attn.fused_compute attention itself. Each setting
runs in turn, twice, and the faster counts; the tokens must be the same in all. Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from pyinfer import backend, cache
from pyinfer.backend.base import Backend
from pyinfer.backend.native import NativeBackend
from pyinfer.cli.bench import table
from pyinfer.cli.common import number
from pyinfer.engine import Session, generate
from pyinfer.fetch import resolve
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry
from pyinfer.sampling import Sampling
from pyinfer.schedule import Inline, Pool, Schedule

BUCKETS = ("attn.fused_compute", "attn.kvcache", "attn.fused_copy")
HEAD = ("schedule / cache", *(f"{b}, ms" for b in BUCKETS), "prefill, ms", "decode, tokens/s")


def timed(ops: NativeBackend, spent: dict[str, float]) -> NativeBackend:
    """The same backend, which adds up what its phases take; op by op, for a replay would hide them."""

    def within(bucket: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = f(*args)
            spent[bucket] += time.perf_counter() - start
            return result

        return run

    kinds = {"fused_attention": 0, "kv_write": 1, "narrow_f16": 1, "concat_dim0": 2}
    phases = {op: within(BUCKETS[i], getattr(type(ops), op)) for op, i in kinds.items()}
    twin: NativeBackend = object.__new__(type("Timed", (type(ops),), {**phases, "capture": Backend.capture}))
    twin.__dict__.update(ops.__dict__)
    return twin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("-p", "--prompt", type=number(int, 1), default=512)
    parser.add_argument("-n", "--generate", type=number(int, 2), default=32)
    parser.add_argument("-t", "--threads", type=number(int, 1), default=backend.default_threads())
    args = parser.parse_args()

    ops = backend.create("parallel", args.threads)
    assert isinstance(ops, NativeBackend)
    spent: dict[str, float] = defaultdict(float)
    schedules: dict[str, Schedule] = {"sequential": Inline(), f"pool of {args.threads}": Pool(args.threads)}
    best: dict[str, tuple[float, ...]] = {}
    answers = set()
    with GGUFFile(resolve(args.model)) as file:
        decoder = registry.load(file, timed(ops, spent))
        plain, config = decoder.ops, decoder.config
        prompt = random.Random(0).choices(range(config.n_vocab), k=args.prompt)
        for _ in range(2):
            for name, schedule in schedules.items():
                for kind in ("append", "positional"):
                    decoder.ops = plain.scheduled(schedule)
                    n_ctx = args.prompt + args.generate
                    session = Session(decoder, cache.create(kind, decoder.ops, config, n_ctx, "f16"))
                    ms: list[float] = []
                    spent.clear()
                    tokens = [t for t, _ in generate(session, prompt, args.generate, Sampling(), ms)]
                    answers.add(tuple(tokens))
                    decode = (len(ms) - 1) / sum(ms[1:]) * 1e3
                    row = (*(spent[b] * 1e3 for b in BUCKETS), ms[0], decode)
                    label = f"{name} / {kind}"
                    if label not in best or sum(ms) < best[label][-1]:
                        best[label] = (*row, sum(ms))
    if len(answers) != 1:
        raise SystemExit("the tokens differ: a schedule or a cache moved a byte")
    rows = [(label, *(f"{x:,.0f}" for x in row[:4]), f"{row[4]:.1f}") for label, row in best.items()]
    print("\n".join(table(HEAD, rows, markdown=True)))


if __name__ == "__main__":
    main()

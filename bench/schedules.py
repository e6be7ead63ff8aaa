"""Attention on one core and on all, over the cache that concatenates and the one that does not.

    python bench/schedules.py [MODEL] [-p 512] [-n 32] [-t N]

Milliseconds of all layers and steps, by phase: attn.kvcache is what a cache takes to put new rows in,
attn.fused_copy what it copies of those that it held, attn.fused_compute attention itself. Each setting
runs in turn, twice, and the faster counts; the tokens must be the same in all. Prints Markdown.
"""

from __future__ import annotations

import argparse
import random

from pyinfer import backend, cache
from pyinfer.backend.tracing import watched
from pyinfer.cli.bench import table
from pyinfer.cli.common import number
from pyinfer.engine import Session, generate
from pyinfer.fetch import resolve
from pyinfer.gguf_file import GGUFFile
from pyinfer.model import registry
from pyinfer.observe import PhaseProfile
from pyinfer.sampling import Sampling
from pyinfer.schedule import Inline, Pool, Schedule

BUCKETS = ("attn.fused_compute", "attn.kvcache", "attn.fused_copy")
HEAD = ("schedule / cache", *(f"{b}, ms" for b in BUCKETS), "prefill, ms", "decode, tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("-p", "--prompt", type=number(int, 1), default=512)
    parser.add_argument("-n", "--generate", type=number(int, 2), default=32)
    parser.add_argument("-t", "--threads", type=number(int, 1), default=backend.default_threads())
    args = parser.parse_args()

    ops = backend.create("parallel", args.threads)
    schedules: dict[str, Schedule] = {"sequential": Inline(), f"pool of {args.threads}": Pool(args.threads)}
    best: dict[str, tuple[float, ...]] = {}
    answers = set()
    with GGUFFile(resolve(args.model)) as file:
        decoder = registry.load(file, watched(ops, []))
        plain, config = decoder.ops, decoder.config
        prompt = random.Random(0).choices(range(config.n_vocab), k=args.prompt)
        for _ in range(2):
            for name, schedule in schedules.items():
                for kind in ("append", "positional"):
                    decoder.ops = plain.scheduled(schedule)
                    n_ctx = args.prompt + args.generate
                    session = Session(decoder, cache.create(kind, decoder.ops, config, n_ctx, "f16"))
                    ms: list[float] = []
                    profile = PhaseProfile()
                    plain.observers[:] = [profile]
                    tokens = [t for t, _ in generate(session, prompt, args.generate, Sampling(), ms)]
                    answers.add(tuple(tokens))
                    decode = (len(ms) - 1) / sum(ms[1:]) * 1e3
                    spent = (profile.ns["prefill", b] + profile.ns["decode", b] for b in BUCKETS)
                    row = (*(ns / 1e6 for ns in spent), ms[0], decode)
                    label = f"{name} / {kind}"
                    if label not in best or sum(ms) < best[label][-1]:
                        best[label] = (*row, sum(ms))
    if len(answers) != 1:
        raise SystemExit("the tokens differ: a schedule or a cache moved a byte")
    rows = [(label, *(f"{x:,.0f}" for x in row[:4]), f"{row[4]:.1f}") for label, row in best.items()]
    print("\n".join(table(HEAD, rows, markdown=True)))


if __name__ == "__main__":
    main()

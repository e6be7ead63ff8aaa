"""pyinfer beside llama.cpp: the same file, the same tokens, in turns.

    python bench/peers.py MODEL... -p 512 -n 128 -d 0 -t 1,2 --rounds 3 [--peer-python PYTHON]

A machine's speed drifts by more than engines differ, so each round runs one after the other, each in a
process of its own, and ratios count. llama.cpp comes by llama-cpp-python, built on the machine that it is to
run on, in the environment of --peer-python: everything on the CPU, batches of 512. PYINFER_CPU forces
pyinfer's level; to hold AVX2 against AVX2, give a --peer-python whose llama.cpp was built without AVX-512.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyinfer.bench import Plan, machine, tokens
from pyinfer.cli.bench import several, table
from pyinfer.cli.common import number, say
from pyinfer.errors import PyinferError
from pyinfer.fetch import resolve
from pyinfer.gguf_file import GGUFFile
from pyinfer.model.config import Config

FLASH = {"on": [True], "off": [False], "both": [True, False]}
HEAD = (
    "model",
    "threads",
    "test",
    "pyinfer",
    "spread",
    "llama.cpp",
    "spread",
    "fa",
    "ratio",
    "of the rounds",
)


class PeerError(PyinferError):
    """A side that did not run. The message holds the end of what it said."""


@dataclass
class Pair:
    """Tokens per second of one test: a rate per round of pyinfer, and of llama.cpp with and without flash
    attention.
    """

    ours: list[float] = field(default_factory=list)
    theirs: dict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def flash(self) -> bool:
        """The choice of flash attention that is better for llama.cpp."""
        return max(self.theirs, key=lambda flash: statistics.median(self.theirs[flash]))

    def cells(self) -> list[str]:
        """Both medians and spreads; the ratio of medians, and the least and greatest ratio of a round."""
        best = self.theirs[self.flash]
        ours, theirs = statistics.median(self.ours), statistics.median(best)
        rounds = [a / b for a, b in zip(self.ours, best, strict=True)]
        return [
            f"{ours:.1f}",
            f"{(max(self.ours) - min(self.ours)) / ours:.0%}",
            f"{theirs:.1f}",
            f"{(max(best) - min(best)) / theirs:.0%}",
            "on" if self.flash else "off",
            f"{ours / theirs:.2f}",
            f"{min(rounds):.2f} to {max(rounds):.2f}",
        ]


def answer(command: Sequence[str]) -> dict[str, Any]:
    """What a process printed last, from JSON. Raises PeerError if it failed."""
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise PeerError(f"{' '.join(command)[:200]}: exit code {run.returncode}: {run.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(run.stdout[run.stdout.index("{") :])
    return found


def check_peer(python: str) -> None:
    """Raises PeerError if that interpreter is missing, or has no llama-cpp-python."""
    try:
        found = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, text=True)
    except OSError as error:
        raise PeerError(f"--peer-python {python}: {error.strerror or error}") from None
    if found.returncode:
        why = (found.stderr.strip().splitlines() or ["it failed"])[-1]
        raise PeerError(f"{python} cannot import llama_cpp ({why}): pip install llama-cpp-python there")


def llama(python: str, job: dict[str, Any]) -> dict[str, Any]:
    """A job of llama_side.py, in another interpreter."""
    return answer([python, str(Path(__file__).with_name("llama_side.py")), json.dumps(job)])


def ours(path: Path, plan: Plan, threads: int) -> list[dict[str, Any]]:
    """`pyinfer bench` on a model, in a process of its own."""
    options = ["-p", plan.prompt, "-n", plan.generate, "-t", threads, "-r", plan.repeats]
    depths = ",".join(map(str, plan.depths))
    command = [
        sys.executable,
        "-m",
        "pyinfer",
        "bench",
        path,
        *options,
        "-d",
        depths,
        "--no-limits",
        "--json",
    ]
    found: list[dict[str, Any]] = answer([str(part) for part in command])["results"]
    return found


def compare(
    path: Path, plan: Plan, rounds: int, flash: Sequence[bool], python: str
) -> tuple[list[list[str]], dict[str, Any]]:
    """Rows of the table for one model, and what the last processes said of themselves."""
    with GGUFFile(path) as file:
        n_vocab, name = Config.from_gguf(file).n_vocab, str(file.metadata.get("general.name", path.stem))
    job = {
        **{"do": "rates", "model": str(path), "depths": list(plan.depths), "repeats": plan.repeats},
        "prompt": tokens(plan.prompt, n_vocab),
        "step": tokens(plan.generate, n_vocab, 1),
        "context": tokens(max(plan.depths), n_vocab, 2),
    }
    rows, about = [], {}
    for threads in plan.threads:
        pairs: dict[str, Pair] = defaultdict(Pair)
        for i in range(rounds):
            say(f"{path.name}, {threads} thread(s): round {i + 1} of {rounds} ...")
            for r in ours(path, plan, threads):
                label = f"{r['test']} @ {r['depth']}" if r["depth"] else r["test"]
                pairs[label].ours.append(r["median"])
                about["level"] = r["level"]
            for choice in flash:
                peer = llama(python, {**job, "threads": threads, "flash": choice})
                about |= {"version": peer["version"], "system": peer["system"]}
                for label, samples in peer["answer"].items():
                    pairs[label].theirs[choice].append(statistics.median(samples))
        rows += [[name, str(threads), label, *pair.cells()] for label, pair in pairs.items()]
    return rows, about


def main() -> int:
    parser = argparse.ArgumentParser(description="pyinfer beside llama.cpp, in turns.", allow_abbrev=False)
    option, whole, counted = parser.add_argument, number(int, 0), number(int, 1)
    option("models", metavar="MODEL", nargs="+", help="a path, or what `pyinfer pull` takes")
    option("-p", type=whole, default=512, metavar="N", help="tokens of the prompt; 0: none (%(default)s)")
    option("-n", type=whole, default=128, metavar="N", help="tokens to decode; 0: none (%(default)s)")
    option("-d", type=several(whole), default=[0], metavar="N,...", help="tokens in the context before (0)")
    option("-t", type=several(counted), default=[os.cpu_count() or 1], metavar="N,...", help="threads")
    option("-r", type=counted, default=1, metavar="N", help="repeats in a process (%(default)s)")
    option("--rounds", type=counted, default=3, metavar="N", help="processes of each side (%(default)s)")
    option("--fa", choices=FLASH, default="both", help="llama.cpp's flash attention; both: the better one")
    option("--peer-python", default=sys.executable, metavar="PYTHON", help="where llama-cpp-python is")
    args = parser.parse_args()
    try:
        plan = Plan(args.p, args.n, args.d, args.t, args.r)
        check_peer(args.peer_python)
        rows: list[list[str]] = []
        for model in args.models:
            more, about = compare(resolve(model), plan, args.rounds, FLASH[args.fa], args.peer_python)
            rows += more
    except PyinferError as error:
        say(f"peers: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    m = machine()
    print(f"- {m['cpu']}, {m['cores']} CPUs, {m['system']}; {time.strftime('%Y-%m-%d')}")
    print(
        f"- pyinfer at level {about['level']}; llama-cpp-python {about['version']}: {about['system'].strip()}"
    )
    print(f"- tokens/s, medians of {args.rounds} rounds in turns, {args.r} repeat(s) each after a warm-up\n")
    print("\n".join(table(HEAD, rows, markdown=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

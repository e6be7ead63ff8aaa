"""Run by tests in a process of its own: every case with its buffers against inaccessible pages.

    python -m kernels.guarded LEVEL end|start [stray]

Prints the name of each case before it runs, so that a crash has a name. `stray` reads one value too many,
to show that this is what a crash looks like.
"""

from __future__ import annotations

import sys

from kernels.cases import CASES
from kernels.harness import Fenced, Native, values


def main(level: str, side: str, stray: str = "") -> None:
    memory = Fenced(at_end=side == "end")
    if stray:
        print(stray, flush=True)
        native = Native(level, memory=memory)
        x, y = (memory.place(values("random", (n,), 1)) for n in (100, 101))
        native.call("pi_exp", [native.ctx, native.pointer(x) - (side == "start"), 101, native.pointer(y)])
        return
    for threads in (1, 2):
        native = Native(level, threads, memory)
        for name, case in CASES.items():
            print(name, flush=True)
            for _ in case(native):
                pass


if __name__ == "__main__":
    main(*sys.argv[1:])

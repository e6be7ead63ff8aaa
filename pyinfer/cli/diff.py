"""`pyinfer diff`: two digests against each other, down to the first op that gave other bytes."""

import argparse
import json
from typing import Any

from ..errors import InputError, PyinferError
from . import common

SAME, DIFFERENT, TROUBLE = 0, 1, 2  # as diff(1) and cmp(1) exit


def add(commands: common.Commands) -> None:
    parser = commands.add_parser(
        "diff",
        help="say where two runs differ",
        description="A and B are files that `pyinfer digest` printed; with --record ops, to find the op at "
        "fault. Exits with 0 if their logits are the same, 1 if not, 2 for trouble.",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        a, b = _read(args.a), _read(args.b)
        from ..observe import compare

        lines = compare(a, b)
    except PyinferError as error:
        common.complain(error)
        return TROUBLE
    same = all(a[key] == b[key] for key in ("numerics", "model_sha256", "tokens", "logits_sha256"))
    if same:
        lines.insert(0, f"the same: {len(a['tokens'])} tokens, logits {a['logits_sha256'][:16]}")
    print("\n".join(lines))
    return SAME if same else DIFFERENT


def _read(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from None

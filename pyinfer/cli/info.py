"""`pyinfer info`: what a model is, what it costs, and which kernels would run it here."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from . import common


def add(commands: common.Commands) -> None:
    parser = commands.add_parser(
        "info", help="print a model's sizes and the kernels it would use here", allow_abbrev=False
    )
    common.add_engine(parser, model_option=False)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with common.load(args) as model:
        facts = model.describe()
    if args.json:
        common.print_json(facts)
    else:
        print("\n".join(lines(facts)))
    return 0


def lines(facts: Mapping[str, Any], indent: str = "", *, in_bytes: bool = False) -> Iterator[str]:
    """One line per fact, `name: value`; a mapping is a heading with its own facts indented below."""
    for name, value in facts.items():
        label = indent + (name if indent else name.replace("_", " "))  # inner names are types and kernels
        if isinstance(value, Mapping):
            yield f"{label}:"
            yield from lines(value, indent + "  ", in_bytes=name.endswith("bytes"))
        elif (in_bytes or name.endswith("bytes")) and isinstance(value, int):
            yield f"{label}: {value:,} ({value / 2**20:,.1f} MiB)"
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{label}: {value:,}"
        else:
            yield f"{label}: {value}"

"""`pyinfer trace-view`: a trace as a page with pictures and tables."""

import argparse
from pathlib import Path

from ..errors import InputError
from . import common


def add(commands: common.Commands) -> None:
    parser = commands.add_parser(
        "trace-view",
        help="turn a trace into an HTML page",
        description="Reads what --trace FILE.json wrote and draws where the time went: by phase, by op, over "
        "the length of the context, and beside what the machine could do. The page needs nothing but itself.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="FILE.json", type=Path)
    parser.add_argument(
        "-o", "--output", metavar="FILE.html", type=Path, help="where to write it (the trace's name, .html)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..observe.draw import page
    from ..observe.report import read

    found = read(args.trace)
    file: Path = args.output if args.output is not None else args.trace.with_suffix(".html")
    common.writable("-o", file)
    if file.exists() and file.samefile(args.trace):
        raise InputError(f"-o {file}: that is the trace itself; give another name")
    # what UTF-8 has no bytes for, a lone surrogate of the JSON, goes out as a character reference
    file.write_text(page(found), encoding="utf-8", errors="xmlcharrefreplace")
    print(file)
    return 0

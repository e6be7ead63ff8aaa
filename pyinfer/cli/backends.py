"""`pyinfer backends`: which backends can run here, and why the others cannot."""

import argparse

from . import common


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("backends", help="print which backends can run here", allow_abbrev=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import pyinfer

    for name, state in pyinfer.backends().items():
        print(f"{name}: {state}")
    return 0

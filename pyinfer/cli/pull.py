"""`pyinfer pull`: fetch a model and print its path."""

import argparse

from . import common


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("pull", help="fetch a model and print its path", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help=common.MODEL_HELP)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import fetch

    print(fetch.resolve(args.model))
    return 0

"""`pyinfer digest`: fingerprints of the logits, to compare machines, backends and settings by."""

import argparse

from . import common


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("digest", help="print fingerprints of the logits", allow_abbrev=False)
    common.add_prompt(parser)
    parser.add_argument(
        "-n",
        type=common.number(int, 1),
        default=16,
        metavar="N",
        help="tokens to decode, greedily (%(default)s)",
    )
    common.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompt = common.prompt(args)
    with common.load(args) as model:
        common.print_json(model.digest(prompt, args.n))
    return 0

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
    common.add_watch(parser)
    parser.add_argument(
        "--record",
        choices=("ops",),
        help="add a fingerprint of what every op gave for each token, for `pyinfer diff` to name the first "
        "that differs",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompt, watching = common.prompt(args), common.observers(args)
    record = None
    if args.record:
        from ..observe import OpRecord

        record = OpRecord()
        watching.append(record)
    with common.load(args, watching) as model:
        found = model.digest(prompt, args.n)
        common.print_json(found | {"record": record.as_dict()} if record else found)
        common.profiles(watching)
    return 0

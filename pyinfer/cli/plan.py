"""`pyinfer plan`: a forward pass as the ops that it will run."""

import argparse

from . import common


def add(commands: common.Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="print the ops of a forward pass, with shapes and kernels",
        description="Nothing is run and no weight is read. The text only changes with the model, the options "
        "and the level: held against an older one, it shows what a change of the code moved.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-p", type=common.number(int, 1), default=5, metavar="N", help="tokens of the prompt (%(default)s)"
    )
    common.add_engine(parser, model_option=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import backend
    from ..fetch import resolve
    from ..gguf_file import GGUFFile
    from ..observe import plan

    ops = backend.create(args.backend, args.threads)
    ops = backend.unfused(ops, *args.unfused) if args.unfused else ops
    with GGUFFile(resolve(args.model)) as file:
        lines = plan(
            file, ops, prompt=args.p, kv=args.kv, kv_dtype=args.kv_dtype, n_ctx=args.ctx or args.p + 1
        )
    print("\n".join(lines))
    return 0

"""The command line: one file per command, each with `add(commands)`, which declares it, and `run(args)`.

Only argparse is imported up front: a command imports the engine when it runs, so that `--help` is instant.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from ..errors import PyinferError
from . import backends, bench, chat, diff, digest, generate, info, plan, pull, trace_view
from .common import complain, log_at

INTERRUPTED = 130  # what a shell gives for SIGINT
BROKEN_PIPE = 141  # ... and for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code. Raises SystemExit after --help (0) and on bad usage (2)."""
    _speak_utf8()
    try:
        args = _parser().parse_args(argv)
        if level := os.environ.get("PYINFER_LOG"):
            log_at(level)
        code: int = args.run(args)
        print(end="", flush=True)  # what cannot be written is found out here, not at interpreter exit
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough
        _abandon_broken_stdout()
        return BROKEN_PIPE
    except PyinferError as error:
        complain(error)
    except OSError as error:
        _abandon_broken_stdout()
        complain(error)
    except MemoryError:
        complain("out of memory; try a smaller model or a smaller --ctx")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyinfer",
        description="Runs GGUF language models on the CPU, with the same logits, to the byte, everywhere.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (generate, chat, digest, diff, bench, plan, trace_view, pull, info, backends):
        command.add(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: importlib.metadata is slow."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("pyinfer")
        except importlib.metadata.PackageNotFoundError:
            version = "(a source tree that is not installed)"
        print(f"pyinfer {version}")
        parser.exit()


def _speak_utf8() -> None:
    """Makes the standard streams UTF-8 in every locale; a path that is not UTF-8 goes out as it came in."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "surrogateescape"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _abandon_broken_stdout() -> None:
    """Sends what a failed stdout still buffers to nowhere: it would fail again, with a traceback, at exit."""
    try:
        print(end="", flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

"""What the commands share: argument types and groups, loading, and the metrics report."""

import argparse
import contextlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import InputError, PyinferError

if TYPE_CHECKING:
    import pyinfer

    from ..backend.tracing import Observer, TracingBackend

Number = TypeVar("Number", int, float)
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

KV_DTYPES = ("f16", "f32", "q8_0")
MODEL_HELP = "smollm2, a path to a .gguf file, or hf:OWNER/REPO[:QUANT or FILE]"


def number(
    kind: Callable[[str], Number], low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], Number]:
    """An argparse type: a finite `kind` in [low, high], or in (low, high] if `above`."""
    what = "a whole number" if kind is int else "a number"
    bound = f"above {low:g}" if above else f"at least {low:g}"
    wanted = f"{what} {bound}" if high == math.inf else f"{what} {bound} and at most {high:g}"

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        inside = low < value <= high if above else low <= value <= high  # false for nan
        if not inside or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def text(argument: str) -> str:
    """An argparse type: text that is valid Unicode (an argument that is not arrives with lone surrogates)."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{argument!r} is not valid text in this locale") from None
    return argument


def nonempty(argument: str) -> str:
    if not argument:
        raise argparse.ArgumentTypeError("an empty string would match everywhere")
    return text(argument)


def kv(argument: str) -> str:
    """An argparse type: a kind of KV cache, as `pyinfer.load` takes it."""
    if not re.fullmatch(r"positional|paged|append|sliding:[1-9][0-9]{0,11}", argument, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{argument!r} is none of positional, paged, append, sliding:N (a window of N tokens, at least 1)"
        )
    return argument


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", type=text, help='the text to go on from; "-" reads stdin')


def add_engine(parser: argparse.ArgumentParser, *, model_option: bool = True) -> None:
    """Which model, and how it is run. Of all this only the model, --kv-dtype and a sliding window can change
    a logit.
    """
    if model_option:
        parser.add_argument("-m", "--model", default="smollm2", help=f"{MODEL_HELP} (%(default)s)")
    else:
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("engine")
    group.add_argument("--backend", default="auto", metavar="NAME", help="one of `pyinfer backends` (auto)")
    group.add_argument("--threads", type=number(int, 1), metavar="N", help="worker threads (one per core)")
    group.add_argument(
        "--kv",
        type=kv,
        default="positional",
        metavar="KIND",
        help="the KV cache: positional, paged, append, or sliding:N, where a token sees itself and the N - 1 "
        "before it (%(default)s)",
    )
    group.add_argument(
        "--kv-dtype", default="f16", choices=KV_DTYPES, help="how K and V are stored (%(default)s)"
    )
    group.add_argument(
        "--ctx", type=number(int, 1), metavar="N", help="tokens the context holds (the model's, at most 8192)"
    )
    group.add_argument("--chunk", type=number(int, 1), metavar="N", help="tokens of a prompt run at once")
    group.add_argument(
        "--attention-policy",
        default="auto",
        choices=("auto", "sequential", "per-head", "per-kv-group", "split"),
        help="what a thread takes at a time of attention, for experiments; moves no byte (%(default)s)",
    )
    group.add_argument(
        "--unfused",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="OP,...",
        help="coarse ops to run by their defaults, of primitive ops; all: all of them; slower, same bytes",
    )
    group.add_argument(
        "--no-pack",
        dest="pack",
        action="store_false",
        help="run from the mapped file: slower, in half the memory, the same bytes",
    )


def add_watch(parser: argparse.ArgumentParser) -> None:
    """What is to be seen of the run."""
    group = parser.add_argument_group("watching")
    group.add_argument(
        "--trace-ops", action="store_true", help="log each call of an op to stderr, and how many there were"
    )
    group.add_argument("--profile", action="store_true", help="print time by phase to stderr, after the run")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a trace for ui.perfetto.dev, or `pyinfer trace-view`",
    )


def observers(args: argparse.Namespace) -> "list[Observer]":
    """Those that `add_watch`'s arguments ask for. Raises InputError for a file that cannot be written."""
    if args.trace_ops:
        log_at("trace", "pyinfer.ops")
    if not args.profile and args.trace is None:
        return []
    from ..observe import ChromeTrace, PhaseProfile

    found: list[Observer] = [PhaseProfile()] if args.profile else []
    if args.trace is not None:
        writable("--trace", args.trace)
        found.append(ChromeTrace(args.trace, measure=_machine))
    return found


def _machine(ops: "TracingBackend") -> dict[str, Any]:
    """For a trace: what this machine can do with the threads of a backend."""
    from ..backend.native import NativeBackend
    from ..bench import limits, machine

    found = limits(ops.inner) if isinstance(ops.inner, NativeBackend) else None
    return {"machine": machine(), "limits": asdict(found) if found else None}


def profiles(found: "Sequence[Observer]") -> None:
    """Prints those that were asked for, to stderr."""
    from ..observe import PhaseProfile

    for o in found:
        if isinstance(o, PhaseProfile):
            say(o.report())


def writable(option: str, file: Path) -> None:
    """Raises InputError where a file cannot be written, or is a model: before a run, not after it."""
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise InputError(f"{option} {file}: that is a folder; give the name of a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(
            f"{option} {file}: it may not be written; give another name, or change the permissions"
        )
    if _is_model(file):
        raise InputError(f"{option} {file}: that is a model, which would be lost; give another name")


def _is_model(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as start:
        return start.read(4) == b"GGUF"


LOG_LEVELS = {
    "trace": 5,
    **{name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")},
}


def log_at(level: str, logger: str = "pyinfer") -> None:
    """Lets a logger of the package write to stderr from that level on. Raises InputError."""
    if level not in LOG_LEVELS:
        raise InputError(f"PYINFER_LOG={level!r}: there are {', '.join(LOG_LEVELS)}")
    package = logging.getLogger("pyinfer")
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    logging.getLogger(logger).setLevel(LOG_LEVELS[level])


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    option = group.add_argument
    option(
        *("-n", "--max-tokens"),
        type=number(int, 1),
        default=max_tokens,
        metavar="N",
        help="tokens to generate at most (%(default)s)",
    )
    option("--temp", type=number(float, 0), default=0.0, metavar="T", help="temperature; 0 is greedy (0)")
    option("--top-k", type=number(int, 0), default=0, metavar="K", help="keep the K likeliest; 0 is all (0)")
    option("--top-p", type=number(float, 0, 1, above=True), default=1.0, metavar="P", help="nucleus (1)")
    option("--min-p", type=number(float, 0, 1), default=0.0, metavar="P", help="least share of the best (0)")
    option("--repeat-penalty", type=number(float, 1e-3, 1e6), default=1.0, metavar="X", help="1 is none (1)")
    option("--seed", type=number(int, 0, 2**64 - 1), default=0, metavar="N", help="of the sampler (0)")
    option(
        "--stop",
        type=nonempty,
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given more than once",
    )


def prompt(args: argparse.Namespace) -> str:
    """`add_prompt`'s argument: the text itself, or all of stdin for "-", less the newline that ends it."""
    given: str = args.prompt
    if given != "-":
        return given
    if sys.stdin is None:
        raise PyinferError("PROMPT is -, but standard input is closed")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PyinferError(f"standard input is not UTF-8 text: {error}") from None


def load(args: argparse.Namespace, observers: "Sequence[Observer]" = ()) -> "pyinfer.Model":
    """The model that `add_engine`'s arguments ask for."""
    import pyinfer

    return pyinfer.load(
        args.model,
        backend=args.backend,
        threads=args.threads,
        kv=args.kv,
        kv_dtype=args.kv_dtype,
        ctx=args.ctx,
        chunk=args.chunk,
        pack=args.pack,
        attention_policy=args.attention_policy,
        unfused=args.unfused,
        observers=observers,
    )


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """`add_sampling`'s arguments as keywords of `Model.stream`."""
    return {
        "max_tokens": args.max_tokens,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "seed": args.seed,
        "stop": tuple(args.stop),
    }


def report(model: "pyinfer.Model") -> str:
    """The lines about the last run: how it was done, and how fast."""
    metrics = model.metrics  # None: nothing was run
    forwards = metrics.per_forward_ms if metrics else []
    first = metrics.time_to_first_token_ms if metrics else None
    rate = metrics.decode_tokens_per_second if metrics else None

    def figure(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.3f}"

    spread = "n/a"
    if forwards:
        mean = sum(forwards) / len(forwards)
        spread = f"min {min(forwards):.3f}  max {max(forwards):.3f}  mean {mean:.3f}"
    return "\n".join(
        [
            f"backend: {model.backend}",
            f"kv cache: {model.kv}",
            "",
            "metrics:",
            f"  time_to_first_token_ms: {figure(first)}",
            f"  decode_tokens_per_second: {figure(rate)}",
            f"  per_forward_ms: {spread}  (n={len(forwards)})",
        ]
    )


def print_json(value: object) -> None:
    """Indented, but a list of numbers on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print(
        re.sub(
            r"\[\n\s*[-\d.,e+\s]+\n\s*\]",
            lambda m: re.sub(r"\s*\n\s*", " ", m[0]).replace("[ ", "[").replace(" ]", "]"),
            text,
        ),
        flush=True,
    )


def say(line: str) -> None:
    """One line, or a few, to stderr; that nobody reads it is no reason to fail."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def complain(error: object) -> None:
    say(f"pyinfer: error: {' '.join(str(error).split())}")

"""`pyinfer chat`: a conversation, a line from stdin at a time."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from ..errors import ChatError, ContextOverflowError
from . import common

if TYPE_CHECKING:
    import pyinfer

HELP = "/exit ends the conversation (so does end of file), /reset begins it again, /help prints this"


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("chat", help="talk with a model", description=HELP, allow_abbrev=False)
    parser.add_argument("--system", type=common.text, metavar="TEXT", help="the system message")
    common.add_engine(parser)
    common.add_sampling(parser, max_tokens=512)
    common.add_watch(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    watching = common.observers(args)
    with common.load(args, watching) as model:
        if model.chat_template is None:
            raise ChatError(f"{model.path} has no chat template; use `pyinfer generate`")
        if terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # line editing and history for input()
            common.say(HELP)
        opening = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(opening)
        while (line := _read(terminal)) is not None:
            match line.strip():
                case "":
                    pass
                case "/exit":
                    break
                case "/reset":
                    messages = list(opening)
                case "/help":
                    common.say(HELP)
                case word if word.startswith("/") and word[1:].isalpha():
                    common.say(f"unknown command {word}: {HELP}")
                case said:
                    messages.append({"role": "user", "content": said})
                    reply, interrupted = _reply(model, messages, args)
                    messages.append({"role": "assistant", "content": reply})
                    if interrupted and not terminal:
                        return 130
        common.profiles(watching)
    return 0


def _read(terminal: bool) -> str | None:
    """The next line, or None at the end of stdin."""
    if not terminal:
        return (sys.stdin and sys.stdin.readline()) or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _reply(
    model: "pyinfer.Model", messages: list[dict[str, str]], args: argparse.Namespace
) -> tuple[str, bool]:
    """Streams the answer to stdout. Gives it, and whether Ctrl-C cut it short.

    Raises ContextOverflowError when the conversation fills the context before the answer is complete.
    """
    assert model.chat_template is not None
    ids = model.chat_template.encode(messages, model.tokenizer, add_generation_prompt=True)
    room = model.n_ctx - len(ids)
    advice = "/reset begins again; a larger --ctx holds more"
    if room < 1:
        raise ContextOverflowError(
            f"the conversation has {len(ids)} tokens and the context holds {model.n_ctx}; {advice}"
        )
    options = common.sampling(args) | {"max_tokens": min(args.max_tokens, room)}
    stream = model.stream(ids, **options)
    text, finish_reason, interrupted = "", None, False
    try:
        for chunk in stream:
            text += chunk.text
            finish_reason = chunk.finish_reason or finish_reason
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    print(flush=True)
    if finish_reason == "length":
        if room <= args.max_tokens:
            raise ContextOverflowError(f"the context of {model.n_ctx} tokens is full; {advice}")
        common.say(f"[cut at {args.max_tokens} tokens: -n sets more]")
    return text, interrupted

"""`pyinfer generate`: text to stdout as it comes, metrics to stderr."""

import argparse

from . import common


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("generate", help="go on from a prompt", allow_abbrev=False)
    common.add_prompt(parser)
    common.add_engine(parser)
    common.add_sampling(parser, max_tokens=128)
    common.add_watch(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    text: list[str] = []
    tokens: list[int] = []
    finish_reason, code = None, 0
    prompt, watching = common.prompt(args), common.observers(args)
    with common.load(args, watching) as model:
        stream = model.stream(prompt, **common.sampling(args))
        try:
            for chunk in stream:
                text.append(chunk.text)
                if chunk.token is not None:
                    tokens.append(chunk.token)
                finish_reason = chunk.finish_reason or finish_reason
                if not args.json:
                    print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            code = 130
            stream.close()  # the engine completes its metrics
        if not args.json:
            print(flush=True)
            common.say(common.report(model))
            common.profiles(watching)
            return code
        metrics = model.metrics
        common.print_json(
            {
                "text": "".join(text),
                "tokens": tokens,
                "finish_reason": finish_reason,
                "backend": model.backend,
                "kv": model.kv,
                "metrics": metrics
                and {
                    "n_prompt_tokens": metrics.n_prompt_tokens,
                    "time_to_first_token_ms": metrics.time_to_first_token_ms,
                    "decode_tokens_per_second": metrics.decode_tokens_per_second,
                    "per_forward_ms": list(metrics.per_forward_ms),
                },
            }
        )
        common.profiles(watching)
    return code

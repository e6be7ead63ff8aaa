"""A stand-in for the engine: `install` puts it into pyinfer; as a script it is the command line over it."""

import itertools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyinfer
from pyinfer.errors import BackendError, ChatError

REPLY = ["Hej ", "då, ", "värl", "den ", "😀"]


@dataclass(frozen=True)
class Chunk:
    text: str
    token: int | None
    logprob: float | None
    finish_reason: str | None


class Template:
    def encode(self, messages, tokenizer, add_generation_prompt=True):
        """One token per character of the conversation."""
        assert add_generation_prompt
        return [ord(c) for message in messages for c in f"{message['role'][0]}{message['content']}"]


class Model:
    """Says REPLY, over and over, up to max_tokens; keeps what it was called with in `calls`."""

    path, tokenizer, kv, backend = Path("toy.gguf"), object(), "positional", "parallel"

    def __init__(self, model, **options):
        self.options = {"model": model, **options}
        self.calls = []
        self.n_ctx = options["ctx"] or 1000
        self.metrics = None
        self.closed = False

    @property
    def chat_template(self):
        if os.environ.get("FAKE_BAD_TEMPLATE"):
            raise ChatError("tokenizer.chat_template is not valid Jinja at line 3: why")
        return None if os.environ.get("FAKE_NO_TEMPLATE") else Template()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def stream(self, prompt, **options):
        self.calls.append((prompt, options))
        times = []
        try:
            for i, text in enumerate(itertools.islice(itertools.cycle(REPLY), options["max_tokens"])):
                time.sleep(float(os.environ.get("FAKE_DELAY", "0")))
                times.append(100.0 if i == 0 else 20.0 + i)
                done = text == REPLY[-1] and not os.environ.get("FAKE_ENDLESS")
                cut = i + 1 == options["max_tokens"]
                yield Chunk(text, 7 + i, -0.5, "stop" if done else "length" if cut else None)
                if done:
                    return
                if i == 1 and os.environ.get("FAKE_READY"):
                    print("two pieces are out", file=sys.stderr, flush=True)
        finally:
            rate = (len(times) - 1) / sum(times[1:]) * 1e3 if len(times) > 1 else None
            self.metrics = SimpleNamespace(
                n_prompt_tokens=len(prompt),
                time_to_first_token_ms=123.4567,
                decode_tokens_per_second=rate,
                per_forward_ms=times,
            )

    def digest(self, prompt, n):
        return {"numerics": 1, "model_sha256": "ab", "tokens": [len(prompt)] * n, "logits_sha256": "cd"}

    def describe(self):
        return {
            "architecture": "llama",
            "parameter_count": 134_515_008,
            "file_bytes": 98_362_432,
            "kv_caches_bytes": {"paged, f16": 94_371_840},
            "tensor_types": {"Q4_1": 210, "F32": 61},
            "kernels": {"matmul_q4_1": "pi_matmul_q4_1_avx2"},
        }


def install(setattr=setattr) -> list[Model]:
    """Gives the models that will have been loaded."""
    models = []

    def load(model="smollm2", **options):
        if options["backend"] == "quantum":
            raise BackendError("backend 'quantum' is unknown:\n  `pyinfer backends` lists them")
        models.append(Model(model, **options))
        return models[-1]

    setattr(pyinfer, "load", load)
    setattr(pyinfer, "backends", lambda: {"parallel": "available", "metal": "unavailable: not a Mac"})
    return models


if __name__ == "__main__":
    install()
    from pyinfer.cli import main

    if os.environ.get("FAKE_READY"):
        print("started", file=sys.stderr, flush=True)
    sys.exit(main())

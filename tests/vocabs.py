"""Small vocabularies, as a GGUF file's metadata describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_letters() -> list[str]:
    """The 256 letters of a byte-level vocabulary, by byte."""
    letters, n = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n))
            n += 1
    return letters


def bpe(
    pre: str = "smollm",
    merges: Sequence[str] = ("Ġ t", "h e", "Ġt he", "a b", "ab c"),
    control: Sequence[str] = CHATML,
    user_defined: Sequence[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """Byte-level: the control tokens, the bytes, one token for each merge, the user-defined tokens."""
    words = list(dict.fromkeys(m.replace(" ", "") for m in merges))
    tokens = [*control, *byte_letters(), *words, *user_defined]
    types = [CONTROL] * len(control) + [NORMAL] * (256 + len(words)) + [USER_DEFINED] * len(user_defined)
    special = {"bos_token_id": 1, "eos_token_id": 2} if len(control) > 2 else {}
    return _named(
        {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": np.array(types, np.int32),
         "merges": list(merges), **special, **keys}
    )  # fmt: skip


def spm(
    words: Mapping[str, float],
    control: Sequence[str] = (),
    user_defined: Sequence[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """SentencePiece: unk, bos, eos, the bytes, words with scores, then control and user-defined tokens."""
    base = ["<unk>", "<s>", "</s>"]
    tokens = [*base, *(f"<0x{b:02X}>" for b in range(256)), *words, *control, *user_defined]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words)
    types += [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    scores = [0.0] * 259 + list(words.values()) + [0.0] * (len(control) + len(user_defined))
    return _named(
        {
            "model": "llama",
            "tokens": tokens,
            "token_type": types,
            "scores": np.array(scores, np.float32),
            **keys,
        }
    )


def _named(values: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}

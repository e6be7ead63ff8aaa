"""Text out of a stream of tokens, as soon as it is certain.

Two things can make text uncertain. A token may end in the middle of a character, and the text may be on its
way to a stop string. Both are held back until the next tokens decide.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from pyinfer.errors import InputError
from pyinfer.tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text, up to the first stop string.

    What all calls of `feed` and the final `flush` return, joined, is `tokenizer.decode` of all ids, cut where
    the earliest stop string begins.

    Attributes:
        stopped: whether a stop string was completed; from then on nothing more is returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = ()) -> None:
        """Starts a text.

        Args:
            stop: texts that end the output and are no part of it.

        Raises:
            InputError: a stop string is empty or not a string.
        """
        if not isinstance(stop, Iterable):
            raise InputError(f"stop={stop!r}: give a text, or several")
        self._stops = [stop] if isinstance(stop, str) else list(stop)
        for i, text in enumerate(self._stops):
            if not isinstance(text, str) or not text:
                raise InputError(f"stop[{i}] is {text!r}; a stop string must hold at least one character")
        self.stopped = False
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space
        self._held = ""

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; often "".

        Raises:
            InputError: the id is outside the vocabulary.
        """
        data = self._tokenizer.token_bytes(token_id)
        if self.stopped:
            return ""
        if data and self._drop_space:
            data, self._drop_space = data.removeprefix(b" "), False
        self._held += self._decoder.decode(data)
        return self._release(final=False)

    def flush(self) -> str:
        """The text still held back, as no token follows; bytes of an unfinished character become U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        text, end = self._held, len(self._held)
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=end)
        certain = end if final else min((_partial(text, stop) for stop in self._stops), default=end)
        # A whole stop string must wait for another that may have begun before it.
        if found < end and found <= certain:
            self.stopped, self._held = True, ""
            return text[:found]
        self._held = text[certain:]
        return text[:certain]


def _partial(text: str, stop: str) -> int:
    """Where the longest end of `text` starts that is a proper start of `stop`; else the length."""
    longest = min(len(stop) - 1, len(text))
    return next((len(text) - n for n in range(longest, 0, -1) if text.endswith(stop[:n])), len(text))

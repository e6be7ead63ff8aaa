from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import vocabs

from pyinfer.errors import InputError
from pyinfer.textstream import TextStream
from pyinfer.tokenizer import Tokenizer

WORDS = {"\u2581": -9.0, "a": -5.0, "b": -6.0, "ab": -1.0, "\u2581a": -2.0}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    # Every string of one to three of these letters is a token, so that a text has many splits.
    letters = "abE"
    pairs = [f"{x} {y}" for x in letters for y in letters]
    triples = [f"{x}{y} {z}" for x in letters for y in letters for z in letters]
    return Tokenizer.from_gguf(vocabs.bpe("gpt-2", [*pairs, *triples]))


def random_split(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids of `text` by tokens of random lengths, characters of several bytes cut anywhere."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(3, tokenizer.n_vocab)}
    data, ids = text.encode(), []
    while data:
        n = rng.choice([n for n in (1, 2, 3) if data[:n] in by_bytes])
        ids.append(by_bytes[data[:n]])
        data = data[len(data[:n]) :]
    return ids


def cut(text: str, stops: Sequence[str]) -> str:
    return text[: min([i for stop in stops if (i := text.find(stop)) >= 0], default=len(text))]


def run(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*map(stream.feed, ids), stream.flush()]


@pytest.mark.parametrize("seed", range(4))
def test_output_is_the_text_up_to_the_first_stop_however_split(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        text = "".join(rng.choices(["a", "b", "E", "é", "🌍", " "], [6, 6, 1, 1, 1, 1], k=rng.randrange(12)))
        stops = ["".join(rng.choices("aabbEé", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        ids = random_split(tokenizer, text, rng)
        stream = TextStream(tokenizer, stops)
        out = run(stream, ids)
        assert "".join(out) == cut(text, stops), (text, stops, ids)
        assert stream.stopped == any(stop in text for stop in stops)
        assert "\ufffd" not in "".join(out)


def test_without_stops_whole_characters_are_out_at_once(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert [stream.feed(i) for i in tokenizer.encode("é🌍\n")] == ["", "é", "", "", "", "🌍", "\n"]
    assert stream.flush() == ""


@pytest.mark.parametrize(
    ("stops", "tokens", "expected"),
    [
        (["aab"], ["a", "a", "a", "b", "a"], ["", "", "a", "", "", ""]),
        (["aab"], ["a", "b", "aa"], ["", "ab", "", "aa"]),  # what only looked like a stop comes out
        (["b"], ["abE", "b"], ["a", "", ""]),  # inside one token
        (["E", "bE"], ["ab", "E"], ["a", "", ""]),
        (["abab", "ba"], ["aba", "b"], ["", "", ""]),  # "ba" is complete, "abab" began before it
        (["abab", "ba"], ["aba", "E"], ["", "a", ""]),
        (["abab", "ba"], ["aba"], ["", "a"]),
        ("ab", ["a", "b"], ["", "", ""]),  # one string is one stop
        (["é"], ["a", "é", "b"], ["a", "", "", "", ""]),
    ],
)
def test_text_waits_while_a_stop_is_possible(
    tokenizer: Tokenizer, stops: str | list[str], tokens: list[str], expected: list[str]
) -> None:
    ids = [i for text in tokens for i in tokenizer.encode(text)]
    stream = TextStream(tokenizer, stops)
    assert run(stream, ids) == expected
    full = "".join(tokens)
    assert stream.stopped == any(s in full for s in ([stops] if isinstance(stops, str) else stops))


def test_nothing_comes_after_a_stop(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["E"])
    ids = tokenizer.encode("abE")
    assert len(ids) == 1
    assert stream.feed(ids[0]) == "ab"
    assert stream.stopped
    assert stream.feed(ids[0]) == ""
    assert stream.flush() == ""


def test_unfinished_characters_end_as_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🌍")
    for n, expected in [(2, "a\ufffd"), (4, "a\ufffd"), (5, "a🌍")]:
        out = run(TextStream(tokenizer), ids[:n])
        assert "".join(out) == tokenizer.decode(ids[:n]) == expected
    mixed = [ids[1], ids[0], ids[2], ids[2], ids[0]]  # bytes that are never UTF-8
    assert "".join(run(TextStream(tokenizer), mixed)) == tokenizer.decode(mixed)


def test_control_tokens_add_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>é<|im_end|>", parse_special=True)
    assert run(TextStream(tokenizer), [*ids[:2], 0, *ids[2:]]) == ["", "", "", "é", "", ""]


@pytest.mark.parametrize("prefix", [True, False])
def test_spm_leading_space_is_as_decode_has_it(prefix: bool) -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.spm(WORDS, add_space_prefix=prefix))
    for text in ("a ab", " a", "  ab ", "é a", ""):
        ids = tokenizer.encode(text)
        assert "".join(run(TextStream(tokenizer), ids)) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("stop", ["", ["a", ""], [None], [b"a"]])
def test_unusable_stops_are_refused(tokenizer: Tokenizer, stop: object) -> None:
    with pytest.raises(InputError, match=r"stop\[\d\]"):
        TextStream(tokenizer, stop)  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="outside the vocabulary"):
        TextStream(tokenizer).feed(tokenizer.n_vocab)

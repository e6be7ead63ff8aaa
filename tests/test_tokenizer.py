from __future__ import annotations

import random
import unicodedata
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import vocabs

from pyinfer.errors import InputError, ModelError
from pyinfer.tokenizer import Tokenizer

PRES = ["smollm", "llama-bpe", "qwen2", "gpt-2"]

ALPHABET = [
    *"aAzZ 0123456789.,!?'\"<|>[]{}_-\t\n\r",
    " ", "  ", "\r\n", "\x00", "\x1b", "\x7f", "\u00a0", "\u2028", "\u3000", "\ufeff", "\ufffd", "\u2581",
    "é", "e\u0301", "ß", "İ", "ﬁ", "中", "文", "日", "한", "ع", "ה", "ก", "½", "Ⅻ", "٣",
    "🌍", "👩\u200d👩\u200d👧", "🇫🇷", "\U000e0001", "\U0010ffff", "'ll", "'RE", "the", "abc", "<|im_end|>",
]  # fmt: skip


def random_texts(seed: int, count: int = 200) -> list[str]:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 40))) for _ in range(count)]
    # Any code point, but for surrogates.
    texts += ["".join(chr(c) for c in rng.choices(range(0xD800), k=30)) for _ in range(20)]
    texts += ["".join(chr(c) for c in rng.choices(range(0xE000, 0x110000), k=30)) for _ in range(20)]
    return ["", *texts]


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in tokenizer._rust.pre_tokenizer.pre_tokenize_str(text)]


# Byte-level BPE ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", PRES)
def test_decode_undoes_encode_for_any_text(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe(pre, add_bos_token=False))
    for text in random_texts(seed=1):
        ids = tokenizer.encode(text)
        if pre == "qwen2":  # the one family that normalises
            text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I've 12abc  !? \n\n end  ", ["I", "'ve", " 12", "abc", " ", " !?", " \n\n", " end", "  "]),
        ("gpt-2", "IT'S 你好。", ["IT", "'", "S", " 你好", "。"]),
        ("smollm", "a 12 b3's", ["a", " ", "1", "2", " b", "3", "'s"]),
        ("smollm", "x ½٣\n y", ["x", " ", "½", "٣", "\n", " y"]),
        ("llama-bpe", "We'RE 12345 x\n\n  y!!\n你好 ",
         ["We", "'RE", " ", "123", "45", " x", "\n\n", " ", " y", "!!\n", "你好", " "]),
        ("llama-bpe", "(a) 1234567\r\n\tb", ["(a", ")", " ", "123", "456", "7", "\r\n", "\tb"]),
        ("qwen2", "We'RE 123 x\n\n  y!!\n你好 ",
         ["We", "'RE", " ", "1", "2", "3", " x", "\n\n", " ", " y", "!!\n", "你好", " "]),
        ("llama3", "1234", ["123", "4"]),
        ("llama-v3", "1234", ["123", "4"]),
    ],
)  # fmt: skip
def test_words_are_cut_by_the_family_s_rule(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(Tokenizer.from_gguf(vocabs.bpe(pre)), text) == expected


def test_merges_apply_by_rank_and_inside_words() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe())

    def texts(text: str) -> list[bytes]:
        return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]

    assert texts("the the") == [b"t", b"he", b" the"]
    assert texts("abcab") == [b"abc", b"ab"]
    assert texts("a bc") == [b"a", b" ", b"b", b"c"]
    assert texts("é") == [b"\xc3", b"\xa9"]


def test_only_llama3_takes_a_whole_word_over_its_merges() -> None:
    merges = ("a b", "b c", "a bc")  # of "abc", rank by rank: ab, c
    by_pre = {pre: Tokenizer.from_gguf(vocabs.bpe(pre, merges, add_bos_token=False)) for pre in PRES}
    counts = {pre: len(tokenizer.encode("abc")) for pre, tokenizer in by_pre.items()}
    assert counts == {"smollm": 2, "llama-bpe": 1, "qwen2": 2, "gpt-2": 2}


def test_qwen_normalises_to_composed_characters() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_a_character_without_tokens_is_refused_not_dropped() -> None:
    metadata = vocabs.bpe()
    letter = vocabs.byte_letters()[4]
    metadata["tokenizer.ggml.tokens"][3 + 4] = "instead of " + letter
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("fine")
    with pytest.raises(InputError, match=r"U\+0004"):
        tokenizer.encode("not \x04 fine")


def test_a_token_added_as_plain_text_keeps_its_text() -> None:
    metadata = vocabs.bpe()
    metadata["tokenizer.ggml.tokens"][-1] = "中 文"
    metadata["tokenizer.ggml.merges"].pop()
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == "中 文".encode()


# Special tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", PRES)
def test_control_tokens_are_read_only_on_request(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe(pre, add_bos_token=False))
    text = "<|im_start|>hi<|im_end|>"
    plain = tokenizer.encode(text)
    assert not set(plain) & {0, 1, 2}
    assert tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed == [1, *tokenizer.encode("hi"), 2]
    assert tokenizer.decode(parsed) == "hi"
    assert tokenizer.decode(parsed, skip_special=False) == text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_merges_never_make_a_control_token(pre: str) -> None:
    metadata = vocabs.bpe(pre, add_bos_token=False)
    metadata["tokenizer.ggml.token_type"][-1] = vocabs.CONTROL  # "abc", a word and what a merge makes
    tokenizer = Tokenizer.from_gguf(metadata)
    abc = tokenizer.n_vocab - 1
    assert abc not in tokenizer.encode("abc")
    assert tokenizer.encode("abc", parse_special=True) == [abc]


def test_user_defined_tokens_are_always_read_longest_first() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe(user_defined=["<tool>", "<tool><tool>", "中"]))
    n = tokenizer.n_vocab
    for parse_special in (False, True):
        ids = tokenizer.encode("<tool><tool><tool>中", parse_special=parse_special)
        assert ids == [n - 2, n - 3, n - 1]
        assert tokenizer.decode(ids) == "<tool><tool><tool>中"
    assert not tokenizer.is_special(n - 1)
    assert tokenizer.token_bytes(n - 1) == "中".encode()


def test_unused_tokens_are_never_encoded_and_silent() -> None:
    metadata = vocabs.bpe("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.token_type"][-1] = vocabs.UNUSED
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.n_vocab - 1 not in tokenizer.encode("abc", parse_special=True)
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b""


@pytest.mark.parametrize(
    ("pre", "keys", "expected"),
    [
        ("smollm", {}, "x"),
        ("qwen2", {}, "x"),
        ("llama-bpe", {}, "<x"),
        ("llama3", {"add_bos_token": False}, "x"),
        ("smollm", {"add_bos_token": True}, "<x"),
        ("smollm", {"add_bos_token": np.bool_(True), "add_eos_token": True}, "<x>"),
        ("gpt-2", {"add_eos_token": True}, "x>"),
    ],
)
def test_begin_and_end_are_added_as_the_model_says(pre: str, keys: dict[str, Any], expected: str) -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe(pre, **keys))
    x = tokenizer.encode("x", add_special=False)
    wanted = [i for c in expected for i in ({"<": [1], ">": [2], "x": x}[c])]
    assert tokenizer.encode("x") == wanted
    assert len(x) == 1


def test_begin_is_never_added_twice() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe(add_bos_token=True))
    assert tokenizer.encode("<|im_start|>x", parse_special=True) == tokenizer.encode("x")
    typed = tokenizer.encode("<|im_start|>x")
    assert typed[0] == 1
    assert tokenizer.decode(typed) == "<|im_start|>x"
    assert tokenizer.encode("") == [1]


def test_stop_ids_are_named_ones_and_end_of_turn_markers() -> None:
    control = ["<|endoftext|>", "<|begin|>", "<|eot_id|>", "<|reserved|>", "<|other|>"]
    tokenizer = Tokenizer.from_gguf(vocabs.bpe(control=control, eos_token_id=4, eom_token_id=np.uint32(3)))
    assert tokenizer.stop_ids == {0, 2, 3, 4}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 4)


def test_an_end_of_turn_marker_of_the_wrong_type_is_not_typed_by_users() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe(user_defined=["<|eot_id|>"]))
    eot = tokenizer.n_vocab - 1
    assert eot in tokenizer.stop_ids
    assert eot not in tokenizer.encode("<|eot_id|>")


# SentencePiece -------------------------------------------------------------------------------------

WORDS = {
    "\u2581": -100.0, "a": -20.0, "b": -21.0, "c": -22.0, "h": -23.0, "e": -24.0, "l": -25.0, "o": -26.0,
    "ab": -3.0, "bc": -2.0, "abc": -9.0, "\u2581a": -4.0, "ll": -1.0, "he": -5.0, "hell": -6.0,
    "\u2581hell": -6.5,
    "\u2581hello": -7.0, "hello": -8.0, "\u2581\u2581": -10.0, "aa": -3.5, "<": -30.0, "s": -31.0, ">": -32.0,
    "<s": -33.0, "é": -34.0,
}  # fmt: skip


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE word for word: merge the neighbours whose join scores best, leftmost first."""
    parts = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            return parts
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("seed", range(3))
def test_spm_merges_as_the_scores_order(seed: int) -> None:
    metadata = vocabs.spm(WORDS)
    tokenizer, tokens = Tokenizer.from_gguf(metadata), metadata["tokenizer.ggml.tokens"]
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices("aabbcchello  <s>", k=rng.randrange(1, 25)))
        expected = merge_by_score("\u2581" + text.replace(" ", "\u2581"), WORDS)
        assert [tokens[i] for i in tokenizer.encode(text, add_special=False)] == expected


def test_spm_begins_with_bos_and_a_space() -> None:
    metadata = vocabs.spm(WORDS)
    tokenizer, tokens = Tokenizer.from_gguf(metadata), metadata["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("hello")
    assert [tokens[i] for i in ids] == ["<s>", "\u2581hello"]
    assert tokenizer.token_bytes(ids[1]) == b" hello"
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.encode("") == [1]


def test_spm_without_space_prefix() -> None:
    metadata = vocabs.spm(WORDS, add_space_prefix=False, add_bos_token=False)
    tokenizer, tokens = Tokenizer.from_gguf(metadata), metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("hello hello")] == ["hello", "\u2581hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_spm_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.spm(WORDS))
    ids = tokenizer.encode("中\n", add_special=False)
    assert tokenizer.encode("", add_special=False) == []
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xe4", b"\xb8", b"\xad", b"\n"]
    assert tokenizer.decode(ids) == "中\n"


def test_spm_decode_undoes_encode() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.spm(WORDS))
    for text in random_texts(seed=2):
        if "\u2581" not in text:  # SentencePiece's own space
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spm_typed_special_and_byte_texts_stay_text() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.spm(WORDS, control=["[INST]"]))
    for text in ("<s>", "</s>", "<unk>", "[INST]", "<0x0A>"):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids) == text
        assert not any(map(tokenizer.is_special, ids))
    inst = tokenizer.n_vocab - 1
    assert tokenizer.encode("<s>[INST]</s>", parse_special=True) == [1, inst, 2]


def test_spm_without_byte_tokens_uses_unk() -> None:
    metadata = vocabs.spm(WORDS)
    keep = [0, 1, 2, *range(259, 259 + len(WORDS))]
    for name in ("tokens", "token_type", "scores"):
        metadata[f"tokenizer.ggml.{name}"] = [metadata[f"tokenizer.ggml.{name}"][i] for i in keep]
    metadata["tokenizer.ggml.scores"] = np.array(metadata["tokenizer.ggml.scores"])
    assert Tokenizer.from_gguf(metadata).encode("a中文")[-1] == 0
    metadata["tokenizer.ggml.token_type"][0] = vocabs.NORMAL
    with pytest.raises(ModelError, match="unknown_token_id"):
        Tokenizer.from_gguf(metadata)


# What is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", None, "model is missing"),
        ("model", "t5", "'t5'; supported are 'gpt2' and 'llama'"),
        ("model", 3, "not of type str"),
        ("model", np.array([1, 2]), r"model is array\(\[1, 2\]\), not of type str"),
        ("model", np.array([1]), "not of type str"),
        ("add_bos_token", np.array([], np.uint32), "not of type bool"),
        ("pre", None, "pre is missing"),
        ("pre", "default", "'default'; supported are gpt-2, llama-bpe.*qwen2, smollm"),
        ("tokens", None, "tokens is missing"),
        ("tokens", "abc", "tokens is of type str"),
        ("tokens", [], "tokens is empty"),
        ("tokens", [1, 2], "not strings"),
        ("tokens", ["a", "\ud800"], "not valid Unicode"),
        ("tokens", ["a", "b", "a"], "holds 'a' twice, as ids 0 and 2"),
        ("token_type", None, "token_type is missing"),
        ("token_type", [1, 1], "token_type has 2 elements for 264 tokens"),
        ("token_type", [1] * 263 + [9], r"token_type\[263\] is 9"),
        ("token_type", [1] * 263 + [1.5], r"token_type\[263\] is 1.5"),
        ("token_type", [6] + [1] * 263, r"tokens\[0\] is '<\|endoftext\|>', but its type says a byte"),
        ("merges", None, "merges is missing"),
        ("merges", ["a b", "a zz"], r"merges\[1\] is 'a zz'"),
        ("merges", ["a c"], r"merges\[0\] is 'a c'"),
        ("merges", ["ab"], r"merges\[0\] is 'ab'"),
        ("merges", [["a", "b"]], "merges holds elements that are not strings"),
        ("bos_token_id", 264, "bos_token_id is 264, but the ids are 0 to 263"),
        ("eos_token_id", -1, "eos_token_id is -1"),
        ("padding_token_id", np.uint32(4294967295), "padding_token_id is 4294967295"),
        ("bos_token_id", "1", "bos_token_id is '1', not of type int"),
        ("add_bos_token", 1, "add_bos_token is 1, not of type bool"),
    ],
)
def test_bad_metadata_is_refused_by_key(name: str, value: Any, message: str) -> None:
    metadata = vocabs.bpe()
    metadata[f"tokenizer.ggml.{name}"] = value
    if value is None:
        del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_gguf(metadata)
    assert f"tokenizer.ggml.{name}" in str(caught.value) or name == "token_type"


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "scores is missing"),
        ([0.0], "scores has 1 elements"),
        ([float("nan")] * 284, r"scores\[0\] is nan"),
    ],
)
def test_bad_scores_are_refused(scores: Any, message: str) -> None:
    metadata = {**vocabs.spm(WORDS), "tokenizer.ggml.scores": scores}
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata)


def test_a_wanted_but_unnamed_begin_token_is_refused() -> None:
    metadata = vocabs.bpe("llama-bpe")
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ModelError, match="bos_token_id is missing"):
        Tokenizer.from_gguf(metadata)


def test_lone_surrogates_are_refused() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe())
    with pytest.raises(InputError, match=r"U\+D83D.*errors='replace'"):
        tokenizer.encode("half \ud83d")
    with pytest.raises(ValueError, match="surrogate"):
        Tokenizer.from_gguf(vocabs.spm(WORDS)).encode("\udfff")


@pytest.mark.parametrize("bad", [-1, 264, 2**40, 1.0, "a", None])
def test_ids_outside_the_vocabulary_are_refused(bad: Any) -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe())
    assert tokenizer.n_vocab == 264
    for call in (tokenizer.token_bytes, tokenizer.is_special, lambda i: tokenizer.decode([3, i])):
        with pytest.raises(InputError, match="token id"):
            call(bad)


def test_numpy_ids_are_ids() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe())
    assert tokenizer.decode(np.array(tokenizer.encode("the abc"))) == "the abc"


def test_broken_utf8_decodes_to_replacement_characters() -> None:
    tokenizer = Tokenizer.from_gguf(vocabs.bpe())
    assert tokenizer.decode(tokenizer.encode("a🌍b")[:-2]) == "a\ufffd"

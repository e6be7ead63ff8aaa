"""Text to token ids and back, from the vocabulary a GGUF file carries.

Two kinds of vocabulary are known. `gpt2` is byte-level BPE: the text is cut into words by a rule that each
model family chose for itself (`tokenizer.ggml.pre`), and each word's bytes are merged by rank. `llama` is the
BPE of SentencePiece: no words, spaces become U+2581, merges are ordered by the score of the token they make,
and characters outside the vocabulary fall back to byte tokens. The `tokenizers` library does the merging.

Control tokens are kept out of the vocabulary that the library sees. So no text can become one by merging:
they are found by this file alone, as whole texts, and only where the caller asks for it (`parse_special`).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from pyinfer.errors import InputError, ModelError

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# A control token with one of these texts ends a turn, whatever the file calls its end-of-sequence token.
_END_OF_TURN = frozenset({
    "</s>", "<eos>", "<|end|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_turn>", "<end_of_utterance>",
})  # fmt: skip


class _Type(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Types whose text is no part of what was written: never made from plain text, and they add nothing to it.
_SILENT = frozenset({int(_Type.UNKNOWN), int(_Type.CONTROL), int(_Type.UNUSED)})


def _word_rule(digits: str) -> Any:
    """The split of Llama 3 and Qwen 2, which differ only in how many digits make a word."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # letters, with one leading space or sign
        rf"|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation, with the line ends after it
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # blank lines; spaces, less the one that belongs to the next word
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2_rule() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_rule() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_rule()])


_WORD_RULES: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2_rule,
    "llama-bpe": lambda: _word_rule("{1,3}"),
    "qwen2": lambda: _word_rule(""),
    "smollm": _smollm_rule,
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def _byte_letters() -> list[str]:
    """The letter for each byte in a byte-level vocabulary: itself if it prints, else U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + hidden.index(b)) for b in range(256)]


_LETTER_OF_BYTE = _byte_letters()
_BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(_LETTER_OF_BYTE)}


class Tokenizer:
    """Encodes and decodes with one model's vocabulary. Safe to share between threads; build with `from_gguf`.

    Attributes:
        n_vocab: number of tokens; ids are `0 .. n_vocab - 1`.
        bos_id, eos_id: the begin and end of sequence tokens, None where the file names none.
        add_bos, add_eos: whether `encode(add_special=True)` adds them.
        stop_ids: tokens after which generation ends.
        special_tokens: text -> id of the tokens that only `parse_special` finds in a text.
        drops_first_space: whether `decode` drops one leading space, because `encode` put one there.
    """

    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    stop_ids: frozenset[int]
    special_tokens: Mapping[str, int]
    drops_first_space: bool

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file's `tokenizer.ggml.*` keys describe.

        Args:
            metadata: key -> value; arrays as lists or numpy arrays.

        Raises:
            ModelError: a key is missing, ill-typed, inconsistent with the others or of an unknown kind.
        """
        return cls(metadata)

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        kind = _get(metadata, "model", str)
        if kind not in ("gpt2", "llama"):
            raise ModelError(f"{_PREFIX}model is {kind!r}; supported are 'gpt2' and 'llama'")
        self._is_spm = kind == "llama"
        tokens = _strings(metadata, "tokens")
        self._tokens: Sequence[str] = metadata[_PREFIX + "tokens"]  # as the file holds them: smaller
        self.n_vocab = len(tokens)
        ids = _index(tokens)
        self._types = _types(metadata, tokens)
        self._pre = "" if self._is_spm else _pre(metadata)
        self._set_special(metadata, ids)

        odd = {text: t for text, t in zip(tokens, self._types, strict=True) if t != 1 and text}
        silent = {text for text, type_ in odd.items() if type_ in _SILENT}
        user_defined, unused = int(_Type.USER_DEFINED), int(_Type.UNUSED)
        user = {text: ids[text] for text, type_ in odd.items() if type_ == user_defined}
        self.special_tokens = {text: ids[text] for text in silent if odd[text] != unused}
        self._ids = {**user, **self.special_tokens}
        self._user_pattern = _any_of(user)
        self._all_pattern = _any_of(self._ids)

        for text in (*silent, ""):
            ids.pop(text, None)
        if self._is_spm:
            self._rust = self._build_spm(metadata, ids)
        else:
            self._rust = self._build_bpe(metadata, ids, silent)

    def _set_special(self, metadata: Mapping[str, Any], ids: dict[str, int]) -> None:
        """Reads the ids and flags of the special tokens, each checked against the vocabulary's size."""
        named: dict[str, int] = {}
        for key in metadata:
            if key.startswith(_PREFIX) and key.endswith("_token_id"):
                name = key[len(_PREFIX) : -len("_token_id")]
                id_ = named[name] = _get(metadata, f"{name}_token_id", int)
                if not 0 <= id_ < self.n_vocab:
                    raise ModelError(f"{key} is {id_}, but the ids are 0 to {self.n_vocab - 1}")
        if self._is_spm:  # the ids SentencePiece gives unless told otherwise
            for id_, name in enumerate(("unknown", "bos", "eos")):
                if self._types[id_ : id_ + 1] == [_Type.CONTROL if id_ else _Type.UNKNOWN]:
                    named.setdefault(name, id_)

        self.bos_id, self.eos_id, self._unk_id = (named.get(n) for n in ("bos", "eos", "unknown"))
        self.add_bos = _get(metadata, "add_bos_token", bool, self._is_spm or self._pre == "llama-bpe")
        self.add_eos = _get(metadata, "add_eos_token", bool, False)
        for flag, name in ((self.add_bos, "bos"), (self.add_eos, "eos")):
            if flag and name not in named:
                raise ModelError(
                    f"{_PREFIX}{name}_token_id is missing, but the model wants that token added; "
                    f"give the id, or set {_PREFIX}add_{name}_token to false"
                )
        self.drops_first_space = _get(metadata, "add_space_prefix", bool, True) if self._is_spm else False
        ends = {ids[text] for text in _END_OF_TURN if text in ids and self._types[ids[text]] == _Type.CONTROL}
        self.stop_ids = frozenset(ends | {named[name] for name in ("eos", "eot", "eom") if name in named})

    def _build_bpe(
        self, metadata: Mapping[str, Any], vocab: dict[str, int], silent: set[str]
    ) -> RustTokenizer:
        # Llama 3 takes a word that is a token as it is, even where the merges would not arrive at it.
        options = {"ignore_merges": self._pre == "llama-bpe"}
        lines = _strings(metadata, "merges")
        try:  # the library checks 10^5 merges faster, and does not say which is wrong
            merges: list[Any] = [tuple(line.split(" ", 1)) for line in lines]
            model = models.BPE(vocab, merges, **options)
        except Exception:  # of no type of its own
            model = models.BPE(vocab, _checked_merges(lines, vocab, silent), **options)
        self._missing = frozenset(b for b, letter in enumerate(_LETTER_OF_BYTE) if letter not in vocab)
        rust = RustTokenizer(model)
        rust.pre_tokenizer = _WORD_RULES[self._pre]()
        if self._pre == "qwen2":
            rust.normalizer = normalizers.NFC()
        return rust

    def _build_spm(self, metadata: Mapping[str, Any], vocab: dict[str, int]) -> RustTokenizer:
        scores = _scores(metadata, self.n_vocab)
        unk = None if self._unk_id is None else self._tokens[self._unk_id]
        if unk is None and any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
            raise ModelError(
                f"{_PREFIX}unknown_token_id is missing, and so are some of the byte tokens <0x00> to <0xFF>: "
                "characters outside the vocabulary could not be encoded"
            )
        self._missing = frozenset()

        normal = {t: i for t, i in vocab.items() if self._types[i] in (_Type.NORMAL, _Type.UNDEFINED)}
        merges = [
            (text[:cut], text[cut:])
            for text in sorted(normal, key=lambda text: (-scores[normal[text]], normal[text]))
            for cut in range(len(text) - 1, 0, -1)
            if text[:cut] in normal and text[cut:] in normal
        ]
        if unk is not None:
            vocab = {**vocab, unk: self._unk_id or 0}
        return RustTokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of `text`.

        Args:
            add_special: add the begin (end) of sequence token if the model wants it; never two at the start.
            parse_special: read the text of a control token, such as `<|im_end|>`, as that token. Leave it
                False for anything a user wrote. User-defined tokens of the vocabulary are found either way.

        Raises:
            InputError: the text holds lone surrogates, or a character the vocabulary cannot express.
        """
        ids: list[int] = []
        for part in self.split(text, parse_special=parse_special):
            ids += [part] if isinstance(part, int) else self._encode_plain(part)
        if add_special:
            if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
            if self.add_eos and self.eos_id is not None:
                ids.append(self.eos_id)
        return ids

    def split(self, text: str, *, parse_special: bool) -> list[str | int]:
        """`text` cut at the tokens that are matched whole: their ids, and the texts between them."""
        pattern = self._all_pattern if parse_special else self._user_pattern
        if pattern is None:
            return [text] if text else []
        parts = pattern.split(text)  # plain, token, plain, ..., plain
        return [self._ids[part] if i % 2 else part for i, part in enumerate(parts) if part]

    def _encode_plain(self, text: str) -> list[int]:
        try:
            data = text.encode()
        except UnicodeEncodeError as e:
            raise InputError(
                f"text holds the lone surrogate U+{ord(text[e.start]):04X}, which is not a character; "
                "decode the source with errors='replace', or remove it"
            ) from e
        if self._missing and not self._missing.isdisjoint(data):
            char = next(c for c in text if not self._missing.isdisjoint(c.encode()))
            raise InputError(f"the vocabulary has no tokens for U+{ord(char):04X}; remove it from the text")
        if self._is_spm:
            text = (_SPACE if self.drops_first_space else "") + text.replace(" ", _SPACE)
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special: leave control tokens out, else write their texts.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        pieces = (
            self.token_bytes(i) if skip_special or not self.is_special(i) else self._tokens[i].encode()
            for i in ids
        )
        text = b"".join(pieces).decode(errors="replace")
        return text.removeprefix(" ") if self.drops_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; may be part of a character. b"" for control tokens.

        Raises:
            InputError: the id is outside the vocabulary.
        """
        id_ = self._check(token_id)
        text, type_ = self._tokens[id_], self._types[id_]
        if type_ in _SILENT:
            return b""
        if type_ == _Type.BYTE:
            return bytes([int(text[3:5], 16)])
        if type_ == _Type.USER_DEFINED:
            return text.encode()
        if self._is_spm:
            return text.replace(_SPACE, " ").encode()
        try:
            return bytes([_BYTE_OF_LETTER[letter] for letter in text])
        except KeyError:  # a token added as plain text
            return text.encode()

    def is_special(self, token_id: int) -> bool:
        """Whether a token stands for something other than text.

        Raises:
            InputError: the id is outside the vocabulary.
        """
        return self._types[self._check(token_id)] in _SILENT

    def _check(self, token_id: int) -> int:
        try:
            id_ = operator.index(token_id)
        except TypeError:
            raise InputError(f"a token id is an int, not {token_id!r}") from None
        if not 0 <= id_ < self.n_vocab:
            raise InputError(f"token id {id_} is outside the vocabulary, ids 0 to {self.n_vocab - 1}")
        return id_


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern whose one group matches the longest of `texts`; None if there are none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _get(metadata: Mapping[str, Any], name: str, type_: type, default: Any = None) -> Any:
    """One scalar key; without a default it must be there. numpy scalars count as their python types."""
    value = metadata.get(_PREFIX + name, default)
    if value is None:
        raise ModelError(f"{_PREFIX}{name} is missing; the file carries no usable tokenizer")
    if getattr(value, "shape", None) == ():  # a numpy scalar
        value = value.item()
    if type(value) is not type_:
        raise ModelError(f"{_PREFIX}{name} is {value!r}, not of type {type_.__name__}")
    return value


def _pre(metadata: Mapping[str, Any]) -> str:
    """The canonical name of a byte-level vocabulary's word rule."""
    pre: str = _get(metadata, "pre", str)
    pre = _ALIASES.get(pre, pre)
    if pre not in _WORD_RULES:
        known = ", ".join(sorted([*_WORD_RULES, *_ALIASES]))
        raise ModelError(f"{_PREFIX}pre is {pre!r}; supported are {known}")
    return pre


def _array(metadata: Mapping[str, Any], name: str, length: int | None = None) -> Sequence[Any]:
    value = metadata.get(_PREFIX + name)
    if value is None:
        raise ModelError(f"{_PREFIX}{name} is missing; the file carries no usable tokenizer")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ModelError(f"{_PREFIX}{name} is of type {type(value).__name__}, not an array")
    if length is not None and len(value) != length:
        raise ModelError(f"{_PREFIX}{name} has {len(value)} elements for {length} tokens")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    texts = _array(metadata, name)
    try:
        "".join(texts).encode()
    except TypeError as e:
        raise ModelError(f"{_PREFIX}{name} holds elements that are not strings") from e
    except UnicodeEncodeError as e:
        raise ModelError(f"{_PREFIX}{name} holds text that is not valid Unicode: {e.reason}") from e
    return texts


def _index(tokens: Sequence[str]) -> dict[str, int]:
    ids = {text: i for i, text in enumerate(tokens)}
    if not ids:
        raise ModelError(f"{_PREFIX}tokens is empty")
    if len(ids) != len(tokens):
        i = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise ModelError(f"{_PREFIX}tokens holds {tokens[i]!r} twice, as ids {i} and {ids[tokens[i]]}")
    return ids


def _checked_merges(
    lines: Sequence[str], vocab: Mapping[str, int], silent: set[str]
) -> list[tuple[str, str]]:
    """Less those that make or take a control token. Raises ModelError for one that names no token."""
    merges = []
    for i, line in enumerate(lines):
        left, _, right = line.partition(" ")
        made = left + right
        if left in vocab and right in vocab and made in vocab:
            merges.append((left, right))
        elif silent.isdisjoint((left, right, made)):
            raise ModelError(f"{_PREFIX}merges[{i}] is {line!r}, but a part or the whole is no token")
    return merges


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    types = list(_array(metadata, "token_type", len(tokens)))
    normal, user_defined, byte = (
        int(_Type.NORMAL),
        int(_Type.USER_DEFINED),
        int(_Type.BYTE),
    )
    for i, (type_, text) in enumerate(zip(types, tokens, strict=True)):
        if type_ is normal:
            continue
        if type(type_) is not int or not 0 <= type_ <= byte:
            raise ModelError(f"{_PREFIX}token_type[{i}] is {type_!r}, not one of the types 0 to 6")
        if type_ == byte and not _BYTE_TOKEN.fullmatch(text):
            raise ModelError(f"{_PREFIX}tokens[{i}] is {text!r}, but its type says a byte, as in <0x0A>")
        if type_ == user_defined and text in _END_OF_TURN:
            types[i] = _Type.CONTROL  # mislabelled by some converters: a user who wrote it would end the turn
    return types


def _scores(metadata: Mapping[str, Any], length: int) -> Sequence[float]:
    scores = _array(metadata, "scores", length)
    for i, score in enumerate(scores):
        if type(score) not in (float, int) or not math.isfinite(score):
            raise ModelError(f"{_PREFIX}scores[{i}] is {score!r}, not a finite number")
    return scores

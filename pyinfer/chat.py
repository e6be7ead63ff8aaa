"""A conversation to token ids, by the chat template that a GGUF file carries.

A template is a program from the model file, so it runs in Jinja's sandbox, on a budget of steps and of text:
for a program that runs away, or makes much of little. It is no defence against one that was written to find
what costs more than its price.

Templates write the special tokens that part the turns as plain text, and users can type the same text. To
keep the two apart, each user-supplied string has the first character of every special token in it replaced
by a stand-in, a character found nowhere else. What special tokens the rendered text then shows are the
template's own; between them the stand-ins are put back, and the text is encoded as plain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import chain
from operator import index
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pyinfer.errors import ChatError
from pyinfer.tokenizer import Tokenizer

Message = Mapping[str, str]

KEY = "tokenizer.chat_template"
# In one rendering, some seconds: turns of loops, calls, and each 16 characters or items made or looked at.
_MAX_STEPS = 1_000_000
_MAX_CHARS = 1 << 24  # of text, in one value or in all

# Of Jinja's filters those that templates of chat models use, less what makes much of little, and its globals.
_FILTERS = frozenset({
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min"),
    *("reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort"),
    *("string", "title", "tojson", "trim", "unique", "upper", "wordcount"),
})  # fmt: skip
_GLOBALS = ("cycler", "dict", "joiner", "namespace", "range")
# What these can add to their text, as filters and as methods of str.
_GROWTH: dict[str, Callable[..., int]] = {
    "expandtabs": lambda text, size=8: text.count("\t") * size,
    "indent": lambda text, width=4, *_, **__: _length(text) * (_length(width) or width),
    "join": lambda a, b="", *_, **__: _length(a) * _length(b),
    "replace": lambda text, old, new, *_: str(text).count(str(old)) * len(str(new)),
    "round": lambda value, digits=0, *_: abs(digits),
}

# Noncharacters, then private use: valid Unicode that ordinary text does not hold.
_STAND_INS = (
    range(0xFDD0, 0xFDF0),
    range(0xE000, 0xF900),
    range(0xF0000, 0xFFFFE),
    range(0x100000, 0x10FFFE),
)


class ChatTemplate:
    """Renders conversations: messages of exactly `role` and `content`, both str, the oldest first."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compiles a template.

        Args:
            source: the Jinja template.
            bos_token, eos_token: texts of the tokens, for the template's variables of these names.

        Raises:
            ChatError: the template is not valid Jinja.
        """
        self._source = source
        self._env = _Environment()
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None}
        try:
            tree = _Meter().visit(self._env.parse(source))
            self._template = self._env.template_class.from_code(
                self._env, self._env.compile(tree), self._env.make_globals(None)
            )
        except Exception as e:  # besides what Jinja raises, nesting too deep for Python
            line = getattr(e, "lineno", None)
            raise ChatError(f"{KEY} is not valid Jinja{f' at line {line}' if line else ''}: {e}") from e

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate:
        """The template of a GGUF file.

        Raises:
            ChatError: the file has none, or it is not valid.
        """
        source = metadata.get(KEY)
        if source is None:
            raise ChatError(
                f"the model has no chat template ({KEY} is missing); prompt it with plain text, "
                "or use a model tuned for chat"
            )
        if not isinstance(source, str):
            raise ChatError(f"{KEY} is of type {type(source).__name__}, not a string")
        return cls(source, bos_token=_token_text(metadata, "bos"), eos_token=_token_text(metadata, "eos"))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the template writes it.

        For reading; use `encode` for the model, as here a user's text may pass for a special token.

        Args:
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            ChatError: a message is malformed, the template refuses the messages, fails, or runs too long.
        """
        return self._render(_checked(messages), add_generation_prompt)

    def encode(
        self, messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The conversation as token ids, with special tokens only where the template itself wrote them.

        Starts with the begin of sequence token if the model wants one, never with two.

        Raises:
            ChatError: as `render` does.
            InputError: a message holds text that cannot be encoded.
        """
        checked = _checked(messages)
        texts = chain((self._source,), *(m.values() for m in checked), tokenizer.special_tokens)
        shield = _Shield(tokenizer.special_tokens, texts)
        shielded = [{field: shield.protect(text) for field, text in m.items()} for m in checked]
        rendered = self._render(shielded, add_generation_prompt)
        ids: list[int] = []
        for part in tokenizer.split(rendered, parse_special=True):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += tokenizer.encode(shield.restore(part), add_special=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        self._env.steps = 0
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                self._variables, messages=messages, add_generation_prompt=add_generation_prompt
            ):
                size += len(piece)
                _limit_size(size)
                pieces.append(piece)
        except Exception as e:  # a template can raise anything that Python can
            reason = str(e) or type(e).__name__
            raise ChatError(f"the chat template cannot render these messages: {reason}") from e
        return "".join(pieces)


def _token_text(metadata: Mapping[str, Any], name: str) -> str:
    """The text of a named token, "" without one; `Tokenizer` is there to complain."""
    try:
        id_ = index(metadata[f"tokenizer.ggml.{name}_token_id"])
        return str(metadata["tokenizer.ggml.tokens"][id_]) if id_ >= 0 else ""
    except (KeyError, TypeError, IndexError):
        return ""


def _checked(messages: Sequence[Message]) -> list[dict[str, str]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ChatError(f"messages must be a sequence of messages, not {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(
                f"messages[{i}] must be a mapping of role and content, not {type(message).__name__}"
            )
        for field in ("role", "content"):
            if field not in message:
                raise ChatError(f"messages[{i}] has no {field!r}")
            if not isinstance(message[field], str):
                raise ChatError(
                    f"messages[{i}][{field!r}] must be a str, not {type(message[field]).__name__}"
                )
        if extra := [field for field in message if field not in ("role", "content")]:
            raise ChatError(
                f"messages[{i}] has the unknown field {extra[0]!r}; use 'role' and 'content' only"
            )
    return [dict(message) for message in messages]


class _Shield:
    """Makes special tokens in a text unrecognisable, and itself undone.

    Replaced is the first character of each special token, overlapping ones too, in any letter case as
    templates may change it; also of an unfinished one at the end, which the text put after it could complete.
    """

    def __init__(self, specials: Iterable[str], texts: Iterable[str]) -> None:
        """A shield for one conversation.

        Args:
            specials: the texts of the special tokens.
            texts: all texts that stand-ins must differ from.
        """
        ordered = list(specials)
        self._starts = {text[:n].lower() for text in ordered for n in range(1, len(text))}
        self._longest = max(map(len, ordered), default=0)
        pattern = "|".join(map(re.escape, ordered)) or r"(?!)"
        self._special = re.compile(rf"(?=(?:{pattern}))(?s:.)", re.IGNORECASE)
        used = set(chain.from_iterable(texts))
        self._free = (chr(c) for c in chain(*_STAND_INS) if chr(c) not in used)
        self._stand_in: dict[str, str] = {}

    def protect(self, text: str) -> str:
        text = self._special.sub(lambda match: self._replacement(match[0]), text)
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-n:].lower() in self._starts:
                text = text[:-n] + self._replacement(text[-n]) + text[len(text) - n + 1 :]
        return text

    def restore(self, text: str) -> str:
        return text.translate({ord(new): old for old, new in self._stand_in.items()})

    def _replacement(self, char: str) -> str:
        if char not in self._stand_in:
            try:
                self._stand_in[char] = next(self._free)
            except StopIteration:
                raise ChatError("the messages hold every private-use character; leave some out") from None
        return self._stand_in[char]


class _Environment(ImmutableSandboxedEnvironment):
    """The names that templates of chat models count on, and limits on what a template may spend."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
            optimized=False,  # the optimizer runs filters, before there is a budget
        )
        self.steps = 0
        self.finalize = _written
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters |= {"tojson": _tojson}
        self.filters = {name: self._metered(name, self.filters[name]) for name in _FILTERS}
        self.filters |= {_Meter.COUNTED: self._counted, _Meter.SPENT: self.spent}

    def step(self, n: int = 1) -> None:
        self.steps += n
        if self.steps > _MAX_STEPS:
            raise TemplateError(f"it takes more than {_MAX_STEPS} steps")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item

    def spent(self, value: Any) -> Any:
        """The value, which is made or looked at as a whole, and costs as much."""
        size = _length(value)
        _limit_size(size)
        self.step(size // 16)
        return value

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            first = int(isinstance(args[0], (Context, EvalContext, Environment)))
            listed = [list(self._counted(a)) if isinstance(a, Iterator) else a for a in args[first:]]
            self._before(name, listed, kwargs)
            return self.spent(function(*args[:first], *listed, **kwargs))

        return run

    def _before(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a filter, or a method of the first argument."""
        self.step()
        for arg in (*args, *kwargs.values()):
            self.spent(arg)
        if name in _GROWTH:
            _limit_size(_GROWTH[name](*args, **kwargs))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):  # as in 'x'.ljust(10 ** 12)
            if isinstance(arg, int):
                _limit_size(arg)
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            self._before(obj.__name__, (text, *args), kwargs)
        else:
            self.step()
        return self.spent(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if isinstance(x, (str, list, tuple)) else 0 for x in (left, right)]
        if operator == "+":
            _limit_size(sum(sizes))
        elif operator == "*" and any(sizes):
            _limit_size(max(sizes) * next((x for x in (left, right) if isinstance(x, int)), 1))
        elif operator == "**" or (operator == "*" and isinstance(left, int) and isinstance(right, int)):
            bits = [x.bit_length() if isinstance(x, int) else 0 for x in (left, right)]
            _limit_size((bits[0] * right if operator == "**" and all(bits) else sum(bits)) << 8)
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            sizes = [*map(int, re.findall(r"\d{1,10}", left)), *map(_length, values)]
            if "*" in left:  # a width is among the values
                sizes += [abs(x) for x in values if isinstance(x, int)]
            _limit_size(left.count("%") * sum(sizes))
        return self.spent(super().call_binop(context, operator, left, right))


class _Meter(NodeTransformer):
    """Writes the limits into a template: loops are counted; texts, slices and comparisons cost."""

    COUNTED, SPENT = "counted turns", "spent size"  # filters, of names that no template can write

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(self.COUNTED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(self.SPENT, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(self.SPENT, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(self.SPENT, node.expr)
        for operand in node.ops:
            operand.expr = _filter(self.SPENT, operand.expr)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # so that it costs, as what is computed does


def _filter(name: str, value: Any) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training: here just what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _limit_size(size: float) -> None:
    if size > _MAX_CHARS:
        raise TemplateError(f"it makes more than {_MAX_CHARS} characters of text")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0


@pass_context
def _written(context: Context, value: Any) -> Any:
    """(With the context: else Jinja calls it for constants, while it compiles.)"""
    return context.environment.spent(value)  # type: ignore[attr-defined]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    """Plain JSON, where Jinja's own filter would escape for HTML."""
    if indent is not None and not 0 <= indent <= 8:
        raise TemplateError(f"tojson(indent={indent}): it is 0 to 8")
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)

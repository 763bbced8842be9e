"""The small language of `--where`: comparisons of columns with constants, and, or, not, in, like, is null.

expression = term {or term};  term = factor {and factor};  factor = [not] (comparison | "(" expression ")")
comparison = column (= | != | <> | < | <= | > | >=) constant
           | column [not] in "(" constant {"," constant} ")" | column [not] like 'a%' | column is [not] null
Text stands in 'single quotes' ('' for a quote), a column name with spaces in "double quotes". As in SQL a comparison
with an empty cell is neither true nor false, and only true rows are taken. Nothing is evaluated as Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from batch_gen.errors import UsageError

Columns: TypeAlias = Mapping[str, pa.Array]
Filter: TypeAlias = Callable[[Columns], pa.Array]
Constant: TypeAlias = str | int | float | bool

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*')|(?P<name>"[^"]+"|[A-Za-z_][A-Za-z0-9_.]*)"""
    r"""|(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<sign><=|>=|<>|!=|==|=|<|>|\(|\)|,))"""
)
_COMPARE: Final[dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]]] = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_WORDS: Final = {"and", "or", "not", "in", "like", "is", "null", "true", "false"}
_MAX_DEPTH: Final = 50  # of nots and parentheses: far below what Python's stack holds
_SHOWN: Final = 200  # characters of an expression in a message
_HINT: Final = "; write for example tag = 'hero' and width >= 832"


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed expression: the columns that it reads, and the filter itself."""

    columns: frozenset[str]
    filter: Filter

    def mask(self, columns: Columns) -> pa.Array:
        """True for the rows that the expression holds for: `[rows]` bool without nulls."""
        return self.filter(columns).fill_null(False)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    place: int

    @property
    def word(self) -> str:
        """The text as a keyword or sign, lower case; empty for quoted text."""
        return "" if self.kind == "text" or self.text.startswith('"') else self.text.lower()


def parse(text: str) -> Where:
    """An expression as a filter over columns.

    Raises:
        UsageError: The text is no expression; the message points at the place.
    """
    parser = _Parser(text)
    found = parser.expression()
    if parser.token.kind != "end":
        parser.fail("expected and, or, or the end")
    return Where(frozenset(parser.columns), found)


def _tokens(text: str) -> list[_Token]:
    tokens, place = [], 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            place += len(text[place:]) - len(text[place:].lstrip())
            raise UsageError(
                f"--where {text!r}: cannot read {text[place : place + 12]!r} at character {place + 1}{_HINT}"
            )
        kind = str(match.lastgroup)
        tokens.append(_Token(kind, match.group(kind), match.start(kind)))
        place = match.end()
    return [*tokens, _Token("end", "the end", len(text))]


class _Parser:
    """Recursive descent over the grammar above; one method per line of it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0
        self.columns: set[str] = set()

    @property
    def token(self) -> _Token:
        return self._tokens[self._next]

    def fail(self, wanted: str) -> NoReturn:
        found = self.token
        text = self._text if len(self._text) <= _SHOWN else f"{self._text[:_SHOWN]}..."
        raise UsageError(f"--where {text!r}: {wanted} at character {found.place + 1}, found {found.text}{_HINT}")

    def _take(self, *words: str) -> str | None:
        word = self.token.word
        if word in words:
            self._next += 1
            return word
        return None

    def _expect(self, word: str) -> None:
        if self._take(word) is None:
            self.fail(f"expected {word}")

    def expression(self) -> Filter:
        terms = [self._term()]
        while self._take("or"):
            terms.append(self._term())
        return _fold(terms, pc.or_kleene)

    def _term(self) -> Filter:
        factors = [self._factor()]
        while self._take("and"):
            factors.append(self._factor())
        return _fold(factors, pc.and_kleene)

    def _factor(self) -> Filter:
        if self._depth > _MAX_DEPTH:
            self.fail(f"expected at most {_MAX_DEPTH} nots and parentheses around a comparison")
        self._depth += 1
        if self._take("not"):
            found = _inverted(self._factor())
        elif self._take("("):
            found = self.expression()
            self._expect(")")
        else:
            found = self._comparison()
        self._depth -= 1
        return found

    def _comparison(self) -> Filter:
        column = self._column()
        if self._take("is"):
            inverted = self._take("not") is not None
            self._expect("null")
            return _inverted(_null(column)) if inverted else _null(column)
        inverted = self._take("not") is not None
        if self._take("in"):
            found = _member(column, self._constants(), self._text)
        elif self._take("like"):
            found = _like(column, self._constant(), self._text)
        else:
            sign = None if inverted else self._take(*_COMPARE)
            if sign is None:
                self.fail("expected a comparison such as = or in")
            return _compared(column, sign, self._constant(), self._text)
        return _inverted(found) if inverted else found

    def _column(self) -> str:
        token = self.token
        if token.kind != "name" or token.word in _WORDS:
            self.fail("expected a column")
        self._next += 1
        name = token.text.strip('"')
        self.columns.add(name)
        return name

    def _constants(self) -> list[Constant]:
        self._expect("(")
        found = [self._constant()]
        while self._take(","):
            found.append(self._constant())
        self._expect(")")
        return found

    def _constant(self) -> Constant:
        token = self.token
        value: Constant
        if token.kind == "text":
            value = token.text[1:-1].replace("''", "'")
        elif token.kind == "number":
            value = float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        elif token.word in {"true", "false"}:
            value = token.word == "true"
        else:
            self.fail("expected 'text' in single quotes or a number")
        self._next += 1
        return value


def _fold(parts: list[Filter], join: Callable[[pa.Array, pa.Array], pa.Array]) -> Filter:
    if len(parts) == 1:
        return parts[0]

    def joined(columns: Columns) -> pa.Array:
        found = parts[0](columns)
        for part in parts[1:]:
            found = join(found, part(columns))
        return found

    return joined


def _inverted(inner: Filter) -> Filter:
    return lambda columns: pc.invert(inner(columns))


def _null(column: str) -> Filter:
    return lambda columns: columns[column].is_null()


def _like(column: str, pattern: Constant, text: str) -> Filter:
    if not isinstance(pattern, str):
        raise UsageError(f"--where {text!r}: like needs 'text' with % and _ as its wildcards")
    return _guarded(column, text, lambda cells: pc.match_like(cells, pattern))


def _member(column: str, values: list[Constant], text: str) -> Filter:
    def found(cells: pa.Array) -> pa.Array:
        verdict = pc.equal(cells, _scalar(values[0]))
        for value in values[1:]:
            verdict = pc.or_kleene(verdict, pc.equal(cells, _scalar(value)))
        return verdict

    return _guarded(column, text, found)


def _compared(column: str, sign: str, value: Constant, text: str) -> Filter:
    return _guarded(column, text, lambda cells: _COMPARE[sign](cells, _scalar(value)))


def _scalar(value: Constant) -> pa.Scalar:
    return pa.scalar(value, pa.large_string() if isinstance(value, str) else None)


def _guarded(column: str, text: str, apply: Callable[[pa.Array], pa.Array]) -> Filter:
    def guarded(columns: Columns) -> pa.Array:
        cells = columns[column]
        if pa.types.is_null(cells.type):
            return pa.nulls(len(cells), pa.bool_())
        try:
            return apply(cells)
        except (pa.ArrowException, OverflowError) as error:
            kind = str(cells.type).removeprefix("large_")
            raise UsageError(
                f"--where {text!r}: column {column!r} holds {kind}; compare it with a constant of that type"
            ) from error

    return guarded

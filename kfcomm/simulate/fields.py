"""Fields of a TOML file, taken one by one, with errors that name file, line and field.

``tomllib`` gives the lines of syntax errors only. Where a value is valid TOML, but not valid for its field, its line is
looked up in the text; unusual spellings of tables and keys are not found, and the line is left out. Knows kinds of
values (rates, times, counts), not fields.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kfcomm.common.arguments import meant
from kfcomm.errors import ConfigError

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6, "ns": 10**9}
_NUMBER = r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*"
_RATE = re.compile(_NUMBER + r"([kmgt]i?)?(bit/s|B/s)\s*", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"([mnuµ]?s)\s*")
_RATE_HELP = "write a number and a unit, as in '200 Mbit/s', '10 Gbit/s' or '5 GB/s'"
_TIME_HELP = "write a number and a unit, as in '100 us', '0.5 ms' or '1 s'"


def parse_rate(text: object) -> float:
    """Bytes per second of a rate as people write it: ``200 Mbit/s``, ``5 GB/s``, ``512 MiB/s``.

    Raises:
        ValueError: it is not a rate, or is 0; the message gives examples.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"expected a rate, got {text!r}; {_RATE_HELP}")
    prefix = (match[2] or "").lower()
    # "b" alone would not tell bits from bytes, hence a whole word for the one and a capital for the other
    if match[3].lower() == "b/s" and match[3] != "B/s":
        raise ValueError(f"expected a rate in B/s (bytes) or bit/s (bits), got {text!r}; {_RATE_HELP}")
    scale = _BINARY[prefix] if prefix in _BINARY else _PREFIXES[prefix]
    rate = float(match[1]) * scale / (1 if match[3] == "B/s" else 8)
    if not 0 < rate < float("inf"):
        raise ValueError(f"expected a rate above 0, got {text!r}; {_RATE_HELP}")
    return rate


def parse_time_s(text: object) -> float:
    """Seconds of a time as people write it: ``100 us``, ``0.5 ms``.

    Raises:
        ValueError: it is not a time; the message gives examples.
    """
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"expected a time, got {text!r}; {_TIME_HELP}")
    return float(match[1]) / _PER_S[match[2]]


@dataclass(slots=True)
class FieldTable:
    """One table of a file; each field is taken once, and what is left at ``end`` was misspelt."""

    document: Document  # the file
    title: str  # how errors call it, for example ``host``
    number: int  # of the tables with this title, 0 for the first
    values: Mapping[str, Any]  # its fields
    _known: list[str] = field(default_factory=list)

    def rate(self, key: str, default: float) -> float:
        """A rate in bytes per second."""
        rate = self._parsed(key, parse_rate)
        return default if rate is None else rate

    def time_s(self, key: str, default: float) -> float:
        """A time in seconds."""
        time_s = self._parsed(key, parse_time_s)
        return default if time_s is None else time_s

    def maybe_rate(self, key: str) -> float | None:
        """A rate in bytes per second; None where it is left out."""
        return self._parsed(key, parse_rate)

    def maybe_time_s(self, key: str) -> float | None:
        """A time in seconds; None where it is left out."""
        return self._parsed(key, parse_time_s)

    def count(self, key: str, default: int | None, least: int = 1) -> int:
        """A whole number of at least ``least``; without a default it must be there."""
        value = self._take(key, default)
        if value is None:
            raise self.wrong(key, "is missing")
        if type(value) is not int or value < least:
            raise self.wrong(key, f"expected a whole number of at least {least}, got {value!r}")
        return value

    def share(self, key: str, default: float) -> float:
        """A number above 0 and up to 1."""
        value = self._take(key, default)
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise self.wrong(key, f"expected a number above 0 and at most 1, got {value!r}")
        return float(value)

    def word(self, key: str, default: str) -> str:
        """A string that is not empty."""
        value = self._take(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, f"expected a name, got {value!r}")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """A list of strings; it must be there."""
        value = self._take(key, None)
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(key, "is missing" if value is None else f"expected a list of names, got {value!r}")
        return tuple(value)

    def end(self) -> None:
        """Check that all fields were taken."""
        for key in self.values:
            if key not in self._known:
                raise self.wrong(key, f"is unknown; {_nearest(key, self._known)}")

    def wrong(self, key: str, what: str) -> ConfigError:
        """The error about a field."""
        return self.document.wrong(f"{self.title}.{key}", what, self.title, self.number, key)

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        return self.values.get(key, default)

    def _parsed(self, key: str, parse: Callable[[object], float]) -> float | None:
        self._known.append(key)
        if key not in self.values:
            return None
        try:
            return parse(self.values[key])
        except ValueError as error:
            raise self.wrong(key, str(error)) from error


class Document:
    """A TOML file of tables; errors name it by ``name``.

    Raises:
        ConfigError: it is not TOML.
    """

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = text.splitlines()
        self._known: list[str] = []
        try:
            self._tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(self._undecodable(str(error))) from error

    def table(self, title: str) -> FieldTable:
        """The table ``[title]``; an empty one if it is missing."""
        self._known.append(title)
        values = self._tables.get(title, {})
        if not isinstance(values, dict):
            raise self.wrong(title, f"must be one table, [{title}]", title)
        return FieldTable(self, title, 0, values)

    def tables(self, title: str) -> Iterator[FieldTable]:
        """All tables ``[[title]]``."""
        self._known.append(title)
        values = self._tables.get(title, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.wrong(title, f"must be tables, each [[{title}]]", title)
        return (FieldTable(self, title, number, value) for number, value in enumerate(values))

    def is_single(self, title: str) -> bool:
        """Whether ``title`` is one table, not a list of them."""
        return isinstance(self._tables.get(title), dict)

    def end(self) -> None:
        """Check that all tables were asked for."""
        for title in self._tables:
            if title not in self._known:
                raise self.wrong(title, f"is unknown; {_nearest(title, self._known)}", title)

    def wrong(self, what: str, why: str, title: str, number: int = 0, key: str | None = None) -> ConfigError:
        """The error about a table, or a field of it."""
        line = self._line_of(title, number, key)
        return ConfigError(f"{self._name}{f':{line}' if line else ''}: {what}: {why}")

    def _line_of(self, title: str, number: int, key: str | None) -> int | None:
        """The line of a field; that of its table if the field is not found, None if neither is."""
        head = re.compile(rf"\s*(?:\[\[?\s*{re.escape(title)}\s*\]\]?\s*(?:#.*)?|{re.escape(title)}\s*=.*)")
        found = [at for at, line in enumerate(self._lines) if head.fullmatch(line)]
        if number >= len(found):
            return None
        entry = re.compile(rf"""\s*["']?{re.escape(key or "")}["']?\s*=""")
        for at in range(found[number] + 1, len(self._lines) if key else 0):
            if self._lines[at].lstrip().startswith("["):
                break
            if entry.match(self._lines[at]):
                return at + 1
        return found[number] + 1

    def _undecodable(self, message: str) -> str:
        """The message of ``tomllib``, with its line in front."""
        match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
        if match is None:
            return f"{self._name}:{max(len(self._lines), 1)}: {message}"
        line = int(match[2])
        shown = self._lines[line - 1].strip() if line <= len(self._lines) else ""
        return f"{self._name}:{line}: {match[1]} (column {match[3]}){f': {shown}' if shown else ''}"


def _nearest(word: str, known: list[str]) -> str:
    """The known words, with the one that was probably meant in front."""
    near = meant(word, known, like=0.5)
    listed = f"known are {', '.join(known)}"
    return f"did you mean {near[0]}? ({listed})" if near else listed

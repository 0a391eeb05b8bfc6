"""Normalisation of names and whole numbers given by callers, and suggestions for unknown words.

A ``StrEnum``, an ``np.str_`` or another subclass of ``str`` equals the text that it holds; an ``IntEnum`` or an
``np.int64`` equals its number. The core compares and sends plain ``str`` and ``int`` only. A bool is refused as a whole
number: as a rank or a tag it is a mistake.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Integral
from typing import Any, overload

from kfcomm.errors import ConfigError

MAX_NAME_NBYTES = 1024


def plain_text(text: str) -> str:
    """The same text as ``str`` itself, of whatever subclass it is."""
    return text if type(text) is str else str.__str__(text)


def whole_number(value: Any) -> int | None:
    """Return the value as a plain ``int``; None if it is not a whole number."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return operator.index(value)


@overload
def checked_name(name: None) -> None: ...
@overload
def checked_name(name: str) -> str: ...
def checked_name(name: Any) -> str | None:
    """The name of a call, a group or anything else that the ranks call alike, as ``str`` itself; None for none.

    Raises:
        ConfigError: it is not a string, is empty or too long, or holds the reserved NUL.
    """
    if name is None:
        return None
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"expected a name (a string, not empty, without NUL), got {name!r}")
    text = plain_text(name)
    is_ascii = text.isascii()
    nbytes = len(text) if is_ascii else len(text.encode(errors="surrogatepass"))
    if nbytes > MAX_NAME_NBYTES:
        raise ConfigError(f"expected a name of at most {MAX_NAME_NBYTES} bytes, {text[:32]!r}... has {nbytes}")
    if not is_ascii and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"expected a name of valid Unicode, got {text[:32]!r}")
    return text


_LIKE = 0.6
"""Of two words, from 0 to 1: 'tpc' and 'tcp' have 0.67."""
_MOST = 3


def meant(given: object, known: Iterable[str], *, like: float = _LIKE) -> list[str]:
    """The known words that are most like what was given, the likeliest first; small letters, ``_`` and ``-`` are alike.

    Costs some milliseconds when it is first called.
    """
    from difflib import get_close_matches  # for a word that is wrong, and no other

    by_plain = {_plain(word): word for word in known}
    word = _plain(str(given)[:100])
    begun = [one for one in by_plain if len(word) > 1 and one.startswith(word)]
    near = get_close_matches(word, by_plain, n=_MOST, cutoff=like)
    return [by_plain[one] for one in dict.fromkeys([*begun, *near])][:_MOST]


def hint(given: object, known: Iterable[str]) -> str:
    """``; did you mean 'ring'?``, to follow an error; empty if no word is similar."""
    found = meant(given, known)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "-")

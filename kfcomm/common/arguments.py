"""Normalisation of names and whole numbers given by callers.

A ``StrEnum``, an ``np.str_`` or another subclass of ``str`` equals the text that it holds; an ``IntEnum`` or an
``np.int64`` equals its number. The core compares and sends plain ``str`` and ``int`` only. A bool is refused as a whole
number: as a rank or a tag it is a mistake.
"""

from __future__ import annotations

import operator
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

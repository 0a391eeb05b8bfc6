"""Names and whole numbers as callers give them, made plain where they enter.

A ``StrEnum``, an ``np.str_`` or another subclass of ``str`` is as good as the text that it holds, and an ``IntEnum`` or
an ``np.int64`` as the number. Behind the entrance a name is ``str`` itself and a whole number ``int`` itself, which is
what the core compares and sends. A bool is no whole number: as a rank or a tag it is a mistake.
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
    """The whole number that is meant, as ``int`` itself; None if it is none."""
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
        raise ConfigError(f"a name is a string that is not empty and has no NUL, not {name!r}")
    text = plain_text(name)
    is_ascii = text.isascii()
    nbytes = len(text) if is_ascii else len(text.encode(errors="surrogatepass"))
    if nbytes > MAX_NAME_NBYTES:
        raise ConfigError(f"a name has at most {MAX_NAME_NBYTES} bytes, {text[:32]!r}... has {nbytes}")
    if not is_ascii and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"a name is valid Unicode, {text[:32]!r} is not")
    return text

"""Sizes of messages as people write and read them: ``64KiB``, ``1KiB:64MiB``, and back."""

from __future__ import annotations

import re

from kfcomm.errors import ConfigError

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "KIB": 1 << 10, "M": 1 << 20, "MIB": 1 << 20, "G": 1 << 30, "GIB": 1 << 30}
_SIZE = re.compile(r"\s*(\d{1,18})\s*([a-z]*)\s*", re.IGNORECASE)
_HELP = "sizes are like 64KiB, 1KiB,1MiB or 1KiB:64MiB, which doubles"
_MAX_NBYTES = 1 << 40


def parse_size(word: str) -> int:
    """Bytes of one size: a whole number with B, KiB, MiB, GiB, or their first letters, or nothing.

    Raises:
        ConfigError: it is no size, or larger than a TiB.
    """
    match = _SIZE.fullmatch(word)
    scale = _UNITS.get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise ConfigError(f"{word.strip()!r} is no size; {_HELP}")
    nbytes = int(match[1]) * scale
    if nbytes > _MAX_NBYTES:
        raise ConfigError(f"{word.strip()!r} is more than {show_size(_MAX_NBYTES)}")
    return nbytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of each message of ``text``: a list with commas, whose members are sizes or ranges that double.

    Raises:
        ConfigError: a member is no size, or is 0, or its range is empty.
    """
    found: list[int] = []
    for member in text.split(","):
        first, colon, last = member.partition(":")
        low = _parse(first, text)
        high = _parse(last, text) if colon else low
        if high < low:
            raise ConfigError(f"sizes {text!r}: {member.strip()!r} ends below where it begins")
        while low <= high:
            found.append(low)
            low *= 2
    return tuple(dict.fromkeys(found))


def show_size(nbytes: int) -> str:
    """``nbytes`` with the largest unit that leaves a whole number, else with three digits."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            number = nbytes / scale
            return f"{number:.0f} {unit}" if nbytes % scale == 0 else f"{number:.{1 if number >= 10 else 2}f} {unit}"
    return f"{nbytes} B"


def _parse(word: str, text: str) -> int:
    try:
        nbytes = parse_size(word)
    except ConfigError as error:
        raise ConfigError(f"sizes {text!r}: {error}") from None
    if not nbytes:
        raise ConfigError(f"sizes {text!r}: {word.strip()!r} must be at least 1 B")
    return nbytes

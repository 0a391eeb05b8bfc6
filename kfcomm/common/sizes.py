"""Sizes of messages as people write and read them: ``64KiB``, ``1KiB:64MiB``, and back; times, ranks, short texts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from kfcomm.types import Seconds

T = TypeVar("T")

_UNITS = {
    "": 1, "B": 1, "K": 1 << 10, "KIB": 1 << 10, "M": 1 << 20, "MIB": 1 << 20, "G": 1 << 30, "GIB": 1 << 30,
    "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,18})\s*([a-z]*)\s*", re.IGNORECASE)
_HELP = "sizes are like 64KiB, 1KiB,1MiB or 1KiB:64MiB, which doubles"
_MAX_NBYTES = 1 << 40


def ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """``0, 1, 2, 5`` as ``0-2, 5``: numbers in their order; after ``most`` runs how many more there are."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most])
    left_out = 0 if most is None else sum(map(len, runs[most:]))
    return f"{listed} and {left_out} more" if left_out else listed


def ranks_in_words(ranks: Iterable[int], most: int = 16) -> str:
    """``rank 3``, ``ranks 0-2, 5``; after ``most`` runs how many more there are."""
    found = sorted(ranks)
    return f"rank{'' if len(found) == 1 else 's'} {ranges(found, most) or 'none'}"


def share_of(batch: Sequence[T], rank: int, size: int) -> Sequence[T]:
    """Return the part of a global batch for one of ``size`` ranks; the first ones may be longer by one."""
    each, more = divmod(len(batch), size)
    start = rank * each + min(rank, more)
    return batch[start : start + each + (rank < more)]


def shortened(text: str, most: int) -> str:
    """A text on one line, of at most so many letters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def parse_size(word: str) -> int:
    """Bytes of one size: a whole number with B, KiB, MiB, GiB or their first letters, KB, MB, GB, or nothing.

    As everywhere in GNU: 1MiB and 1M are 1048576 bytes, 1MB is 1000000.

    Raises:
        ConfigError: it is not a size, or larger than a TiB.
    """
    match = _SIZE.fullmatch(word)
    scale = _UNITS.get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise ConfigError(f"expected a size, got {word.strip()!r}; {_HELP}")
    nbytes = int(match[1]) * scale
    if nbytes > _MAX_NBYTES:
        raise ConfigError(f"{word.strip()!r} is more than {show_size(_MAX_NBYTES)}")
    return nbytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of each message of ``text``: a list with commas, whose members are sizes or ranges that double.

    Raises:
        ConfigError: a member is not a size, or is 0, or its range is empty.
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


TIME_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
RATE_UNITS: Final = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def three_digits(value: float) -> str:
    """Three digits, of numbers above 1000 more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def show_seconds(seconds: float) -> str:
    """Three digits and a unit."""
    return _with_unit(seconds, TIME_UNITS)


def show_rate(bytes_per_s: float) -> str:
    """Three digits and a unit; 1 GB is 10⁹ bytes."""
    return _with_unit(bytes_per_s, RATE_UNITS)


def unit_of(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Scale and name of the largest unit that is at most ``value``."""
    return next((unit for unit in units if value >= unit[0]), units[-1])


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    scale, unit = unit_of(value, units)
    return f"{three_digits(value / scale)} {unit}"


_DURATION = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,7})h)?(?:(\d{1,8})m)?(?:(\d{1,9}(?:\.\d{1,6})?)s?)?")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``90``, ``30s``, ``2h``, ``1h30m`` or ``2d12h``.

    Raises:
        ConfigError: it is not one, or not above 0.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    parts = [float(part or 0) for part in match.groups()] if match else []
    seconds = sum(part * scale for part, scale in zip(parts, (86_400, 3600, 60, 1), strict=False))
    if not seconds:
        raise ConfigError(f"expected a duration above 0 such as 90, 30s, 2h or 1h30m, got {text[:40]!r}")
    return seconds


@overload
def seconds_of(timeout: None) -> None: ...
@overload
def seconds_of(timeout: Seconds) -> float: ...
def seconds_of(timeout: Any) -> float | None:
    """A timeout in seconds, as callers give it: a number or a ``timedelta``; None for the default.

    Raises:
        ConfigError: it is neither, or negative.
    """
    if timeout is None:
        return None
    given = getattr(timeout, "total_seconds", None)
    try:
        seconds = float(timeout if given is None else given())
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(timeout, (str, bytes, bytearray, bool)) or not seconds >= 0:
        raise ConfigError(
            f"a timeout is a number of seconds from 0 on, a timedelta, or None for the default, not {timeout!r:.60}"
        )
    return seconds


def _parse(word: str, text: str) -> int:
    try:
        nbytes = parse_size(word)
    except ConfigError as error:
        raise ConfigError(f"sizes {text!r}: {error}") from None
    if not nbytes:
        raise ConfigError(f"sizes {text!r}: {word.strip()!r} must be at least 1 B")
    return nbytes

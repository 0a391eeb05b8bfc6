"""Hosts in a file of mpirun's form: ``kfcomm run --hostfile``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kfcomm.errors import ConfigError

_NAMES = ("slots", "max-slots", "max_slots")
_MAX_SHOWN = 80


def read_hostfile(path: Path, num_ranks: int | None) -> str:
    """Return the hosts of a file as ``-H`` takes them.

    A host a line, ``HOST``, ``HOST:4`` or ``HOST slots=4``, and comments after ``#``. A host without a number has one
    slot; the slots of one that stands there several times are added.

    Args:
        path: of the file.
        num_ranks: take the first ones only, host by host; None for all.

    Raises:
        ConfigError: it cannot be read, a line is malformed, or it has fewer slots.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {str(path)!r} cannot be read: {error}") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            host, count = _entry(words, f"--hostfile {str(path)!r}, line {number}")
            slots[host] = slots.get(host, 0) + count
    total = sum(slots.values())
    if not total:
        raise ConfigError(f"--hostfile {str(path)!r} names no host: expected lines such as 10.0.0.1 slots=4")
    if num_ranks is not None and num_ranks > total:
        raise ConfigError(f"-n {num_ranks}: --hostfile {str(path)!r} has {total} slots")
    left, found = total if num_ranks is None else num_ranks, []
    for host, count in slots.items():
        taken, left = min(count, left), left - min(count, left)
        found += [f"{host}:{taken}"] if taken else []
    return ",".join(found)


def _entry(words: Sequence[str], where: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s,]+))(?::([0-9]{1,6}))?", words[0])
    bare = re.fullmatch(r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*", words[0])  # IPv6, as mpirun writes it
    if match is None and bare is None:
        raise ConfigError(f"{where}: {words[0][:_MAX_SHOWN]!r} must look like 10.0.0.1, 10.0.0.1:4 or fd00::1")
    count = 1
    if match is not None and match[3] is not None:
        count = int(match[3])
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if name not in _NAMES or not equals or not re.fullmatch(r"[0-9]{1,6}", value):
            raise ConfigError(f"{where}: {word[:_MAX_SHOWN]!r} must look like slots=4 or max-slots=8")
        if name == "slots":
            count = int(value)
    address = words[0] if match is None else match[1] or match[2]
    return (f"[{address}]" if ":" in address else address), count

"""Resources of a process, as its system counts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """Resources of a process; None where that is not known."""

    pid: int
    resident_nbytes: int | None
    num_descriptors: int | None


def usage_of(pid: int) -> Usage:
    """Resources of a process of this host."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Usage(pid, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))
    except (OSError, ValueError, IndexError):  # it has just ended
        return Usage(pid, None, None)

"""How many files a process may have open: the soft limit is raised as far as is needed, and the hard one allows.

The soft limit is often 1024, or less, and there for programs that use select(2); the hard one is what the system
allows. See getrlimit(2).
"""

from __future__ import annotations

import os
import resource

RESERVE = 64
"""For what a program opens besides."""


def raise_limit(count: int) -> int:
    """Have this process, and what it starts from now on, be allowed so many; returns how many it is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count if soft == resource.RLIM_INFINITY else soft
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def raise_limit_by(count: int) -> int:
    """As `raise_limit`, for so many more than are open now."""
    return raise_limit(len(os.listdir("/proc/self/fd")) + count)

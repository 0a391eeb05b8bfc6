"""Measuring collectives on a user's own machines: `kfcomm bench`, and the harness of the measurements in ``bench/``.

A `Suite` says what is asked for and unfolds into `Case`s; every rank runs the same cases (`measure`), each on arrays
whose results it knows (`load`, `pattern`); rank 0 reports them as `events`, from which `watch` and `report` make the
progress display, the table, the JSON and the page. `harness` has what other measurements share: jobs of ranks, turns,
times of the slowest rank.

The command line brings the launcher and this package together: nothing here starts ranks but `harness`, by the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used

if TYPE_CHECKING:
    from kfcomm.bench.suite import CallMode, Case, Suite
else:  # imported when used: workers of other libraries read `workloads` where little else is installed
    __getattr__ = imported_when_used(__name__, dict.fromkeys(("Case", "CallMode", "Suite"), "kfcomm.bench.suite"))

__all__ = ["CallMode", "Case", "Suite"]

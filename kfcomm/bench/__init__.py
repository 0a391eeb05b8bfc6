"""Measuring collectives on a user's own machines: `kfcomm bench`.

From the outside in: a `Suite` says what is asked for and unfolds into `Case`s; every rank runs the same cases
(`measure`), each on arrays whose result it knows (`load`, `pattern`); rank 0 tells of them in `events`, from which
whoever started the benchmark makes the progress display, the table, the JSON and the page (`report`).

How ranks are started is not known here: the command line brings the launcher and this room together.
"""

from kfcomm.bench.suite import Case, Mode, Suite

__all__ = ["Case", "Mode", "Suite"]

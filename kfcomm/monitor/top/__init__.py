"""A running job at a glance, for a terminal: ``Watcher`` reads it again and again, ``view`` makes lines of it.

Nothing here knows terminals, but for ``screen``.
"""

from kfcomm.monitor.top.change import Change, Watcher
from kfcomm.monitor.top.view import Line, Style, view

__all__ = ["Change", "Line", "Style", "Watcher", "view"]

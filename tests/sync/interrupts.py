"""Ctrl-C at a chosen moment: what a signal handler that raises may do to the main thread.

CPython looks for signals only when a function begins, after a call that returned and when a loop turns. So no signal
arrives between entering a block and the moment from which its ``__exit__`` runs, or at the first line of a ``finally``
or an ``except``.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


class AtMoment:
    """Raises ``KeyboardInterrupt`` when this thread has come to so many moments inside some modules.

    Attributes:
        came: where it was raised; empty if there were fewer moments.
    """

    def __init__(self, count: int, *modules: ModuleType) -> None:
        self._left = count
        self._files = {module.__file__ for module in modules}
        self._last: dict[FrameType, str] = {}
        self.came = ""

    def run(self, function: Callable[[], Any]) -> Any:
        """Call it; the error is raised inside, and whatever comes of that is the caller's."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function()
        finally:
            sys.settrace(before)
            self._last.clear()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "exception":
            self._last[frame] = ""  # no signal is looked for after a call that raised
        if event == "opcode" and not self.came:
            before = self._last.get(frame, "")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith("CALL") or before in ("RESUME", "JUMP_BACKWARD"):
                self._left -= 1
                if self._left < 0:
                    self.came = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        return self._trace

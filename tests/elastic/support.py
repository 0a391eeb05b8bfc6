"""Ranks of elastic jobs that die in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kfcomm.elastic.call_log import CallLog, Entry
from kfcomm.elastic.runner import CallRunner


class Died(Exception):
    """This rank was killed: it does nothing more."""


def die(comms: Any, comm: Any) -> None:
    """Kill this rank."""
    comms.kill(comm.births[comm.rank])
    raise Died


def leave_unheard(monkeypatch: pytest.MonkeyPatch, is_unheard: Callable[[CallLog, Entry, Any], bool]) -> None:
    """Ranks do not hear of the ends of such calls: ``is_unheard`` gets a rank's log, its call and the handle."""
    real = CallRunner._ended

    def ended(self: CallRunner, entry: Entry, handle: Any) -> None:
        if is_unheard(self.log, entry, handle):
            entry.inner = None
            self.look_if_quiet()
        else:
            real(self, entry, handle)

    monkeypatch.setattr(CallRunner, "_ended", ended)

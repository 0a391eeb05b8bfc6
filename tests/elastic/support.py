"""Ranks of elastic jobs that die in tests."""

from __future__ import annotations

from typing import Any


class Died(Exception):
    """This rank was killed: it does nothing more."""


def die(comms: Any, comm: Any) -> None:
    """Kill this rank."""
    comms.kill(comm.births[comm.rank])
    raise Died

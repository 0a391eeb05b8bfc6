"""A verb's own checks without the call: what is wrong with its arguments, before anything is begun.

The verb runs as always, on a copy of its communicator whose group defers every post for good. So nothing is checked
here that would have to be kept the same as there. What depends on other ranks (the second step of verbs that have two)
is not reached.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kfcomm.arrays import HostArray
from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox, Message
from kfcomm.collectives.messages import Messages
from kfcomm.collectives.on_device.through_host import Out
from kfcomm.collectives.turns import Turns
from kfcomm.runtime.engine import Engine


class RehearsalGroup(Group):
    """A group in which nothing is posted, no number is taken and nobody is told of a refusal."""

    def __init__(self, group: Group) -> None:
        self.__dict__.update(group.__dict__)
        self.turns = Turns()
        self.compiled = {}
        self._waiting = []

    def in_order(self, begin: Callable[[], None]) -> None:
        """Never."""

    def refuse(self, key: str, error: BaseException, *, steps: int = 1) -> None:
        """The error is the caller's alone."""


class RehearsalMailbox(Mailbox):
    """A mailbox that sends nothing and expects nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def send(self, array: HostArray, to: int, tag: str, timeout_s: float | None, priority: int = 0) -> Handle[None]:
        """Never done."""
        return Handle(loop=self._engine.loop)

    def refuse(self, source: int, to: int, tag: str, reason: str) -> None:
        """The error is the caller's alone."""

    def recv(
        self, source: int | None, tag: str, out: Out | None, timeout_s: float | None, priority: int = 0
    ) -> Handle[Message]:
        """Never done."""
        return Handle(loop=self._engine.loop)


def rehearse(comm: Messages, verb: Callable[..., Handle[Any]], *args: Any, **kwargs: Any) -> None:
    """Check the arguments of a call that may follow.

    Raises:
        ConfigError: the call could not work.
        SessionClosed: the communicator is closed.
    """
    group = RehearsalGroup(comm._group)
    devices = copy.copy(comm._devices)
    devices._group = group
    stand_in = copy.copy(comm)
    stand_in._group, stand_in._devices, stand_in._mailbox = group, devices, RehearsalMailbox(group.engine)
    verb(stand_in, *args, **kwargs).cancel()  # what was taken for it, pinned memory perhaps, is given back

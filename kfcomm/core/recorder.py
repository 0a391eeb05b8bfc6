"""Driver of machines that writes down *effects*, tuples that begin with their tag: for tests and the simulator."""

from __future__ import annotations

from typing import Any

from kfcomm.core.machine import (
    BEGIN,
    COPY,
    DONE,
    FINISH,
    HOLD,
    RELEASE,
    SEND,
    STORE,
    CollectiveDriver,
    Effects,
    Machine,
)
from kfcomm.core.program import Lane
from kfcomm.types import override


class EffectRecorder(CollectiveDriver):
    """CollectiveDriver that appends effects to a list, for its caller to carry out in order."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.machine: Machine  # set by ``begin``

    @override
    def begin(self, machine: Machine) -> None:
        self.machine = machine
        machine.start()

    @override
    def send(self, to: tuple[int, ...], lane: Lane, index: int, phase: int, source: int, payload: Any) -> None:
        self.machine.sends += len(to)
        self.effects.append((SEND, self.machine, to, lane, index, phase, source, payload))

    @override
    def fold(self, tag: int, lane: Lane, index: int, payload: Any, first: bool) -> None:
        self.effects.append((tag, self.machine, lane, index, payload, first))

    @override
    def hold(self, payload: Any) -> Any:
        self.effects.append((HOLD, self.machine, payload))
        return payload

    @override
    def finish(self, lane: Lane, index: int) -> None:
        self.effects.append((FINISH, self.machine, lane, index))

    @override
    def store(self, lane: Lane, index: int, payload: Any) -> None:
        self.effects.append((STORE, self.machine, lane, index, payload))

    @override
    def copy(self, lane: Lane, index: int) -> None:
        self.effects.append((COPY, self.machine, lane, index))

    @override
    def begin_partial(self, lane: Lane, index: int) -> None:
        self.effects.append((BEGIN, self.machine, lane, index))

    @override
    def release(self, payload: Any) -> None:
        self.effects.append((RELEASE, self.machine, payload))

    @override
    def completed(self) -> None:
        self.effects.append((DONE, self.machine))

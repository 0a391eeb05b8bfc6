"""Deferred work of the library, finished before its communicator is closed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

Finish = Callable[[], object]


def before_close(comm: Any, finish: Finish) -> None:
    """Call something once before a communicator or its world is closed, unless an error has ended the program.

    For collectives that the library makes later than the program asks for them, and to whose end all ranks come.

    Args:
        comm: of ``kfcomm.sync``.
        finish: a method is called if its object lives; a function given twice is called once.
    """
    comm._driver.put_off.add(comm._inner, finish)


class PutOff:
    """Callbacks that finish collectives for which the program does not wait itself."""

    def __init__(self) -> None:
        self._due: list[tuple[object, Callable[[], Finish | None]]] = []
        self._functions: dict[tuple[int, Finish], None] = {}

    def add(self, owner: object, finish: Finish) -> None:
        """Finish something of a communicator; see `before_close`."""
        self._due = [one for one in self._due if one[1]() is not None]
        if inspect.ismethod(finish):
            self._due.append((owner, WeakMethod(finish)))
        elif (id(owner), finish) not in self._functions:
            self._functions[id(owner), finish] = None
            self._due.append((owner, lambda: finish))

    def forget(self) -> None:
        """Finish nothing any more: an error has ended the program."""
        self._due.clear()

    def finish(self, owner: object | None) -> None:
        """Finish what belongs to a communicator; None for all of its world.

        Raises:
            Exception: the first that one has raised, once all were called.
        """
        due = [one for one in self._due if owner is None or one[0] is owner]
        self._due = [one for one in self._due if one not in due]
        failed: list[Exception] = []
        for _, living in due:
            _finish(living(), failed)
        if failed:
            raise failed[0]


def _finish(finish: Any, failed: list[Exception]) -> None:
    try:
        if finish is not None:
            finish()
    except Exception as error:  # noqa: BLE001  the others are to be finished, too
        failed.append(error)

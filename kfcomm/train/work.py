"""Work of a step that waits for exchanges, over either interface: a generator that yields what it waits for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from kfcomm.train.agreement import Agreement, Tree

Work = Generator[Any, Any, Any]
"""Yields what is waited for: a `Pending`, a coroutine, or a result; and is sent the result."""


def waited(work: Work) -> Any:
    """Do the work on this thread, and return its result."""
    advance: Callable[[], Any] = partial(next, work)
    while True:
        try:
            wanted = advance()
        except StopIteration as end:
            return end.value
        try:
            found = wanted.wait() if hasattr(wanted, "wait") else wanted
        except BaseException as error:  # noqa: BLE001  the work gets it, and raises it or another
            advance = partial(work.throw, error)
        else:
            advance = partial(work.send, found)


async def awaited(work: Work) -> Any:
    """Do the work on this loop, and return its result."""
    advance: Callable[[], Any] = partial(next, work)
    while True:
        try:
            wanted = advance()
        except StopIteration as end:
            return end.value
        try:
            found = await wanted if inspect.isawaitable(wanted) else wanted
        except BaseException as error:  # noqa: BLE001  the work gets it, and raises it or another
            advance = partial(work.throw, error)
        else:
            advance = partial(work.send, found)


class ModelExchange:
    """The exchange of models of a step, begun before that of its gradients, once the step is judged."""

    def __init__(self, way: Agreement, model: Tree) -> None:
        self._way = way
        self.model = model  # with which the step continues, once it is over

    def gradients(self, tree: Tree) -> Any:
        """Begin both exchanges."""
        return _Both(self, self._way.parameters(self.model), self._way.gradients(tree))


class _Both:
    """Both exchanges of a step; what has failed first is raised, and the other one cancelled."""

    def __init__(self, models: ModelExchange, model: Any, gradients: Any) -> None:
        self._models, self._model, self._gradients = models, model, gradients

    def wait(self) -> Tree:
        """Wait for the gradients, with the model in its place."""
        try:
            self._models.model = self._model.wait()
        except BaseException:
            self._gradients.cancel()
            raise
        return self._gradients.wait()

    def __await__(self) -> Generator[Any, None, Tree]:
        try:
            self._models.model = yield from self._model.__await__()
        except BaseException:
            self._gradients.cancel()
            raise
        return (yield from self._gradients.__await__())

"""Requests of policies to all ranks, and the signs by which the ranks compare them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kfcomm.common.arguments import plain_text

if TYPE_CHECKING:
    from kfcomm.adapt.runner import Runner

T = TypeVar("T")

NOTHING, FAILED = 0, 1
"""Signs of a policy without requests, and of one that has raised."""
STRATEGY, SIZE, STOP = "strategy", "size", "stop"
"""Subjects beside the names of hyperparameters."""


class Request(Generic[T]):
    """Request of a policy to all ranks. It is carried out whether it is awaited or not."""

    runner: Runner  # of the policy

    def __init__(self, words: str, call: Callable[[], Awaitable[T]], subject: str = "") -> None:
        self.words = words  # which the ranks compare
        self.subject = subject  # can have one value only: of the requests of several policies the first one wins
        self.is_awaited = False
        self._call = call
        self._outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._outcome.done():
            self.is_awaited = True
            self.runner.at_rest.set()
        return self._outcome.__await__()

    async def carry_out(self) -> None:
        """Carry it out; an error is raised where the request is awaited, and here if it is not."""
        try:
            result = await self._call()
        except Exception as error:
            if not self.is_awaited:
                raise
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    def overrule(self: Request[bool]) -> None:
        """Drop it: awaiting it gives False."""
        self._outcome.set_result(False)


def words_of(what: str, digest: bytes = b"") -> str:
    """Words of a request, with a digest of its other parts."""
    text = plain_text(what)
    return f"{text} [{digest.hex()[:8]}]" if digest else text


def sign_of(requests: Sequence[Request[Any]]) -> int:
    """Sign of requests: 0 without any, else a digest of all words of 48 bits, and never 1."""
    if not requests:
        return NOTHING
    # Equal signs stand for equal requests on all ranks; 48 bits are exact in the float64 of a table.
    text = "\0".join(request.words for request in requests).encode()
    return 2 + int.from_bytes(blake2b(text, digest_size=6).digest(), "little")


def overruled(asked: Sequence[Sequence[Request[Any]]]) -> list[tuple[Request[Any], Request[Any]]]:
    """Return the overruled requests, of those of each policy in order, each with the request that overrules it."""
    winners: dict[str, Request[Any]] = {}
    lost = []
    for requests in asked:
        own = {}
        for request in requests:
            winner = winners.get(request.subject)
            if winner is None:
                own[request.subject] = request  # of its own requests the last one holds in the end
            elif winner.words != request.words:
                lost.append((request, winner))
        own.pop("", None)
        winners.update(own)
    return lost

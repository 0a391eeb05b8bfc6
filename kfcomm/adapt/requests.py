"""What a policy asks for: something that all ranks do together, once all have asked for it."""

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
"""The signs of a policy that asks for nothing, and of one that has raised."""


class Request(Generic[T]):
    """Something asked for. It may be awaited, or left: it is carried out either way.

    Attributes:
        words: what is asked for; ranks compare them.
        subject: what it is about, where only one value can hold: of several policies the first has its way.
        runner: of the policy that asks.
    """

    runner: Runner

    def __init__(self, words: str, call: Callable[[], Awaitable[T]], subject: str = "") -> None:
        self.words = words
        self.subject = subject
        self.is_awaited = False
        self._call = call
        self._outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._outcome.done():
            self.is_awaited = True
            self.runner.at_rest.set()
        return self._outcome.__await__()

    async def carry_out(self) -> None:
        """Do it. What it raises goes to whoever awaits it.

        Raises:
            Exception: what it raised, if nobody awaits it.
        """
        try:
            result = await self._call()
        except Exception as error:
            if not self.is_awaited:
                raise
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    def overrule(self: Request[bool]) -> None:
        """It is not done: who awaits it gets False."""
        self._outcome.set_result(False)


def words_of(what: str, digest: bytes = b"") -> str:
    """What is asked for, and the digest of what words cannot tell."""
    text = plain_text(what)
    return f"{text} [{digest.hex()[:8]}]" if digest else text


def sign_of(requests: Sequence[Request[Any]]) -> int:
    """A number that stands for what is asked for: 0 for nothing, else 48 bits of a digest of all words, and never 1."""
    if not requests:
        return NOTHING
    text = "\0".join(request.words for request in requests).encode()
    return 2 + int.from_bytes(blake2b(text, digest_size=6).digest(), "little")


def overruled(asked: Sequence[Sequence[Request[Any]]]) -> list[tuple[Request[Any], Request[Any]]]:
    """Requests that are not done, each with the one that is done instead.

    Args:
        asked: what each policy asks for, in the order of the policies. Of those that ask for the same subject the first
            has its way; what another asks for is overruled, unless it is the same.
    """
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

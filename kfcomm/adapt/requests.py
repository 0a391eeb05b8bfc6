"""What a policy asks for: something that all ranks do together, once all have asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from kfcomm.adapt.runner import Runner
    from kfcomm.communicator import Communicator

T = TypeVar("T")

NOTHING, FAILED = 0, 1
"""The signs of a policy that asks for nothing, and of one that has raised."""


class Request(Generic[T]):
    """Something asked for. It may be awaited, or left: it is carried out either way.

    Attributes:
        words: what is asked for; ranks compare them.
        runner: of the policy that asks.
    """

    runner: Runner

    def __init__(self, words: str, call: Callable[[Communicator], Awaitable[T]]) -> None:
        self.words = words
        self.is_awaited = False
        self._call = call
        self._outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._outcome.done():
            self.is_awaited = True
            self.runner.at_rest.set()
        return self._outcome.__await__()

    async def carry_out(self, comm: Communicator) -> None:
        """Do it. What it raises goes to whoever awaits it.

        Raises:
            Exception: what it raised, if nobody awaits it.
        """
        try:
            result = await self._call(comm)
        except Exception as error:
            if not self.is_awaited:
                raise
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)


def words_of(what: str, digest: bytes = b"") -> str:
    """What is asked for, and the digest of what words cannot tell."""
    return f"{what} [{digest.hex()[:8]}]" if digest else what


def sign_of(requests: Sequence[Request[Any]]) -> int:
    """A number that stands for what is asked for: 0 for nothing, else 48 bits of a digest of all words, and never 1."""
    if not requests:
        return NOTHING
    text = "\0".join(request.words for request in requests).encode()
    return 2 + int.from_bytes(blake2b(text, digest_size=6).digest(), "little")

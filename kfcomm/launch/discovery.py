"""Which hosts a job may use: a program says so, that is run again and again, as Horovod has it.

It prints a host a line, ``HOST`` or ``HOST:SLOTS``: an IP address, or a name, and how many processes may run there (1
if it does not say, 0 for none at the moment). What it says is taken as a whole or not at all: where it fails, takes too
long, or says what cannot be understood, its last answer holds.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from kfcomm.common.sockets import readable
from kfcomm.errors import ConfigError
from kfcomm.launch.hosts import parse_host
from kfcomm.launch.process import Child, CommandError, find_program
from kfcomm.rendezvous.backends import secret_variables

EVERY_S = 1.0
"""From the end of one run to the next."""
WITHIN_S = 10.0
MAX_ANSWER_NBYTES = 1 << 20
_MAX_SHOWN = 160

Slots = Mapping[str, int]


class Failed(Exception):
    """There is no answer this time."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """A program that says which hosts there are.

    Attributes:
        command: of it, with its arguments, as one text.
        program: the file to run.
        environ: what it finds in its environment.
    """

    command: str
    program: str
    environ: Mapping[str, str]

    @classmethod
    def of(cls, command: str, environ: Mapping[str, str]) -> Discovery:
        """The program of a command; it does not learn the secrets of the job.

        Raises:
            ConfigError: there is none.
        """
        try:
            words = shlex.split(command)
            program = find_program(words, environ.get("PATH"))
        except (ValueError, IndexError) as error:
            raise ConfigError(f"--discover {command!r} is no command") from error
        except CommandError as error:
            raise ConfigError(f"--discover {error}") from error
        secrets = {"KFCOMM_TOKEN", "KFCOMM_TOKEN_FILE", *secret_variables()}
        return cls(command, program, {name: value for name, value in environ.items() if name not in secrets})

    async def first(self) -> Slots:
        """Its answer before the job begins.

        Raises:
            ConfigError: it gives none that can be understood.
        """
        try:
            return await self._answer()
        except Failed as error:
            raise ConfigError(f"--discover {self.command!r}: {error}") from error

    async def answers(self, known: Slots, say: Callable[[str], None]) -> AsyncIterator[Slots]:
        """Its answer, or the last one where it has none, every second or so; never ends.

        Args:
            known: the last one.
            say: told of what is wrong, once, and that it is right again.
        """
        wrong = ""
        while True:
            yield known
            await asyncio.sleep(EVERY_S)
            try:
                known = await self._answer()
            except Failed as error:
                if str(error) != wrong:
                    say(f"--discover {self.command!r}: {error}; what it said last holds")
                wrong = str(error)
            else:
                if wrong:
                    say(f"--discover {self.command!r} answers again")
                wrong = ""

    async def _answer(self) -> Slots:
        try:
            child = Child.start(self.program, shlex.split(self.command), self.environ)
        except CommandError as error:
            raise Failed(f"it could not be started: {error}") from error
        try:
            async with asyncio.timeout(WITHIN_S):
                out, err, code = await asyncio.gather(_all_of(child.out), _all_of(child.err), child.ended())
        except TimeoutError:
            raise Failed(f"no answer within {WITHIN_S:g} s") from None
        finally:
            child.send(signal.SIGKILL)
            child.close()
        if code:
            last = err.decode(errors="replace").strip().rpartition("\n")[2][:_MAX_SHOWN]
            raise Failed(f"it failed (exit code {code})" + (f": {last}" if last else ""))
        if len(out) > MAX_ANSWER_NBYTES:
            raise Failed(f"it says more than {MAX_ANSWER_NBYTES} bytes")
        try:
            async with asyncio.timeout(WITHIN_S):
                return await asyncio.to_thread(read, out.decode(errors="replace"))
        except ConfigError as error:
            raise Failed(str(error)) from error
        except TimeoutError:
            raise Failed(f"the names of its hosts were not resolved within {WITHIN_S:g} s") from None


async def _all_of(descriptor: int) -> bytes:
    """What a program writes; of too much, the beginning."""
    os.set_blocking(descriptor, False)
    found = b""
    while True:
        await readable(descriptor)
        if not (chunk := os.read(descriptor, MAX_ANSWER_NBYTES)):
            return found
        found = (found + chunk)[: MAX_ANSWER_NBYTES + 1]


def read(text: str) -> Slots:
    """The slots by address, of what the program has printed.

    Raises:
        ConfigError: a line is no host, or one that stands there before; or there is none.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (entry := line.strip()):
            continue
        try:
            host = parse_host(entry, least=0)
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from error
        if host.address in found:
            raise ConfigError(f"line {number}: {host.address} stands there twice")
        found[host.address] = host.num_ranks
    if not found:
        raise ConfigError("it names no host")
    return found


def difference(before: Slots, after: Slots) -> list[str]:
    """What an answer has that the one before had not, in words."""
    said = [f"{one} has {_slots(after[one])}" for one in after if before.get(one) != after[one]]
    return said + [f"{one} is not named any more" for one in before if one not in after]


def _slots(count: int) -> str:
    return f"{count} slot{'' if count == 1 else 's'}"

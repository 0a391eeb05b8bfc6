"""Hosts of a job: those it begins with, and those that a discovery script names later.

``10.0.0.1:4,10.0.0.2:4`` are two hosts with four ranks each; the order of the hosts gives the ranks. The same
list is given to the launcher on every host; each finds its own entry by its addresses.

A discovery script runs again and again, as in Horovod, and prints a host a line, ``HOST`` or ``HOST:SLOTS``: an IP
address or a name, and how many processes may run there (1 if omitted, 0 for none at the moment). An answer is used as a
whole or not at all: if the script fails, takes too long, or prints a malformed line, its last answer stays valid.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import os
import re
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from kfcomm.common.sockets import readable
from kfcomm.errors import ConfigError
from kfcomm.launch.process import Child, CommandError, find_program
from kfcomm.rendezvous.backends import secret_variables
from kfcomm.rendezvous.host import LOOPBACK, NameNotFound, interfaces, is_address, look_up
from kfcomm.rendezvous.resolving import once_resolved
from kfcomm.rendezvous.worlds import MAX_RANKS

_MAX_SHOWN = 80
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]+))(?::([0-9]{1,6}))?")

logger = logging.getLogger("kfcomm")


@dataclass(frozen=True, slots=True)
class LaunchHost:
    """One entry of the list: the IP address of a host, its number of ranks, and its name where it was given one.

    A pod that is moved keeps its name and has another address.
    """

    address: str
    num_ranks: int
    name: str = field(default="", compare=False)

    @property
    def identity(self) -> str:
        """Name, or address without one."""
        return self.name or self.address


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Hosts and their initial ranks."""

    hosts: tuple[LaunchHost, ...]  # all hosts, in the order of their ranks
    here: int = 0  # position of this host among them

    def with_late(self, address: str) -> HostPlan:
        """Plan of a host that joins later: it is appended, with no initial rank."""
        return HostPlan((*self.hosts[: self.num_first], LaunchHost(address, 0)), self.num_first)

    @property
    def is_late(self) -> bool:
        """Whether this host joins later."""
        return self.hosts[self.here].num_ranks == 0

    @property
    def num_first(self) -> int:
        """Number of initial hosts."""
        return len(self.hosts) - self.is_late

    @classmethod
    def single(cls, num_ranks: int) -> HostPlan:
        """All ranks on this host, over loopback."""
        return cls((LaunchHost(LOOPBACK, num_ranks),))

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return sum(host.num_ranks for host in self.hosts)

    @property
    def ranks(self) -> range:
        """The ranks on this host."""
        return self.ranks_of(self.here)

    def ranks_of(self, host: int) -> range:
        """The ranks on the host at this position."""
        first = sum(each.num_ranks for each in self.hosts[:host])
        return range(first, first + self.hosts[host].num_ranks)

    def address_of(self, rank: int) -> str:
        """The address of a rank's host."""
        return next(each.address for at, each in enumerate(self.hosts) if rank in self.ranks_of(at))

    @property
    def address(self) -> str:
        """The address of this host."""
        return self.hosts[self.here].address


def parse_hosts(text: str) -> tuple[LaunchHost, ...]:
    """The hosts in ``address[:ranks],...``; names are resolved, IPv6 addresses stand in brackets.

    Raises:
        ConfigError: an entry is malformed, cannot be resolved, or appears twice.
    """
    try:
        hosts = tuple(parse_host(entry.strip()) for entry in text.split(","))
    except ConfigError as error:
        raise ConfigError(f"-H: {error}") from error
    seen: set[str] = set()
    for host in hosts:
        if host.address in seen:
            raise ConfigError(f"-H {text!r}: {host.address} is listed twice; give each host once, with all its ranks")
        seen.add(host.address)
    return hosts


def plan_for(hosts: tuple[LaunchHost, ...], own: str | None = None) -> HostPlan:
    """Plan with this host's position: the entry ``own``, else the one with an address of this host.

    Raises:
        ConfigError: no entry, or more than one, is this host's.
    """
    listed = ", ".join(host.address for host in hosts)
    mine = {resolved(own)} if own is not None else {each.address for each in interfaces()}
    found = [at for at, host in enumerate(hosts) if host.address in mine]
    match found:
        case [here]:
            return HostPlan(hosts, here)
        case []:
            raise ConfigError(
                f"this host, with the addresses {', '.join(sorted(mine))}, is not among the hosts {listed}: name it "
                "with --self"
            )
        case _:
            raise ConfigError(f"several of the hosts {listed} are this host: name one with --self")


def parse_host(entry: str, least: int = 1) -> LaunchHost:
    """One host, ``address`` or ``address:ranks``, where that is ``least`` or more.

    Raises:
        ConfigError: it is malformed, or cannot be resolved.
    """
    match = _HOST.fullmatch(entry)
    num_ranks = int(match[3] or 1) if match else -1
    if match is None or not least <= num_ranks <= MAX_RANKS:
        need = ", with at least one rank" if least else ""
        raise ConfigError(f"{entry[:_MAX_SHOWN]!r} must look like 10.0.0.1:4 or [fd00::1]:4{need}")
    given = match[1] or match[2]
    return LaunchHost(resolved(given), num_ranks, "" if is_address(given) else given)


def resolved(name: str) -> str:
    """The IP address of a host.

    Raises:
        ConfigError: the name cannot be resolved.
    """
    if is_address(name):
        return str(ipaddress.ip_address(name))
    try:
        return str(look_up(name)[0][0])
    except NameNotFound as error:
        raise ConfigError(str(error)) from error


async def names_resolved(text: str, timeout_s: float) -> None:
    """Wait until all names in a list of hosts resolve; a malformed entry is left to `parse_hosts`.

    Raises:
        RendezvousError: one does not within the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    for entry in text.split(","):
        match = _HOST.fullmatch(entry.strip())
        if match is not None and match[2] is not None and not is_address(match[2]):
            left_s = max(0.0, deadline_s - time.monotonic())
            await once_resolved(functools.partial(look_up, match[2]), left_s, logger.warning)


EVERY_S = 1.0
"""Seconds from the end of one run to the next."""
WITHIN_S = 10.0
MAX_ANSWER_NBYTES = 1 << 20
_MAX_MESSAGE = 160

Slots = Mapping[str, int]


class _NoAnswer(Exception):
    """The script gave no valid answer."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """Script that names the available hosts."""

    command: str  # script and arguments as one text
    program: str  # the file to run
    environ: Mapping[str, str]  # environment of the script

    @classmethod
    def of(cls, command: str, environ: Mapping[str, str]) -> Discovery:
        """Resolve the program of a command; its environment lacks the secrets of the job.

        Raises:
            ConfigError: the program does not exist.
        """
        try:
            words = shlex.split(command)
            program = find_program(words, environ.get("PATH"))
        except (ValueError, IndexError) as error:
            raise ConfigError(f"--discover: expected a command, got {command!r}") from error
        except CommandError as error:
            raise ConfigError(f"--discover {error}") from error
        secrets = {"KFCOMM_TOKEN", "KFCOMM_TOKEN_FILE", *secret_variables()}
        return cls(command, program, {name: value for name, value in environ.items() if name not in secrets})

    async def first(self) -> Slots:
        """Answer before the job begins.

        Raises:
            ConfigError: the script gives no valid answer.
        """
        try:
            return await self._answer()
        except _NoAnswer as error:
            raise ConfigError(f"--discover {self.command!r}: {error}") from error

    async def answers(self, known: Slots, say: Callable[[str], None]) -> AsyncIterator[Slots]:
        """Yield the last valid answer (``known`` at first) every second; never ends.

        Each new error is shown once by ``say``, and so are valid answers after it.
        """
        wrong = ""
        while True:
            yield known
            await asyncio.sleep(EVERY_S)
            try:
                known = await self._answer()
            except _NoAnswer as error:
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
            raise _NoAnswer(f"it could not be started: {error}") from error
        try:
            async with asyncio.timeout(WITHIN_S):
                out, err, code = await asyncio.gather(_all_of(child.out), _all_of(child.err), child.ended())
        except TimeoutError:
            raise _NoAnswer(f"no answer within {WITHIN_S:g} s") from None
        finally:
            # The whole group: nothing that the script has started outlives its answer.
            child.send(signal.SIGKILL)
            child.close()
        if code:
            last = err.decode(errors="replace").strip().rpartition("\n")[2][:_MAX_MESSAGE]
            raise _NoAnswer(f"it failed (exit code {code})" + (f": {last}" if last else ""))
        if len(out) > MAX_ANSWER_NBYTES:
            raise _NoAnswer(f"it says more than {MAX_ANSWER_NBYTES} bytes")
        try:
            async with asyncio.timeout(WITHIN_S):
                # In a thread, since names are resolved, which blocks.
                return await asyncio.to_thread(read_slots, out.decode(errors="replace"))
        except ConfigError as error:
            raise _NoAnswer(str(error)) from error
        except TimeoutError:
            raise _NoAnswer(f"the names of its hosts were not resolved within {WITHIN_S:g} s") from None


async def _all_of(descriptor: int) -> bytes:
    """Output of a program, cut after `MAX_ANSWER_NBYTES`."""
    os.set_blocking(descriptor, False)
    found = b""
    while True:
        await readable(descriptor)
        if not (chunk := os.read(descriptor, MAX_ANSWER_NBYTES)):
            return found
        # Read on past the limit, else the script would block and never end. One byte more shows that it is too long.
        found = (found + chunk)[: MAX_ANSWER_NBYTES + 1]


def read_slots(text: str) -> Slots:
    """Parse the output of a script: slots by address.

    Raises:
        ConfigError: a line is malformed, a host appears twice, or no host is named.
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
            raise ConfigError(f"line {number}: {host.address} is listed twice")
        found[host.address] = host.num_ranks
    if not found:
        raise ConfigError("it names no host")
    return found


def difference(before: Slots, after: Slots) -> list[str]:
    """Differences between two answers, in words."""
    said = [f"{one} has {_slots(after[one])}" for one in after if before.get(one) != after[one]]
    return said + [f"{one} is not named any more" for one in before if one not in after]


def _slots(count: int) -> str:
    return f"{count} slot{'' if count == 1 else 's'}"

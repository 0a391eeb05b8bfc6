"""A signal at every line of kfcomm that a blocking call runs: the communicator works on.

    python -m tests.programs.interrupts --verb all_reduce --transport shm --every
    python -m tests.programs.interrupts --raises TimeoutError

After Ctrl-C it may be closed instead. After an exception from a handler of the program it stays open, and no message is
lost: the next receive gets it, or its sender gets an error.

Rank 0 is interrupted, rank 1 takes part in the call. Then both meet in a barrier. Where that works, the same two
processes go on with the next line; where rank 0 says that its communicator is closed, both close it and end, and others
are started. What hangs is ended from within (`interruptible.HANG_S`), with the stacks of its threads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tests.launch.launched import TOKEN, environ
from tests.processes.stage import Actor, Gone, Stage, served, stage
from tests.programs.interruptible import (
    BETWEEN_TWO,
    CTRL_C,
    HANG_S,
    INTERRUPTIBLE,
    LOOPING,
    RAISED,
    RECEIVING,
    UNNAMED,
    Place,
    Rank,
)

BARRIER_S = 20.0
"""Timeout of the barrier that shows whether a communicator works."""
CALLS = 4
"""Recorded, after as many that bring everything into its usual state."""
TIMES = 2
"""Of a line that runs again and again in one call, so many are places of their own."""
MOST_TURNS = 1_000_000
"""Of an empty loop, some 20 ms: a signal comes after fewer, at no moment in particular."""
PAUSE_S = 3e-3
"""Before an interrupt, for other threads of its process."""
ATTEMPTS = 3
"""To meet a place that a call does not run each time."""

SURVIVED, RETURNED, ABORTED, CLOSED = "survived", "returned", "aborted", "closed"
MISSED, BROKEN, HUNG = "missed", "broken", "hung"
ENDS = SURVIVED, RETURNED, ABORTED, CLOSED, MISSED, BROKEN, HUNG
"""``returned``: the exception came after the result. ``aborted``: the sender of a message gets an error."""


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one interrupt.

    Attributes:
        place: where it came.
        end: one of the words above.
        text: what is wrong.
        raises: what it raised.
    """

    verb: str
    transport: str
    place: Place
    end: str
    text: str = ""
    raises: str = CTRL_C

    @property
    def is_right(self) -> bool:
        """Whether this may be."""
        may_close = self.raises == CTRL_C or self.verb in UNNAMED
        return self.end in (SURVIVED, RETURNED, ABORTED, MISSED) or (self.end == CLOSED and may_close)

    def __str__(self) -> str:
        file, line, times = self.place
        where = f"kfcomm/{file}:{line}" + (f", time {times}" if times > 1 else "")
        what = f"{self.verb} over {self.transport}, {self.raises} at {where}"
        return f"{what}: {self.end} {self.text}".rstrip()


WRONG = "wrong"


class Broken(Exception):
    """A rank did not do what it has to."""


class Nursery:
    """Source of processes: each is forked from one that has imported everything."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.programs.interruptible"],
                env=environ(), stdin=subprocess.PIPE, stdout=file, stderr=file, text=True,
            )  # fmt: skip
        self._ended = os.pidfd_open(self._process.pid)

    def start(self, on: Stage, count: int) -> list[Actor]:
        """So many processes, which connect to this stage."""
        assert self._process.stdin is not None
        for number in range(count):
            self._process.stdin.write(f"{on.path} {number}\n")
        self._process.stdin.flush()
        return [on.meet(str(number), [self._ended]) for number in range(count)]

    def said(self) -> str:
        """Output of all processes."""
        return self._errors.read_text()

    def close(self) -> None:
        """No more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._ended)


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery, closed at the end."""
    with tempfile.TemporaryDirectory(prefix="said") as folder:
        made = Nursery(Path(folder) / "said")
        try:
            yield made
        finally:
            made.close()


class World:
    """Rank 0, which is interrupted, and rank 1, if there is one, over one kind of link; see `world`."""

    def __init__(self, children: Nursery, on: Stage, transport: str, size: int, store: str) -> None:
        self.transport = transport
        self.ranks = children.start(on, size)
        self.victim, *self.helpers = self.ranks
        self._number = 0
        self._said_before = len(children.said())
        self._children = children
        settings = {"token": TOKEN, "transport": transport, "timeout": HANG_S / 2}
        if size > 1:
            settings |= {"store": store, "serve": False, "size": size}
        joins = [
            actor.do(Rank.join, **settings, **({"rank": rank} if size > 1 else {}))
            for rank, actor in enumerate(self.ranks)
        ]
        for join in joins:
            join.result()

    def places(self, verb: str) -> list[Place]:
        """Places where a call of this verb can be interrupted, with its partner ahead or behind."""
        found: dict[Place, None] = {}
        for is_late in (False, True):
            names = [self._name(verb) for _ in range(2 * CALLS)]
            helping = [] if is_late else [one.do(Rank.help, verb=verb, names=names) for one in self.helpers]
            recording = self.victim.do(Rank.record, verb=verb, names=names)
            helping += [one.do(Rank.help, verb=verb, names=names) for one in self.helpers] if is_late else []
            for places in recording.result()[CALLS:]:
                found.update(dict.fromkeys((file, line, times) for file, line, times in places if times <= TIMES))
            for call in helping:
                call.result()
            self._settle(give_up=False)
        return list(found)

    def interrupt(self, verb: str, place: Place, raises: str, *, is_late: bool, pause_s: float = 0.0) -> Result:
        """One call, interrupted after a pause. If its end is ``closed`` or wrong, this world is over."""
        text = ""
        try:
            end = self._interrupted(verb, place, raises, is_late, pause_s)
        except Gone as gone:
            end, text = HUNG, f"{gone}\n{self._said()}"
        except Broken as broken:
            end, text = BROKEN, str(broken)
        return Result(verb, self.transport, place, end, text, raises)

    def _interrupted(self, verb: str, place: Place, raises: str, is_late: bool, pause_s: float) -> str:
        name = self._name(verb)
        helping = [] if is_late else [one.do(Rank.help, verb=verb, names=[name]) for one in self.helpers]
        how = {"place": list(place), "raises": raises, "pause_s": pause_s}
        interrupting = self.victim.do(Rank.interrupt, verb=verb, name=name, **how)
        helping += [one.do(Rank.help, verb=verb, names=[name]) for one in self.helpers] if is_late else []
        came = interrupting.result()
        for call in helping:
            call.result()
        if came not in ("interrupted", RETURNED, MISSED):
            raise Broken(f"the call ended with {came}, not with {raises}; the ranks said:\n{self._said()}")
        end = SURVIVED if came == "interrupted" else came
        if verb in RECEIVING and came == "interrupted" and raises != CTRL_C:
            end = self._taken_again(verb, name)
        else:
            # a call that was not interrupted ends on all ranks; giving it up there would race with its end
            self._settle(give_up=came == "interrupted" or (raises == CTRL_C and came != MISSED))
        if verb in UNNAMED and came != MISSED:
            self.end()
            return CLOSED
        return self._meet(end)

    def _taken_again(self, verb: str, name: str) -> str:
        """Check a lost result: the next call gets the message, or the sender gets an error and sends it again."""
        delivering = self.helpers[0].do(Rank.deliver, verb=verb, name=name)
        taken, told = self.victim.do(Rank.again, verb=verb, name=name).result(), delivering.result()
        if taken != "done" or told not in ("kept", "aborted"):
            raise Broken(f"the message is lost: its receive ended with {taken}, its send with {told}")
        return SURVIVED if told == "kept" else ABORTED

    def _meet(self, end: str) -> str:
        """All ranks meet, or rank 0 says that it is closed, and then all end."""
        name = self._name("meet")
        meeting = [actor.do(Rank.barrier, name=name, timeout=BARRIER_S) for actor in self.ranks]
        said = meeting[0].result()
        if said == CLOSED:
            self.victim.do(Rank.close).result()
            for call in meeting[1:]:
                call.result()
            self.end()
            return CLOSED
        others = [call.result() for call in meeting[1:]]
        if (said, others) != ("done", ["done"] * len(others)):
            raise Broken(f"the barrier that followed ended with {said} on rank 0, {others} on the other")
        return end

    def signalled(self, verb: str, *, alone: bool = False) -> str:
        """Blocking calls, until a real SIGINT comes to rank 0 at some moment; with ``alone`` rank 1 takes no part."""
        looping = [actor.do(Rank.loop, verb=verb) for actor in (self.ranks[:1] if alone else self.ranks)]
        for call in looping:
            call.actor.log(LOOPING)
        for _ in range(random.randrange(MOST_TURNS)):
            pass
        self.victim.signal(signal.SIGINT)
        came = looping[0].result()
        if came != "interrupted":
            raise Broken(f"the calls ended with {came}, not with KeyboardInterrupt")
        try:
            self.victim.do(Rank.close).result()
            for call in looping[1:]:
                call.result()
            self.end()
        except Gone as gone:
            raise Broken(f"{gone}: {self._said()}") from gone
        return CLOSED

    def end(self) -> None:
        """Close all communicators; the processes end."""
        for closing in [actor.do(Rank.close) for actor in self.ranks]:
            closing.result()
        for actor in self.ranks:
            actor.end()
        for actor in self.ranks:
            actor.wait()
        if "Timeout (" in self._said():
            raise Broken(f"a process did not end after close():\n{self._said()}")

    def _settle(self, *, give_up: bool) -> None:
        for call in [one.do(Rank.settle, give_up=give_up) for one in self.helpers]:
            call.result()

    def _name(self, what: str) -> str:
        self._number += 1
        return f"{what} {self._number}"

    def _said(self) -> str:
        return self._children.said()[self._said_before :]


@contextlib.contextmanager
def world(children: Nursery, transport: str, size: int) -> Iterator[World]:
    """A world; its processes have ended at the end, however that came."""
    with served() as store, stage() as on:
        yield World(children, on, transport, size, store.url)


@dataclass(frozen=True, slots=True)
class Targets:
    """Selection of interrupts.

    Attributes:
        verbs: some of `INTERRUPTIBLE`.
        sample: so many places of each; None: all.
        worlds: after so many are used up, no other is begun, and the places come in a random order; None: no bound.
        below: only in files of kfcomm whose names begin so.
        raises: by turns.
    """

    verbs: Sequence[str]
    sample: int | None = None
    worlds: int | None = None
    below: str = ""
    raises: Sequence[str] = (CTRL_C,)

    def found(self, one: World) -> list[tuple[str, int, Place]]:
        """Verbs and places, each with a number."""
        chosen = []
        for verb in self.verbs:
            places = [place for place in one.places(verb) if place[0].startswith(self.below)]
            numbers = range(len(places))
            if self.sample is not None and self.sample < len(places):
                numbers = sorted(random.sample(numbers, self.sample))
            chosen += [(verb, number, places[number]) for number in numbers]
        if self.worlds is not None:
            random.shuffle(chosen)
        return chosen


def interrupted(children: Nursery, transport: str, size: int, targets: Targets) -> Iterator[Result]:
    """Interrupts, one after the other, in as many worlds as that takes; of one rank or two."""
    left: list[tuple[str, int, Place]] | None = None
    count = 0
    while left is None or (left and count != targets.worlds):
        count += 1
        with world(children, transport, size) as one:
            if left is None:
                left = targets.found(one)
            goes_on = True
            while goes_on and left:
                result = _attempts(one, targets.raises, *left.pop(0))
                yield result
                goes_on = result.end in (SURVIVED, RETURNED, ABORTED, MISSED)
            if goes_on:
                one.end()


def _attempts(one: World, raises: Sequence[str], verb: str, number: int, place: Place) -> Result:
    """Its partner is before or behind, and its I/O thread before it or not, by turns."""
    what = raises[(number // 2) % len(raises)]
    for attempt in range(ATTEMPTS):
        pause_s = PAUSE_S * ((number // 2 + attempt) % 2)
        result = one.interrupt(verb, place, what, is_late=(number + attempt) % 2 == 1, pause_s=pause_s)
        if result.end != MISSED:
            break
    return result


def verbs(size: int) -> Sequence[str]:
    """Verbs that a world of this size can call."""
    return [verb for verb in INTERRUPTIBLE if size > 1 or verb not in BETWEEN_TWO]


def main() -> int:
    """Run what the command line asks for; 1 if something hangs or is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.interrupts")
    parser.add_argument(
        "--verb", action="append", choices=sorted(INTERRUPTIBLE), help="again for more of them; default: all"
    )
    parser.add_argument("--transport", action="append", choices=("shm", "unix", "tcp"), help="default: each")
    parser.add_argument("--raises", action="append", choices=(CTRL_C, *RAISED), help="by turns; default: Ctrl-C")
    parser.add_argument("--handlers", action="store_true", help="every exception of a handler, in turn")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--below", default="", metavar="PREFIX", help="only in files of kfcomm whose names begin so")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--every", action="store_true", help="every line")
    amount.add_argument("--sample", type=int, default=40, help="so many lines of each verb")
    given = parser.parse_args()
    sample = None if given.every else given.sample
    raises = tuple(RAISED) if given.handlers else given.raises or (CTRL_C,)
    is_right = True
    click.echo(f"{'verb':22}{'links':6}{'lines':>8}" + "".join(f"{end:>10}" for end in ENDS))
    with nursery() as children:
        for transport in given.transport or ("shm", "unix", "tcp"):
            for verb in given.verb or verbs(given.ranks):
                targets = Targets([verb], sample, below=given.below, raises=raises)
                counts = _counted(interrupted(children, transport, given.ranks, targets))
                click.echo(
                    f"{verb:22}{transport:6}{sum(counts[end] for end in ENDS):8}"
                    + "".join(f"{counts[end]:10}" for end in ENDS)
                )
                is_right = is_right and not counts[WRONG]
    return int(not is_right)


def _counted(results: Iterable[Result]) -> Counter[str]:
    """How many ended in which way; what is wrong is shown as it comes."""
    counts: Counter[str] = Counter()
    for result in results:
        counts[result.end] += 1
        if not result.is_right:
            counts[WRONG] += 1
            click.echo(str(result))
    return counts


if __name__ == "__main__":
    sys.exit(main())

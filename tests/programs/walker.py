"""Walks one rank through a program, by way of either interface, and compares what comes with what should.

A result that differs is kept, and the program goes on, so that the ranks stay in step and each can say what it got. An
error ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

import kfcomm
from tests.programs import generator
from tests.programs.arrays import difference, shown
from tests.programs.calls import Action, Close, Do, Make, Pipe, Program, Step, Together, Wait

T = TypeVar("T")

MAX_HELD = 6
"""Shared results of a rank, with copies that they are compared with."""


@dataclass(frozen=True, slots=True)
class Report:
    """First fault that a rank found.

    Attributes:
        seed: of the program.
        step: number of the step; of a result that was waited for, the step of the wait.
        rank: which saw it.
        call: what was done.
        kind: ``difference`` or ``error``.
        text: what differs, or the error.
        got, expected: results, in a line.
    """

    seed: int
    step: int
    rank: int
    call: str
    kind: str
    text: str
    got: str = ""
    expected: str = ""

    def __str__(self) -> str:
        head = f"seed {self.seed}, step {self.step}, rank {self.rank}: {self.kind}: {self.text}\n  {self.call}"
        return head if self.kind == "error" else f"{head}\n  got      {self.got}\n  expected {self.expected}"

    def as_dict(self) -> dict[str, Any]:
        """Representation in JSON."""
        return asdict(self)


def worst(reports: Iterable[Report]) -> list[Report]:
    """Root failures: of the first program that failed, and differences if there are any."""
    found = sorted(reports, key=lambda one: (one.seed, one.kind == "error", one.step, one.rank))
    return [one for one in found if (one.seed, one.kind) == (found[0].seed, found[0].kind)]


class Interface(Protocol):
    """How a rank makes its calls."""

    async def call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a call and wait for it."""

    async def begin(self, target: Any, verb: str, *args: Any, **options: Any) -> Any:
        """Begin a call; its handle."""

    async def wait(self, handle: Any) -> Any:
        """The result of a handle."""

    def forget(self, handle: Any) -> None:
        """Abandon this handle."""


class Blocking:
    """``kfcomm.sync``. Nothing here ever awaits anything: see `blocking`."""

    async def call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return verb(*args, **options)

    async def begin(self, target: Any, verb: str, *args: Any, **options: Any) -> Any:
        return getattr(target, f"{verb}_async")(*args, **options)

    async def wait(self, handle: Any) -> Any:
        return handle.wait()

    def forget(self, handle: Any) -> None:
        handle.cancel()


class Awaiting:
    """``kfcomm``."""

    async def call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = verb(*args, **options)
        return await result if inspect.isawaitable(result) else result

    async def begin(self, target: Any, verb: str, *args: Any, **options: Any) -> Any:
        begun = getattr(target, verb)(*args, **options)
        if not inspect.iscoroutine(begun):
            return begun
        task = asyncio.ensure_future(begun)
        await asyncio.sleep(0)  # it takes its place in the program now
        return task

    async def wait(self, handle: Any) -> Any:
        return await handle

    def forget(self, handle: Any) -> None:
        handle.cancel()
        if isinstance(handle, asyncio.Future):
            handle.add_done_callback(lambda done: done.cancelled() or done.exception())


def blocking(walk: Coroutine[Any, Any, T]) -> T:
    """Run to its end what never awaits anything."""
    try:
        walk.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a blocking program has awaited something")


class Walker:
    """One rank of one program.

    Attributes:
        symmetric: which part of the arrays of each rank is in symmetric memory, at random.
    """

    symmetric = 0.0

    def __init__(self, interface: Interface, comm: Any, program: Program) -> None:
        self._interface = interface
        self._program = program
        self._rank: int = comm.rank
        self._comms: dict[int, Any] = {0: comm}
        self._queues: dict[tuple[int, Pipe], Any] = {}
        self._prepared: dict[int, tuple[Any, Action]] = {}
        self._begun: dict[int, tuple[Do, Action, list[Any], Any]] = {}
        self._held: deque[tuple[Any, Any]] = deque()
        self._place = 0
        self._report: Report | None = None

    async def run(self) -> Report | None:
        """All steps; what was wrong first."""
        step: Step | None = None
        try:
            for place, step in enumerate(self._program.steps):
                self._place = place
                await self._step(step)
        except Exception as error:  # noqa: BLE001  whatever it is, it is not what the program should give
            told = f"{type(error).__name__}: {error}"
            self._report = self._report or self._reported(step, "error", told)
            for *_, handle in self._begun.values():
                with contextlib.suppress(Exception):
                    self._interface.forget(handle)
        return self._report

    async def _step(self, step: Step) -> None:
        match step:
            case Do():
                await self._do(step)
            case Together(dos, salt):
                for do in self._shuffled(dos, salt):
                    await self._do(do)
            case Wait(numbers, salt):
                for number in self._shuffled(numbers, salt):
                    await self._wait(number)
            case Make():
                await self._make(step)
            case Close(number):
                comm = self._comms.pop(number, None)
                if comm is not None:
                    await self._interface.call(comm.close)

    def _shuffled(self, items: Iterable[T], salt: int) -> list[T]:
        found = list(items)
        random.Random(f"{salt} {self._rank}").shuffle(found)
        return found

    async def _do(self, do: Do) -> None:
        comm = self._comms.get(do.comm)
        action = None if comm is None else do.call.action(comm.rank)
        if action is None:
            return
        if self.symmetric:
            action = self._moved(action, comm, random.Random(f"{self._program.seed} {do.number} {self._rank}"))
        target = comm if action.pipe is None else self._queue(do.comm, action.pipe)
        if action.series is not None:
            await self._start(do, comm, action)
            return
        before = [x.copy() for x in action.inputs]
        if do.blocks[self._rank]:
            result = await self._interface.call(getattr(target, action.verb), *action.args, **action.options)
            self._check(do, action, before, result)
        else:
            handle = await self._interface.begin(target, action.verb, *action.args, **action.options)
            self._begun[do.number] = (do, action, before, handle)

    def _moved(self, action: Action, comm: Any, draw: random.Random) -> Action:
        """The same with some of its arrays in symmetric memory."""
        moved: dict[int, Any] = {}

        def move(x: Any) -> Any:
            if not (isinstance(x, np.ndarray) and x.flags.c_contiguous):
                return x
            if id(x) not in moved:
                moved[id(x)] = x
                if draw.random() < self.symmetric:
                    moved[id(x)] = comm.empty(x.shape, x.dtype)
                    moved[id(x)][...] = x
            return moved[id(x)]

        options = {key: move(value) for key, value in action.options.items()}
        inputs = [move(x) for x in action.inputs]
        return replace(action, args=tuple(map(move, action.args)), options=options, inputs=inputs, out=move(action.out))

    async def _start(self, do: Do, comm: Any, action: Action) -> None:
        """The next start of a series: what it gives goes to the arrays with which the series was prepared."""
        assert action.series is not None
        if action.series not in self._prepared:
            prepared = getattr(comm, f"{action.verb}_init")(*action.args, **action.options)
            self._prepared[action.series] = prepared, action
        prepared, first = self._prepared[action.series]
        for mine, given in zip(first.args, action.args, strict=True):
            if mine is not None:
                mine[...] = given
        action = replace(action, inputs=first.inputs, out=first.out)
        before = [x.copy() for x in action.inputs]
        handle = prepared.start()
        if do.blocks[self._rank]:
            self._check(do, action, before, await self._interface.wait(handle))
        else:
            self._begun[do.number] = (do, action, before, handle)

    async def _wait(self, number: int) -> None:
        if number not in self._begun:
            return
        do, action, before, handle = self._begun[number]
        result = await self._interface.wait(handle)
        del self._begun[number]
        self._check(do, action, before, result)

    def _check(self, do: Do, action: Action, before: list[Any], result: Any) -> None:
        """The result, and the inputs, whose memory the program uses for something else from now on."""
        text = "" if action.any_result else difference(result, action.expected)
        if not text and action.out is not None and result is not action.out:
            text = "the result is not the out that was given"
        if not text and any(not np.array_equal(x, old) for x, old in zip(action.inputs, before, strict=True)):
            text = "an input was changed"
        if not text and action.options.get("shared"):
            self._held.append((result, result.copy()))
            if len(self._held) > MAX_HELD and not np.array_equal(*self._held.popleft()):
                text = "a shared result that is held was changed"
        if text and self._report is None:
            self._report = self._reported(do, "difference", text, shown(result), shown(action.expected))
        for x in action.inputs:
            x[...] = 1

    def _queue(self, number: int, pipe: Pipe) -> Any:
        queue = self._queues.get((number, pipe))
        if queue is None:
            comm = self._comms[number]
            queue = self._queues[number, pipe] = comm.queue(pipe.name, pipe.source, pipe.target, capacity=pipe.capacity)
        return queue

    async def _make(self, step: Make) -> None:
        parent = self._comms.get(step.parent)
        if parent is None:
            return
        mine = next((one for one in step.made if parent.rank in one[1]), None)
        if step.colors is not None:
            color, key = step.colors[parent.rank]
            made = await self._interface.call(parent.split, color, key, step.name)
        elif mine is not None:
            made = await self._interface.call(parent.group, mine[1], step.name, strategy=step.strategy)
        else:
            return
        place = None if made is None else (made.rank, made.size)
        wanted = None if mine is None else (mine[1].index(parent.rank), len(mine[1]))
        if place != wanted and self._report is None:
            text = "another place in the group than was asked for"
            self._report = self._reported(step, "difference", text, shown(place), shown(wanted))
        if mine is not None and made is not None:
            self._comms[mine[0]] = made

    def _reported(self, step: Step | None, kind: str, text: str, got: str = "", expected: str = "") -> Report:
        return Report(self._program.seed, self._place, self._rank, str(step), kind, text, got, expected)


def run_blocking(comm: kfcomm.sync.Communicator, program: Program) -> Report | None:
    """One program, on this rank of a world with the blocking interface."""
    return blocking(Walker(Blocking(), comm, program).run())


async def run_awaiting(comm: kfcomm.Communicator, program: Program) -> Report | None:
    """One program, on this rank of a world with the asynchronous interface."""
    return await Walker(Awaiting(), comm, program).run()


@dataclass(frozen=True, slots=True)
class Plan:
    """Programs to be run one after the other: as many as ``count``, from the seed ``first`` on."""

    first: int
    count: int
    calls: int

    def programs(self, size: int) -> Iterable[Program]:
        """Each in turn."""
        for seed in range(self.first, self.first + self.count):
            yield generator.program(seed, self.calls, size)


def all_blocking(
    comm: kfcomm.sync.Communicator, plan: Plan, tell: Callable[[int], object] = lambda _: None
) -> Report | None:  # fmt: skip
    """Run all programs; return the first report, with the communicator closed, so that no rank waits for this one."""
    for program in plan.programs(comm.size):
        tell(program.seed)
        report = run_blocking(comm, program)
        if report is not None:
            comm.close()
            return report
    return None


async def all_awaiting(
    comm: kfcomm.Communicator, plan: Plan, tell: Callable[[int], object] = lambda _: None
) -> Report | None:  # fmt: skip
    """As `all_blocking`."""
    for program in plan.programs(comm.size):
        tell(program.seed)
        report = await run_awaiting(comm, program)
        if report is not None:
            await comm.close()
            return report
    return None

"""Random training in a world in memory in which ranks die at any moment; and what has to be true of it afterwards.

A seed makes a program: for each step some calls, which each rank posts in an order of its own, some of them awaited one
by one, some together. Ranks die after so many turns of the event loop. Every rank that lives notes what it got.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.errors import EpochChanged, KfcommError
from kfcomm.testing import MemoryWorld

LENGTH, BATCH = 120, 12
HANG_S = 30.0
ELEMENTS = (1, 7, 3000, 70_000)

VERBS = (
    "all_reduce", "in_place", "all_reduce_many", "broadcast", "all_gather", "concat", "barrier", "consensus", "reduce",
    "gather", "scatter", "reduce_scatter", "all_to_all", "broadcast_object", "all_gather_object", "gather_object",
)  # fmt: skip


BEGUN = frozenset(VERBS) - {"in_place", "concat"}
"""Their names as methods."""
OWN = ("reduce", "gather", "gather_object", "scatter", "reduce_scatter", "all_to_all")
"""Verbs with a result of its own on each rank."""


class Plan(NamedTuple):
    """One program: of each step its calls (verb, number of elements, root); who dies, joins, or is asked for, when.

    Attributes:
        length: samples of the pass.
    """

    size: int
    steps: list[list[tuple[str, int, int]]]
    deaths: list[tuple[int, int]]
    joins: list[tuple[int, int]]
    sizes: list[tuple[int, int]]
    on_loss: str
    length: int = LENGTH


class Got(NamedTuple):
    """The end of a call on one rank: ``ok`` or the kind of error, the result as plain values, the contributors."""

    how: str
    value: Any
    contributors: tuple[int, ...] | None


def plan_of(seed: int, deaths: int | None = None, *, grows: bool = False, on_loss: str = "finish") -> Plan:
    """The program of a seed."""
    random = Random(seed)
    size = random.choice([2, 3, 4, 5])
    count = random.randrange(min(size, 4)) if deaths is None else deaths
    steps = [
        [(random.choice(VERBS), random.choice(ELEMENTS), random.randrange(size)) for _ in range(random.randrange(4))]
        for _ in range(12)
    ]
    victims = random.sample(range(size), min(count, size - 1))
    killed = [(victim, random.randrange(1, 600)) for victim in victims]
    counts = [random.choice([0, 1, 2]) if grows else 0 for _ in range(2)]
    joins = [(size + at, random.randrange(150)) for at in range(counts[0])]
    sizes = [(random.randrange(2, 6), random.randrange(200)) for _ in range(counts[1])]
    return Plan(size, steps, killed, joins, sizes, on_loss)


def given(birth: int, step: int, number: int, elements: int) -> Any:
    """Input of a rank: whole numbers, so that sums are exact."""
    return np.full(elements, float(1 + birth + 10 * number + 100 * step))


def begin(comm: Any, birth: int, step: int, number: int, call: tuple[str, int, int], **more: Any) -> Any:
    """Begin one call; returns its handle. ``more``: options of every verb."""
    verb, elements, root = call
    x, size = given(birth, step, number, elements), comm.size
    root %= size
    more = {"name": f"{verb}/{number}", **more}
    made: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x, **more),
        "in_place": lambda: comm.all_reduce(x, out=x, **more),
        "all_reduce_many": lambda: comm.all_reduce_many({"a": x, "b": x[:1]}, **more),
        "broadcast": lambda: comm.broadcast(x, root, **more),
        "all_gather": lambda: comm.all_gather(x[:9], **more),
        "concat": lambda: comm.all_gather(x[: 1 + birth], concat=True, **more),
        "barrier": lambda: comm.barrier(**more),
        "consensus": lambda: comm.consensus(x[:1] * 0, **more),
        "reduce": lambda: comm.reduce(x, root, **more),
        "gather": lambda: comm.gather(x[:9], root, **more),
        "scatter": lambda: comm.scatter([x[:2]] * size if comm.rank == root else None, root, **more),
        "reduce_scatter": lambda: comm.reduce_scatter([x[:2]] * size, **more),
        "all_to_all": lambda: comm.all_to_all([x[:2]] * size, **more),
        "broadcast_object": lambda: comm.broadcast_object([birth, step], root, **more),
        "all_gather_object": lambda: comm.all_gather_object(birth, **more),
        "gather_object": lambda: comm.gather_object(birth, root, **more),
    }
    return made[verb]()


class Place(NamedTuple):
    """Position of a call in a program.

    Attributes:
        birth: uid of the rank.
        views: uids of the ranks of the step.
        step: its number.
        number: of the call in it.
    """

    birth: int
    views: tuple[int, ...]
    step: int
    number: int


def expected(place: Place, call: tuple[str, int, int], contributors: tuple[int, ...]) -> Any:
    """Expected result of a call on one rank, in the form of `as_plain`."""
    verb, elements, root = call
    from_root = place.views[root % len(place.views)]

    def of(birth: int) -> Any:
        return given(birth, place.step, place.number, elements)

    def at_root(value: Callable[[], Any]) -> Any:
        return value() if place.birth == from_root else None

    rows: Any = [of(birth) for birth in contributors]
    made: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: sum(rows),
        "in_place": lambda: sum(rows),
        "all_reduce_many": lambda: {"a": sum(rows), "b": sum(rows)[:1]},
        "broadcast": lambda: of(from_root),
        "all_gather": lambda: np.stack([one[:9] for one in rows]),
        "concat": lambda: np.concatenate([of(birth)[: 1 + birth] for birth in contributors]),
        "barrier": lambda: None,
        "consensus": lambda: True,
        "reduce": lambda: at_root(lambda: sum(rows)),
        "gather": lambda: at_root(lambda: np.stack([one[:9] for one in rows])),
        "scatter": lambda: of(from_root)[:2],
        "reduce_scatter": lambda: sum(rows)[:2],
        "all_to_all": lambda: [one[:2] for one in rows],
        "broadcast_object": lambda: [from_root, place.step],
        "all_gather_object": lambda: list(contributors),
        "gather_object": lambda: at_root(lambda: list(contributors)),
    }
    return as_plain(made[verb]())


def as_plain(value: Any) -> Any:
    """A result as something that can be compared and kept."""
    if isinstance(value, np.ndarray):
        return ("array", value.shape, value.reshape(-1)[:3].tolist(), float(value.sum()))
    if isinstance(value, dict):
        return {key: as_plain(one) for key, one in value.items()}
    return [as_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


class Training:
    """One rank's way through a program.

    Attributes:
        got: by step and number of the call.
        used: what the world trained on in each step.
        void: steps that came to nothing on this rank, since ranks were lost.
    """

    def __init__(self, comm: Any, birth: int, plan: Plan, random: Random) -> None:
        self.comm = ElasticCommunicator(comm)
        self.birth = birth
        self.got: dict[tuple[int, int], Got] = {}
        self.used: dict[int, Any] = {}
        self.views: dict[int, tuple[int, ...]] = {}
        self.void: set[int] = set()
        self.final: Any = None
        self._plan = plan
        self._random = random

    async def run(self) -> None:
        """Train for one pass."""
        comm = self.comm
        state = State(total=np.zeros(self._plan.length), steps=self.birth)
        on_loss = self._plan.on_loss
        async with Elastic(comm, state, on_loss=on_loss) as elastic:
            async for step in elastic.steps(ElasticSampler(self._plan.length, BATCH, seed=3), used_in="used"):
                self.views[step.number] = comm.births
                if on_loss == "finish":
                    await self._step(state, step)
                    continue
                with step if on_loss == "restart_step" else contextlib.suppress(EpochChanged):
                    self.void.add(step.number)
                    if on_loss == "restart_step":
                        state.total += 1  # undone, unless the step is
                    await self._step(state, step)
                    if on_loss == "restart_step":
                        state.total -= 1
                    self.void.discard(step.number)
        if not elastic.is_released:
            self.final = (state.total.copy(), comm.births)

    async def _step(self, state: State, step: Any) -> None:
        calls = list(enumerate(self._plan.steps[step.number % len(self._plan.steps)]))
        # who waits before it has begun everything has to begin it in the order of all others
        waits = Random(step.number).random() < 0.5
        (Random(step.number) if waits else self._random).shuffle(calls)
        place = (Random(step.number) if waits else self._random).randrange(len(calls) + 1)
        handles = []
        for at, (number, call) in enumerate([*calls[:place], (-1, ("used", 0, 0)), *calls[place:]]):
            if number < 0:
                mask = np.zeros(self._plan.length)
                mask[step.indices] = 1
                handle = self.comm.all_reduce(mask, "used")
            else:
                handle = begin(self.comm, self.birth, step.number, number, call)
            handles.append((number, handle))
            if waits and self._random.random() < 0.4:
                await self._note(step.number, handles.pop(self._random.randrange(len(handles))))
            if at % 2 and self._random.random() < 0.3:
                await asyncio.sleep(0)
        for one in handles:
            await self._note(step.number, one)
        state.total += self.used[step.number]
        state.steps += 1

    async def _note(self, step: int, begun: tuple[int, Any]) -> None:
        number, handle = begun
        try:
            value = await handle
        except KfcommError as error:
            self.got[step, number] = Got(type(error).__name__, None, None)
            if number < 0 or (self._plan.on_loss == "restart_step" and isinstance(error, EpochChanged)):
                raise
            return
        if number < 0:
            self.used[step] = value.copy()
        self.got[step, number] = Got("ok", as_plain(value), handle.contributors)


class Stage:
    """The world of a program, and what befalls it.

    Attributes:
        trainings: by uid.
        dead: uids of the killed ranks.
    """

    def __init__(self, seed: int, plan: Plan, transport: Any) -> None:
        self._seed = seed
        self._plan = plan
        self._world = MemoryWorld(plan.size, transport=transport, timeout=HANG_S)
        self.trainings: dict[int, Training] = {}
        self.dead: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        for comm in list(self._world):
            self._enter(comm, comm.rank)
        events = [(self._kill, plan.deaths), (self._join, plan.joins), (self._ask, plan.sizes)]
        self._others = [asyncio.create_task(what(*one)) for what, each in events for one in each]

    def _enter(self, comm: Any, birth: int) -> None:
        self.trainings[birth] = one = Training(comm, birth, self._plan, Random(self._seed + birth))
        self._tasks[birth] = asyncio.create_task(one.run())

    async def _after(self, turns: int) -> bool:
        """Whether training goes on after so many turns of the loop."""
        for _ in range(turns):
            await asyncio.sleep(0)
        return not any(task.done() for birth, task in self._tasks.items() if birth not in self.dead)

    async def _kill(self, victim: int, turns: int) -> None:
        if await self._after(turns) and self.trainings[victim].comm.size > 1:
            self.dead.add(victim)
            self._world.kill(victim)
            self._tasks[victim].cancel()

    async def _join(self, birth: int, turns: int) -> None:
        if await self._after(turns):
            self._enter(await self._world.join(birth), birth)

    async def _ask(self, size: int, turns: int) -> None:
        if await self._after(turns):
            await self._world[0]._session.network.membership.want_size(size)

    async def finish(self) -> None:
        """Wait for the end of all surviving ranks.

        Raises:
            AssertionError: one ended with an error.
        """
        waited: set[int] = set()
        while left := set(self._tasks) - waited:
            birth = min(left)
            waited.add(birth)
            try:
                await asyncio.wait_for(asyncio.shield(self._tasks[birth]), 2 * HANG_S)
            except asyncio.CancelledError:
                assert birth in self.dead
            except Exception as error:
                if birth not in self.dead:
                    raise AssertionError(f"seed {self._seed}: rank {birth} ended with {error!r}") from error

    async def close(self) -> None:
        """Leave nothing behind."""
        tasks = [*self._others, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.trainings.values():
            with contextlib.suppress(Exception):
                await one.comm.end()
        await self._world.close()
        # an event may come too late for this world; any other error would mean that none of its kind happens
        for error in ends[: len(self._others)]:
            if isinstance(error, Exception) and not isinstance(error, KfcommError):
                raise error


async def run(
    seed: int, transport: Any = "memory", deaths: int | None = None, *, grows: bool = False, on_loss: str = "finish"
) -> list[Training]:
    """Run the program of a seed and check what came of it; the ranks that lived.

    Raises:
        AssertionError: something is not true that has to be.
    """
    plan = plan_of(seed, deaths, grows=grows, on_loss=on_loss)
    stage = Stage(seed, plan, transport)
    try:
        await stage.finish()
    finally:
        await stage.close()
    living = [one for birth, one in stage.trainings.items() if birth not in stage.dead]
    check(seed, plan, living)
    return living


def check(seed: int, plan: Plan, living: list[Any], ended: Callable[[int, int], bool] = lambda *_: False) -> None:
    """One story for all who lived; results of what was given; each sample once.

    ``ended``: whether a call of a step, by its number, was ended by one rank: others may have been done by then.
    """
    whole = [one for one in living if one.final is not None]
    first = next((one for one in whole if one.birth < plan.size), None)
    if first is None:  # those that began are all gone: who came later cannot tell what was before
        return
    for one in living:
        seen = range(min(one.views), 1 + max(one.views)) if one.views else ()
        steps = {step: births for step, births in first.views.items() if step in seen}
        assert one.views == steps, f"seed {seed}: unlike ranks in the steps"
        complete = steps.keys() - one.void - first.void
        keys, others = ({key for key in got if key[0] in complete} for got in (one.got, first.got))
        assert keys == others, f"seed {seed}: unlike calls"
        for (step, number), got in one.got.items():
            if got.how == "ok":
                call = ("used", 0, 0) if number < 0 else plan.steps[step % len(plan.steps)][number]
                place = Place(one.birth, one.views[step], step, number)
                wanted = got.value if number < 0 else expected(place, call, got.contributors or ())
                assert got.value == wanted, f"seed {seed}, {place}, {call[0]}: {got}, expected {wanted}"
    for one in whole:
        assert (one.final[0] == first.final[0]).all(), f"seed {seed}: unlike states"
        assert one.final[1] == first.final[1], f"seed {seed}: {one.final[1]} and {first.final[1]} at the end"
    for (step, number), got in first.got.items():
        verb, _, _ = ("used", 0, 0) if number < 0 else plan.steps[step % len(plan.steps)][number]
        where = f"seed {seed}, step {step}, {verb}/{number}"
        there = [one for one in living if (step, number) in one.got]
        for one in there:
            other = one.got[step, number]
            if "ok" in (other.how, got.how) and not ended(step, number):
                assert other.how == got.how, f"{where}: {other} on {one.birth}, {got} on {first.birth}"
                assert other.contributors == got.contributors, f"{where}: contributors {other} and {got}"
    assert (first.final[0] == 1).all(), f"seed {seed}: samples used {first.final[0]}"

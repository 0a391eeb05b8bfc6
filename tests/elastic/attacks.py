"""Training as in `programs`, while ranks end calls in its steps: they cancel, refuse, are late, or time out.

A call that one rank ends fails on every rank where it has not finished, and the job continues: all other calls, the
ranks of each step and the samples are unchanged. Names are of a different subclass of ``str`` on each rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import CollectiveAborted, CollectiveTimeout, ConfigError, EpochChanged, KfcommError
from tests.elastic import programs

HOWS = ("cancel", "cancel", "wait_for", "timeout", "task", "group", "late", "refuse")
DELAYS_S = (0.0, 0.0, 1e-4, 1e-3, 2e-3, 5e-3, 0.05)
LATE_S = 0.02
"""Timeout of a call to which one rank comes later."""
USED = "used"
CANCELLED = "CancelledError"


class Text(str):
    """A subclass without more."""

    __slots__ = ()


def named(random: Random, name: str) -> Any:
    """The same name, of a type of chance."""
    made: list[Callable[[], Any]] = [
        lambda: name,
        lambda: Text(name),
        lambda: np.str_(name),
        lambda: enum.StrEnum("Name", {"ONE": name})["ONE"],
        lambda: enum.Enum("Mixed", {"ONE": name}, type=str)["ONE"],
    ]
    return random.choice(made)()


class Attack(NamedTuple):
    """How one rank ends a call.

    Attributes:
        birth: uid of the rank that ends the call.
        how: one of ``HOWS``.
        delay_s: after its begin.
    """

    birth: int
    how: str
    delay_s: float


def attack_on(seed: int, plan: programs.Plan, step: int, number: int, births: tuple[int, ...]) -> Attack | None:
    """Attack on a call, known to all ranks; a call that decides about samples is only refused, so never done."""
    random = Random(f"{seed} {step} {number}")
    birth = random.choice(births)
    if number < 0:
        is_refused = random.random() < 0.15 and plan.on_loss == "finish" and step < 6
        return Attack(birth, "refuse", 0.0) if is_refused else None
    if random.random() < 0.6:
        return None
    return Attack(birth, random.choice(HOWS), random.choice(DELAYS_S))


def ended(seed: int, plan: programs.Plan, living: list[Any]) -> Callable[[int, int], bool]:
    """Says of a call whether it was attacked."""
    views = {step: births for one in living for step, births in one.views.items()}
    return lambda step, number: attack_on(seed, plan, step, number, views[step]) is not None


class Training:
    """One rank's way through a program that is attacked. See ``programs.Training`` for the attributes.

    Args:
        comm: elastic.
        plan: the program.
        seed: of the attacks.
    """

    def __init__(self, comm: Any, plan: programs.Plan, seed: int) -> None:
        self.comm = comm
        self.birth = comm.births[comm.rank]
        self.got: dict[tuple[int, int], programs.Got] = {}
        self.views: dict[int, tuple[int, ...]] = {}
        self.void: set[int] = set()
        self.final: Any = None
        self._plan = plan
        self._seed = seed
        self._random = Random(seed + self.birth)
        self._state = State(total=np.zeros(plan.length), steps=self.birth)

    async def run(self) -> None:
        """Train for one pass."""
        async with Elastic(self.comm, self._state, on_loss=self._plan.on_loss) as elastic:
            async for step in elastic.steps(self._sampler(), used_in=self._used_in()):
                with self._entered(step):
                    await self._step(step)
        if not elastic.is_released:
            self.final = (self._state.total.copy(), self.comm.births)

    def _sampler(self) -> ElasticSampler:
        return ElasticSampler(self._plan.length, programs.BATCH, seed=3)

    def _used_in(self) -> Any:
        used: Any = named(self._random, USED)
        return self._random.choice([used, [used], (used, USED)])

    @contextlib.contextmanager
    def _entered(self, step: Any) -> Any:
        self.views[step.number] = tuple(self.comm.births)
        self.void.add(step.number)
        with step if self._plan.on_loss == "restart_step" else contextlib.suppress(EpochChanged):
            yield
            self.void.discard(step.number)

    async def _step(self, step: Any) -> None:
        """Begin all calls, in an order of this rank's own, and wait for all of them, in another."""
        births = self.views[step.number]
        calls = [*enumerate(self._plan.steps[step.number % len(self._plan.steps)]), (-1, (USED, 0, 0))]
        attacks = {number: attack_on(self._seed, self._plan, step.number, number, births) for number, _ in calls}
        self._random.shuffle(calls)
        calls.sort(key=lambda one: self._is(attacks[one[0]], "late"))  # nobody else waits for that
        begun = []
        for number, call in calls:
            begun.append((number, await self._begin(step, number, call, attacks[number])))
            if self._random.random() < 0.2:
                await self.pause(0)
        self._random.shuffle(begun)
        total = None
        failure: BaseException | None = None
        for number, handle in begun:
            try:
                value = await self._outcome(step.number, number, handle, attacks[number])
            except EpochChanged as error:
                failure = error
                continue
            total = value if number < 0 else total
        if failure is not None:
            raise failure
        if total is not None:
            self._state.total += total
            self._state.steps += 1

    def _is(self, attack: Attack | None, how: str) -> bool:
        return attack is not None and attack.birth == self.birth and attack.how == how

    async def _begin(self, step: Any, number: int, call: tuple[str, int, int], attack: Attack | None) -> Any:
        """Its handle, or the error that it raises at once."""
        more: dict[str, Any] = {}
        if attack is not None and attack.how == "late":
            more["timeout"] = LATE_S
        if self._is(attack, "late"):
            await self.pause(3 * LATE_S)
        if self._is(attack, "refuse"):
            more["timeout"] = -1
        name = named(self._random, USED if number < 0 else f"{call[0]}/{number}")
        try:
            if number < 0:
                mask = np.zeros(self._plan.length)
                mask[step.indices] = 1
                return self.begun("all_reduce", mask, name, **more)
            if call[0] == "all_reduce_many" and number % 2:  # by the names of its arrays
                x = programs.given(self.birth, step.number, number, call[1])
                of = named(self._random, f"{call[0]}/{number}/a"), named(self._random, f"{call[0]}/{number}/b")
                handle = self.begun("all_reduce_many", {of[0]: x, of[1]: x[:1]}, **more)
            else:
                handle = programs.begin(self, self.birth, step.number, number, call, name=name, **more)
        except KfcommError as error:
            return error
        if attack is not None and self._is(attack, "cancel"):
            self.cancel_after(attack.delay_s, handle)
        return handle

    async def _outcome(self, step: int, number: int, handle: Any, attack: Attack | None) -> Any:
        """The result, noted; None if it has failed.

        Raises:
            EpochChanged: the step is void.
        """
        try:
            if isinstance(handle, BaseException):
                raise handle
            value = await self.waited(handle, attack if attack is not None and attack.birth == self.birth else None)
        except (KfcommError, TimeoutError, *self.cancellations) as error:
            if self.is_ending(error):
                raise
            how = CANCELLED if isinstance(error, self.cancellations) else type(error).__name__
            self.got[step, number] = programs.Got(how, None, None)
            if not self._is_due(error, attack):
                raise AssertionError(f"rank {self.birth}, step {step}, call {number}, {attack}: {error!r}") from error
            if isinstance(error, EpochChanged) and (number < 0 or self._plan.on_loss == "restart_step"):
                raise
            return None
        plain = programs.as_plain(value)
        if isinstance(plain, dict):
            plain = {str.__str__(key)[-1]: one for key, one in plain.items()}
        self.got[step, number] = programs.Got("ok", plain, handle.contributors)
        return value.copy() if number < 0 else None

    def _is_due(self, error: BaseException, attack: Attack | None) -> bool:
        """Only what was ended ends so."""
        if isinstance(error, CollectiveTimeout):
            return attack is not None and attack.how == "late"
        return attack is not None or not isinstance(error, (CollectiveAborted, ConfigError, *self.cancellations))

    # ---------------------------------------------------------------- asyncio; another one for programs without it

    cancellations: tuple[type[BaseException], ...] = (asyncio.CancelledError,)

    def __getattr__(self, verb: str) -> Any:
        """For ``programs.begin``: the communicator, whose verbs return handles."""
        if verb in programs.BEGUN:
            return lambda *args, **more: self.begun(verb, *args, **more)
        if verb.startswith("_"):
            raise AttributeError(verb)
        return getattr(self.comm, verb)

    def begun(self, verb: str, *args: Any, **more: Any) -> Any:
        """The handle of a call."""
        return getattr(self.comm, verb)(*args, **more)

    async def pause(self, seconds: float) -> None:
        """Let others go on."""
        await asyncio.sleep(seconds)

    def cancel_after(self, seconds: float, handle: Any) -> None:
        """Cancel it, now or later."""
        if seconds:
            asyncio.get_running_loop().call_later(seconds, handle.cancel)
        else:
            handle.cancel()

    def is_ending(self, error: BaseException) -> bool:
        """Whether it is this rank that is killed."""
        task = asyncio.current_task()
        return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0

    async def waited(self, handle: Any, attack: Attack | None) -> Any:
        """The result; ``attack``: by this rank."""
        if attack is None or attack.how in ("cancel", "late", "refuse"):
            return await handle
        if attack.how == "wait_for":
            return await asyncio.wait_for(handle, attack.delay_s)
        if attack.how == "timeout":
            async with asyncio.timeout(attack.delay_s):
                return await handle
        if attack.how == "task":
            task = asyncio.ensure_future(_of(handle))
            asyncio.get_running_loop().call_later(attack.delay_s, task.cancel)
            return await task
        return await asyncio.ensure_future(_in_group(handle, attack.delay_s))


async def _of(handle: Any) -> Any:
    return await handle


async def _in_group(handle: Any, delay_s: float) -> Any:
    """Await it in a group of tasks in which another one fails."""

    async def fail() -> None:
        await asyncio.sleep(delay_s)
        raise TimeoutError

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_of(handle))
            group.create_task(fail())
    return waiting.result()


def at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run what never waits for a loop."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise AssertionError("it waits for a loop")

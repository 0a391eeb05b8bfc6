"""Programs for virtual time, and their checks after any events.

Ranks that were never cut off, and that are more than half of all, finish with the same history; ranks that were cut off
for long get an error that says so. No rank hangs: a call that ends by its timeout is a defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

from kfcomm.elastic import ElasticCommunicator
from kfcomm.errors import CollectiveTimeout, EpochChanged, KfcommError, Partitioned, PeerLost, SessionClosed
from kfcomm.testing import Join, Kill, Partition, Release, Resize, Stop, VirtualRun, random_events
from kfcomm.testing.virtual.events import Event
from kfcomm.testing.virtual.network import side_of
from tests.elastic import attacks, programs
from tests.elastic.turns import Turns
from tests.programs import generator
from tests.programs.walker import run_awaiting

LOST_AFTER_S = 1.0
SIZES = (2, 2, 3, 3, 3, 4, 5)
STRATEGIES = ("star", "ring", "binary_tree", "clique", "binomial", "chain_star", "tree", "multi_star", "direct")
ELEMENTS = (1, 7, 300, 300, 3000)
LARGE, LARGE_SHARE = 70_000, 0.01
TOLD_OF_LOSS = ("PeerLost", "SessionClosed", "CollectiveError", "CollectiveAborted")
ON_LOSS = ("finish", "finish", "raise", "restart_step")


class Case(Protocol):
    """A program and its events.

    Attributes:
        size: number of ranks in the beginning.
        strategy: of the world.
    """

    size: int
    strategy: str

    def events(self, random: Random) -> Sequence[Event]:
        """Events."""

    async def main(self, comm: Any) -> Any:
        """Program of one rank."""

    def check(self, run: VirtualRun) -> None:
        """Raise ``AssertionError`` if an outcome is wrong."""


def check_ends(run: VirtualRun, size: int) -> None:
    """Failed ranks were told why, and all ranks that had to succeed have."""
    # a program that ends by an error waits for none of its other calls, and is told so
    assert run.failed or not run.unheard, f"unheard errors: {run.unheard}"
    well = ending_well(run.events, size)
    for rank, error in run.failed.items():
        is_told = isinstance(error, (PeerLost, EpochChanged, Partitioned, SessionClosed))
        if rank in well or not is_told:
            raise AssertionError(f"rank {rank} ended with {error!r}") from error


def ending_well(events: Sequence[Event], size: int) -> set[int]:
    """The majority of the ranks, if they were never cut off: they have to finish, unless killed."""
    if any(isinstance(one, (Join, Release, Resize)) for one in events):
        return set()  # who was more than half then?
    cuts = [one for one in events if isinstance(one, (Stop, Partition)) and one.for_s > LOST_AFTER_S]
    killed = {one.rank for one in events if isinstance(one, Kill)}
    together: dict[tuple[int, ...], set[int]] = {}
    for rank in range(size):
        if not any(isinstance(one, Stop) and one.rank == rank for one in cuts):
            sides = tuple(side_of(one, rank) for one in cuts if isinstance(one, Partition))
            together.setdefault(sides, set()).add(rank)
    most = max(together.values(), key=len, default=set())
    return most if not cuts or 2 * len(most - killed) > size else set()


def draw_call(random: Random, size: int) -> tuple[str, int, int]:
    """A verb, its number of elements, and a root."""
    elements = LARGE if random.random() < LARGE_SHARE else random.choice(ELEMENTS)
    return random.choice(programs.VERBS), elements, random.randrange(size)


class Training:
    """Elastic training, by all three ways to take a loss."""

    def __init__(self, random: Random) -> None:
        self.size = random.choice(SIZES)
        self.strategy = random.choice(STRATEGIES)
        self._seed = random.randrange(1 << 31)
        steps = [[draw_call(random, self.size) for _ in range(random.randrange(3))] for _ in range(5)]
        length = programs.BATCH * random.randrange(1, 5)
        self._plan = programs.Plan(self.size, steps, [], [], [], random.choice(ON_LOSS), length)

    def events(self, random: Random) -> Sequence[Event]:
        return random_events(random, self.size, horizon_s=0.05, elastic=random.random() < 0.6)

    async def main(self, comm: Any) -> Any:
        birth = comm.births[comm.rank]
        one = programs.Training(comm, birth, self._plan, Random(self._seed + birth))
        await one.run()
        return one

    def check(self, run: VirtualRun) -> None:
        """All ranks that finished have one history: see `programs.check`."""
        whole = [one for one in run.results.values() if isinstance(one, programs.Training)]
        for one in whole:
            for (step, number), got in one.got.items():
                assert got.how != "CollectiveTimeout", f"rank {one.birth}: call {number} of step {step} hung"
        programs.check(self._seed, self._plan, whole)
        check_ends(run, self.size)


class LongTraining(Training):
    """The same with more steps, whose boundaries are announced: deaths meet ranks that are a step apart."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        verbs = [verb for verb in programs.VERBS if not verb.endswith("_object")]
        steps = [
            [(random.choice(verbs), random.choice(ELEMENTS[:2]), random.randrange(self.size)) for _ in range(count)]
            for count in random.choices(range(4), k=12)
        ]
        on_loss, length = random.choice(["finish", "raise"]), programs.BATCH * random.randrange(6, 13)
        self._plan = self._plan._replace(steps=steps, on_loss=on_loss, length=length)


class TwoSamplers:
    """Training and validation, in turns or one within a step of the other."""

    def __init__(self, random: Random) -> None:
        self.size = random.choice(SIZES)
        self.strategy = random.choice(STRATEGIES)
        self._turns = Turns(random)

    def events(self, random: Random) -> Sequence[Event]:
        return random_events(random, self.size, horizon_s=0.15, elastic=random.random() < 0.6)

    async def main(self, comm: Any) -> Any:
        return await self._turns.run(comm)

    def check(self, run: VirtualRun) -> None:
        """Check that each sample was used once in each pass."""
        # who came later cannot tell what was before, if those that began are all gone
        if any(isinstance(run.results.get(rank), dict) for rank in range(self.size)):
            self._turns.check([one for one in run.results.values() if isinstance(one, dict)])
        check_ends(run, self.size)


class Attacked(Training):
    """The same, while ranks cancel calls of every verb, refuse them, are late and time out."""

    async def main(self, comm: Any) -> Any:
        one = attacks.Training(ElasticCommunicator(comm), self._plan, self._seed)
        await one.run()
        return one

    def check(self, run: VirtualRun) -> None:
        """Check that all ranks that ended agree; calls that one rank ended may be done on some others."""
        whole = [one for one in run.results.values() if isinstance(one, attacks.Training)]
        programs.check(self._seed, self._plan, whole, attacks.ended(self._seed, self._plan, whole))
        check_ends(run, self.size)


class Round(NamedTuple):
    """One round of a rank: the epoch's members, what each call gave, and what all agreed on."""

    births: tuple[int, ...]
    got: dict[int, programs.Got]
    agreed: bool


class Shrinking:
    """Verbs in random orders; after each round the ranks agree whether all have all, and shrink if not."""

    def __init__(self, random: Random) -> None:
        self.size = random.choice(SIZES)
        self.strategy = random.choice(STRATEGIES)
        self._seed = random.randrange(1 << 31)
        self._rounds = [[draw_call(random, self.size) for _ in range(random.randrange(1, 4))] for _ in range(3)]

    def events(self, random: Random) -> Sequence[Event]:
        return random_events(random, self.size, horizon_s=0.03)

    async def main(self, comm: Any) -> list[Round]:
        me = comm.rank
        random, rounds = Random(self._seed + me), []
        for number, calls in enumerate(self._rounds):
            order = list(enumerate(calls))
            random.shuffle(order)
            begun = {at: programs.begin(comm, me, number, at, call) for at, call in order}
            got = {at: await _got(begun[at]) for at, _ in order}
            agreed = await comm.agree(all(one.how == "ok" for one in got.values()))
            rounds.append(Round(comm.births, got, agreed))
            if not agreed:
                comm = await comm.shrink()
        return rounds

    def check(self, run: VirtualRun) -> None:
        """All ranks that finished took the same steps, with right results."""
        check_ends(run, self.size)
        ended = {rank: rounds for rank, rounds in run.results.items() if isinstance(rounds, list)}
        ways = {tuple((one.births, one.agreed) for one in rounds) for rounds in ended.values()}
        assert len(ways) <= 1, f"unlike ways: {ways}"
        for rank, rounds in ended.items():
            for number, one in enumerate(rounds):
                for at, got in one.got.items():
                    where = f"rank {rank}, round {number}, call {at}: {got}"
                    assert got.how != CollectiveTimeout.__name__, where
                    assert not one.agreed or got.how == "ok", where
                    verb, _, root = self._rounds[number][at]
                    if got.how == "ok" and verb in ("all_reduce", "in_place"):
                        given = sum(programs.given(birth, number, at, 1)[0] for birth in one.births)
                        assert got.value[2][0] == given, where
                    elif got.how == "ok" and verb == "broadcast":
                        birth = one.births[root % len(one.births)]
                        assert got.value[2][0] == programs.given(birth, number, at, 1)[0], where


async def _got(handle: Any) -> programs.Got:
    try:
        return programs.Got("ok", programs.as_plain(await handle), None)
    except KfcommError as error:
        return programs.Got(type(error).__name__, None, None)


class Walking:
    """A right program of all verbs, groups, messages and swaps without losses: all results are right."""

    def __init__(self, random: Random) -> None:
        self.size = random.choice(SIZES)
        self.strategy = random.choice(STRATEGIES)
        self._program = generator.program(random.randrange(1 << 31), random.choice([5, 10]), self.size)

    def events(self, random: Random) -> Sequence[Event]:
        found = random_events(random, self.size, horizon_s=0.03)
        return [one for one in found if not isinstance(one, Kill) and getattr(one, "for_s", 0) < LOST_AFTER_S]

    async def main(self, comm: Any) -> Any:
        return await run_awaiting(comm, self._program)

    def check(self, run: VirtualRun) -> None:
        """No rank has found anything wrong."""
        assert not run.unheard, f"unheard errors: {run.unheard}"
        assert run.results == dict.fromkeys(range(self.size)), str(run.results)


class Losing(Walking):
    """Such a program while ranks are lost: each ends, with right results up to an error that says what happened."""

    def events(self, random: Random) -> Sequence[Event]:
        return random_events(random, self.size, horizon_s=0.03)

    def check(self, run: VirtualRun) -> None:
        """A rank that stopped before the end was told of a loss, by the program or at the end of the world."""
        assert not run.unheard, f"unheard errors: {run.unheard}"
        for rank, report in run.results.items():
            if report is not None:
                told = "" if isinstance(report, BaseException) else report.text.partition(":")[0]
                # what may come from anybody is waited for as long as anybody is left
                is_from_any = told == CollectiveTimeout.__name__ and " came from any rank (rank " in report.text
                is_told = told in TOLD_OF_LOSS or is_from_any
                assert is_told, f"rank {rank}: {report}"


CASES = (
    Training, Training, LongTraining, LongTraining, Attacked, Attacked, Attacked, TwoSamplers, TwoSamplers, Shrinking,
    Shrinking, Walking, Losing,
)  # fmt: skip

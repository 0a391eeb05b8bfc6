"""``auto`` improves itself while a program makes its calls, in any order, and leaves no trace where it may not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.adapt import Adaptation, AutoStrategy
from kfcomm.errors import CollectiveAborted, CollectiveError, EpochChanged, PeerLost, SessionClosed
from kfcomm.testing import Kill, Stop, run_in_virtual_time, run_threads, sync_world
from kfcomm.types import Layout, Rates
from kfcomm.world import links
from tests.collectives.mixed_programs import MixedProgram
from tests.conformance.worlds import everywhere, turns, until, world

UNLIKE = (50e6, 50e6, 50e6, 12.5e6, 6e6)


def rates_of(ports: tuple[float, ...]) -> Rates:
    rows = tuple(tuple(min(a, b) for b in ports) for a in ports)
    latencies = tuple(tuple(0.0 if a == b else 1e-4 for b in range(len(ports))) for a in range(len(ports)))
    return Rates(ports, ports, rows, latencies)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Begins at once, and finds these rates, after some turns."""

    def begin(ports: tuple[float, ...] = UNLIKE, wait: Callable[[], int] = lambda: 3, **pace: Any) -> None:
        async def run(prober: links.LinkProber, _within_s: float) -> Rates | None:
            await turns(wait())
            is_master = prober._group.view.rank in prober._group.layout.masters
            return rates_of(ports[: prober._group.layout.num_hosts]) if is_master else None

        monkeypatch.setattr(links.LinkProber, "run", run)
        monkeypatch.setattr(
            links, "PACE", replace(links.PACE, **{"tick_s": 1e-4, "least_uses": 1, "share": 1e9} | pace)
        )

    return begin


@lru_cache
def improved(layout: Layout) -> bytes:
    """Digest of what ``auto`` is once the links are known."""
    costs = layout.costs._replace(rates=rates_of(UNLIKE[: layout.num_hosts]))
    return strategies.build("auto", replace(layout, costs=costs)).digest


def is_improved(comm: Any) -> bool:
    return bool(comm.strategy.digest == improved(comm.layout))


async def work(comm: Any, is_over: Callable[[], bool], length: int = 100_000) -> int:
    """Sums, until all ranks find it over; returns how many."""
    count = 0
    while True:
        count += 1
        ends = await comm.all_reduce([float(is_over())], "over", op="min")
        total = await comm.all_reduce(np.full(length, comm.rank + 1.0), "x")
        assert total[0] == total[-1] == comm.size * (comm.size + 1) / 2
        if ends[0]:
            return count


@pytest.mark.asyncio
@pytest.mark.parametrize("per_host", [1, 2])
async def test_unlike_hosts_get_graphs_that_fit_them(hasty: Any, per_host: int, caplog: Any) -> None:
    hasty()
    caplog.set_level("INFO", "kfcomm")
    async with world(5 * per_host, hosts=5) as comms:
        before = comms[0].strategy.digest
        await everywhere(comms, lambda comm: work(comm, lambda: is_improved(comm)))
        assert before != comms[0].strategy.digest
        assert {comm.strategy.name for comm in comms} == {"auto"}
        await everywhere(comms, lambda comm: work(comm, lambda: True))
    (line,) = [one.getMessage() for one in caplog.records if "changes its graphs" in one.getMessage()]
    assert "6 MB/s from host" in line
    assert "times as fast" in line


@pytest.mark.asyncio
async def test_hosts_that_are_alike_keep_their_graphs(hasty: Any, caplog: Any) -> None:
    hasty((50e6,) * 4)
    caplog.set_level("INFO", "kfcomm")
    async with world(4, hosts=4) as comms:
        before = comms[0].strategy.digest
        await everywhere(comms, lambda comm: work(comm, lambda: "keeps its graphs" in caplog.text))
        assert {comm.strategy.digest for comm in comms} == {before}


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(8))
async def test_random_programs_while_auto_improves_itself(hasty: Any, seed: int) -> None:
    shared = random.Random(seed)
    hosts, per_host = shared.randint(2, 5), shared.randint(1, 2)
    size = hosts * per_host
    hasty(
        wait=lambda: shared.randrange(40),
        tick_s=shared.choice([1e-4, 1e-3, 5e-3]),
        least_uses=shared.randint(1, 40),
        worth=0.0,
    )
    program = MixedProgram(seed, size, most_uses=20)
    async with world(size, hosts=hosts) as comms:
        mine = [random.Random(100 * seed + rank) for rank in range(size)]
        results = await asyncio.gather(*(program.run(comm, mine[comm.rank]) for comm in comms))
        program.check(results)
        await everywhere(comms, lambda comm: work(comm, lambda: is_improved(comm), 100))


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(8))
async def test_strategy_that_the_program_sets_stays(hasty: Any, seed: int) -> None:
    shared = random.Random(seed)
    hasty(wait=lambda: shared.randrange(20), tick_s=1e-3, worth=0.0)
    async with world(4, hosts=4) as comms:

        async def main(comm: Any) -> None:
            local = random.Random(seed)
            await work_times(comm, local.randrange(1, 12))
            setting = comm.set_strategy("ring")
            await work_times(comm, 5)
            await setting
            await work_times(comm, 20)

        await everywhere(comms, main)
        assert {comm.strategy.name for comm in comms} == {"ring"}


async def work_times(comm: Any, times: int) -> None:
    for _ in range(times):
        total = await comm.all_reduce(np.full(1000, comm.rank + 1.0), "x")
        assert total[0] == comm.size * (comm.size + 1) / 2
        await asyncio.sleep(1e-3)


@pytest.mark.asyncio
async def test_policies_that_set_strategies_end_it(hasty: Any) -> None:
    hasty(worth=0.0, tick_s=5e-3)
    async with world(3, hosts=3) as comms:

        async def main(comm: Any) -> None:
            async with Adaptation(comm, [AutoStrategy(["auto", "ring"], steps=3, rounds=1, rest=1000)]) as adaptation:
                for _ in range(12):
                    async with adaptation.step():
                        await work_times(comm, 3)

        await everywhere(comms, main)
        assert not any(map(is_improved, comms))


@pytest.mark.asyncio
@pytest.mark.parametrize("spec", ["auto:static", "ring", {"<=64KiB": "star", "else": "auto"}])
async def test_other_strategies_do_not_improve_themselves(hasty: Any, spec: Any) -> None:
    hasty(worth=0.0)
    async with world(3, hosts=3, strategy=spec) as comms:
        before = comms[0].strategy
        await everywhere(comms, lambda comm: work_times(comm, 20))
        assert {comm.strategy.digest for comm in comms} == {before.digest}
        assert comms[0].strategy.name == before.name


@pytest.mark.asyncio
async def test_static_auto_has_the_graphs_of_auto() -> None:
    async with world(4, hosts=2, strategy="auto:static") as comms:
        assert comms[0].strategy.name == "auto:static"
        assert comms[0].strategy.digest == strategies.build("auto", comms[0].layout).digest
        group, *_ = await everywhere(comms, lambda comm: comm.group(range(4), "same"))
        assert group.strategy.name == "auto:static"


def test_one_host_imports_nothing_of_it() -> None:
    code = (
        "import asyncio, sys\n"
        "from kfcomm import testing\n"
        "async def main():\n"
        "    async with testing.world(2) as comms:\n"
        "        await asyncio.gather(*(comm.all_reduce([1.0], 'x') for comm in comms))\n"
        "asyncio.run(main())\n"
        "names = ('kfcomm.world.improving', 'kfcomm.world.directed', 'kfcomm.world.links', 'kfcomm.probe')\n"
        "assert not set(names) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.asyncio
async def test_rank_that_does_not_answer_holds_the_others_up_for_a_moment_only(hasty: Any, monkeypatch: Any) -> None:
    """It is late once; nothing changes then, and all goes on; the next time it answers."""
    hasty(worth=0.0, within_s=0.5)
    async with world(3, hosts=3, aborted=True) as comms:
        late = comms[2]._group
        hold, calls = late.hold, []

        def once() -> Any:
            calls.append(late)
            return hold()

        monkeypatch.setattr(late, "hold", once)
        served = comms[2]._improvement._answer

        async def slow(number: int, kind: str, content: Any) -> None:
            if kind == "change" and number < 8:
                await asyncio.sleep(1.0)
            await served(number, kind, content)

        comms[2]._improvement._directed._served = slow
        await everywhere(comms, lambda comm: work(comm, lambda: is_improved(comm), 100))
        assert len(calls) >= 3


@pytest.mark.asyncio
async def test_answers_may_take_as_long_as_calls(hasty: Any) -> None:
    """On slow links an answer comes behind the data of calls."""
    hasty(worth=0.0, within_s=0.01, most_times=1, least_uses=3, tick_s=1e-3)
    async with world(3, hosts=3) as comms:
        served = comms[2]._improvement._answer

        async def late(number: int, kind: str, content: Any) -> None:
            await asyncio.sleep(0.1)
            await served(number, kind, content)

        async def main(comm: Any) -> None:
            ends = np.zeros(1)
            while not ends[0]:
                if comm.rank == 2:
                    await asyncio.sleep(0.3)
                ends = await comm.all_reduce([float(is_improved(comm))], "x", op="min")

        comms[2]._improvement._directed._served = late
        await everywhere(comms, main)


@pytest.mark.asyncio
async def test_long_calls_count_in_full(hasty: Any) -> None:
    """Measuring is due after some tenths of a second of calls; each of these takes 40 looks at the clock."""
    hasty(worth=0.0, share=1.0, least_uses=3, tick_s=5e-3)
    count = 0
    async with world(3, hosts=3) as comms:

        async def main(comm: Any) -> None:
            nonlocal count
            ends = np.zeros(1)
            while not ends[0]:
                if comm.rank == 2:
                    count += 1
                    await asyncio.sleep(0.2)
                ends = await comm.all_reduce([float(is_improved(comm))], "x", op="min")

        await everywhere(comms, main)
    assert count < 20


@pytest.mark.asyncio
async def test_calls_that_are_held_can_be_cancelled_and_are_complete_after_a_close(hasty: Any) -> None:
    """The first rank closes during it: the others hear the outcome, and their calls end with it."""
    for seed in range(12):
        local = random.Random(seed)
        hasty(wait=lambda local=local: local.randrange(30), worth=0.0)
        async with world(3, hosts=3, quiet=False) as comms:
            ready = asyncio.gather(*(work_times(comm, 4) for comm in comms))
            await ready
            waits = [comm.all_reduce(np.ones(10), "y") for comm in comms]
            await turns(local.randrange(30))
            if seed % 2:
                waits[1].cancel()
            closer = comms[0 if seed % 3 else 2]
            await turns(local.randrange(10))
            await closer.close()
            for outcome in await asyncio.gather(*waits, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, (PeerLost, SessionClosed, CollectiveAborted, asyncio.CancelledError))
                else:
                    assert outcome[0] == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(6))
async def test_links_that_break_meanwhile_leave_the_ranks_in_step(hasty: Any, seed: int) -> None:
    shared = random.Random(seed)
    hasty(wait=lambda: shared.randrange(30), worth=0.0)
    async with world(3, hosts=3, quiet=False) as comms:
        over = asyncio.Event()

        async def main(comm: Any) -> None:
            while not over.is_set():
                with contextlib.suppress(CollectiveError):
                    await comm.all_reduce(np.ones(100), "x")
                await asyncio.sleep(0)

        programs = [asyncio.ensure_future(main(comm)) for comm in comms]
        for _ in range(4):
            await turns(shared.randrange(60))
            comms.unplug(shared.randrange(3))
        await until(
            lambda: len({comm.strategy.digest for comm in comms}) == 1 and not any(c._group.waits for c in comms)
        )
        over.set()
        for one in programs:
            one.cancel()
        await asyncio.gather(*programs, return_exceptions=True)


@pytest.mark.asyncio
async def test_sub_groups_improve_themselves_by_the_rates_of_the_world(hasty: Any) -> None:
    hasty(worth=0.0)
    async with world(10, hosts=5) as comms:
        await everywhere(comms, lambda comm: work(comm, lambda: is_improved(comm), 100))
        groups = await everywhere(comms[:6], lambda comm: comm.group([4, 2, 0, 1, 3, 5], "half"))
        await everywhere(groups, lambda group: work(group, lambda: group._group.plans.generation > 0, 100))
        part = groups[0].layout
        rates = rates_of(tuple(UNLIKE[host] for host in (2, 1, 0)))
        want = strategies.build("auto", replace(part, costs=part.costs._replace(rates=rates)))
        assert {group.strategy.digest for group in groups} == {want.digest}
        for group in groups:
            await group.close()


@pytest.mark.asyncio
async def test_next_epoch_begins_with_the_rates(hasty: Any) -> None:
    hasty(worth=0.0)
    async with world(5, hosts=5, quiet=False) as comms:
        await everywhere(comms, lambda comm: work(comm, lambda: is_improved(comm), 100))
        comms.kill(1)
        made = await everywhere([comms[0], *comms[2:]], lambda comm: comm.shrink())
        rates = rates_of(tuple(UNLIKE[host] for host in (0, 2, 3, 4)))
        assert {comm.layout.costs.rates for comm in made} == {rates}
        assert {comm.strategy.digest for comm in made} == {strategies.build("auto", made[0].layout).digest}
        assert all(comm._improvement is None for comm in made)
        await everywhere(made, lambda comm: work(comm, lambda: True, 100))


@pytest.mark.parametrize("seed", range(4))
def test_blocking_programs(hasty: Any, seed: int) -> None:
    hasty(worth=0.0, tick_s=2e-3)
    with sync_world(3, hosts=3) as comms:

        def main(comm: Any) -> int:
            local, kept = random.Random(seed), comm.all_reduce_init(np.ones(200), "kept")
            count = 0
            while True:
                count += 1
                ends = comm.all_reduce([float(is_improved(comm))], "over", op="min")
                assert comm.all_reduce(np.ones(200), "x")[0] == 3
                kept.start()
                assert kept.wait()[0] == 3
                handles = [comm.all_reduce_async(np.ones(200), f"y{number}") for number in range(3)]
                assert all(one.wait()[0] == 3 for one in local.sample(handles, 3))
                if ends[0]:
                    return count

        counts = run_threads(comms, main)
        assert len(set(counts)) == 1


async def _in_virtual_time(comm: Any) -> tuple[list[bytes], bytes]:
    """Uses of three names at virtual times of its own; what each gave."""
    local, given = random.Random(comm.rank), []

    async def uses(name: str) -> None:
        for seq in range(15):
            await asyncio.sleep(local.random() * 2e-2)
            given.append((name, seq, await comm.all_reduce(np.full(3000, (comm.rank + 1) / 3), name)))

    await asyncio.gather(*map(uses, "abc"))
    await asyncio.sleep(1.0)
    given.sort(key=lambda one: one[:2])
    return [one.tobytes() for *_, one in given], comm.strategy.digest


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_die_or_stop_meanwhile(hasty: Any, seed: int) -> None:
    """In virtual time: surviving ranks have the same results, or learn of the loss; none waits for ever."""
    local = random.Random(seed)
    hasty(worth=0.0, tick_s=5e-3, wait=lambda: local.randrange(20))
    victim, at_s = local.randrange(4), local.random() * 0.2
    event = Kill(at_s, victim) if seed % 3 else Stop(at_s, victim, 0.3)
    run = run_in_virtual_time(_in_virtual_time, 4, hosts=4, seed=seed, events=[event], timeout=20.0)
    whole = [one for one in run.results.values() if not isinstance(one, BaseException)]
    assert all(isinstance(one, (PeerLost, CollectiveError, EpochChanged)) for one in run.failed.values()), run.failed
    assert len({tuple(one[0]) for one in whole}) <= 1
    if seed % 3 == 0:
        assert len(whole) == 4
        assert len({one[1] for one in whole}) == 1
    assert not run.unheard


def test_virtual_runs_repeat_and_improve(hasty: Any) -> None:
    hasty(worth=0.0, tick_s=5e-3)
    first, second = (run_in_virtual_time(_in_virtual_time, 3, hosts=3, seed=5) for _ in range(2))
    assert first.digest == second.digest
    assert len({one[1] for one in first.results.values()}) == 1

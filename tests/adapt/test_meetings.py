"""Meetings: all ranks carry out the requests of all, and nothing else, and no policy can hang the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kfcomm.adapt import Adaptation, Context, Decision, Policy
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError, PeerLost
from kfcomm.world.communicator import Communicator
from tests.adapt.scripted import NBYTES, ScriptedMeter, adapted, steady, words
from tests.conformance.worlds import assert_kinds, ends, everywhere, turns, until, works, world

HOOKS = ["on_start", "before_step", "after_step"]


class Doing(Policy):
    """Does something at one step, in one of its methods."""

    def __init__(
        self, do: Callable[[Context], Any], at: int = 2, hook: str = "after_step", name: str = "Doing"
    ) -> None:
        self._do = do
        self._at = at
        self._name = name
        setattr(self, hook, self._call)

    @property
    def name(self) -> str:
        return self._name

    def _call(self, ctx: Context) -> Any:
        return self._do(ctx) if ctx.step == self._at else None


class Story(Policy):
    """Notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    async def on_start(self, ctx: Context) -> None:
        self.calls.append(("on_start", ctx.step))

    def before_step(self, ctx: Context) -> None:
        self.calls.append(("before_step", ctx.step))

    async def after_step(self, ctx: Context) -> None:
        assert ctx.metrics is not None
        assert ctx.metrics.step == ctx.step
        self.calls.append(("after_step", ctx.step))

    def on_end(self, ctx: Context) -> None:
        self.calls.append(("on_end", ctx.step))


def fails(ctx: Context) -> None:
    raise ValueError("oops")


@pytest.mark.asyncio
async def test_the_methods_in_order() -> None:
    stories: list[Story] = []
    await adapted(lambda comm: [stories.append(Story()) or stories[-1]], steps=2)  # type: ignore[func-returns-value]
    wanted = [("on_start", 0), ("before_step", 0), ("after_step", 0), ("before_step", 1), ("after_step", 1)]
    assert all(one.calls == [*wanted, ("on_end", 2)] for one in stories)


@pytest.mark.asyncio
async def test_with_every_the_ranks_meet_now_and_then() -> None:
    stories: list[Story] = []
    seen: list[Any] = []

    class Look(Story):
        def before_step(self, ctx: Context) -> None:
            super().before_step(ctx)
            if ctx.metrics:
                seen.append((ctx.metrics.nbytes, ctx.metrics.counts, ctx.metrics.seconds))

    await adapted(lambda comm: [stories.append(Look()) or stories[-1]], steps=7, every=3, size=2)  # type: ignore[func-returns-value]
    assert [what for what, step in stories[0].calls] == [
        "on_start", "before_step", "after_step", "before_step", "after_step", "on_end",
    ]  # fmt: skip
    assert [step for _, step in stories[0].calls] == [0, 2, 2, 5, 5, 7]
    assert seen == [((3 * NBYTES, 3 * NBYTES), (3, 3), (6.0, 6.0))] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize(("hook", "effect"), [("on_start", 0), ("before_step", 2), ("after_step", 3)])
async def test_request_of_all_ranks_is_carried_out_at_the_meeting(hook: str, effect: int) -> None:
    at = 0 if hook == "on_start" else 2
    ask = Doing(lambda ctx: ctx.set_strategy("ring", evidence_a=1.5) and None, at, hook)
    decisions, in_force = await adapted(lambda comm: [ask], steps=5)
    assert words(decisions) == [(effect, "Doing", "strategy star -> ring")]
    assert dict(decisions[0].evidence) == {"evidence_a": 1.5}
    assert in_force == ["star"] * effect + ["ring"] * (5 - effect)


@pytest.mark.asyncio
async def test_awaiting_policy_continues_after_its_request_and_is_not_called_before() -> None:
    went_on = []

    class Patient(Story):
        async def after_step(self, ctx: Context) -> None:
            await super().after_step(ctx)
            if ctx.step == 1:
                await ctx.set_strategy("ring")
                went_on.append((ctx.step, ctx.strategy.name))
                # all know that something was done: what follows needs no further step
                assert await ctx.together("count", _count) == 4
                await ctx.set_strategy("clique")
                went_on.append((ctx.step, ctx.strategy.name))

    stories: list[Story] = []
    decisions, in_force = await adapted(
        lambda comm: [stories.append(Patient()) or stories[-1]],  # type: ignore[func-returns-value]
        steps=4,
    )
    assert went_on == [(2, "ring")] * 4 + [(2, "clique")] * 4
    assert in_force == ["star", "star", "clique", "clique"]
    assert ("before_step", 2) not in stories[0].calls
    # a method that was not done when the ranks met is not called for that step
    assert ("before_step", 3) in stories[0].calls
    assert len(decisions) == 2


async def _count(comm: Communicator) -> int:
    return int(await comm.all_reduce(1, "count"))


@pytest.mark.asyncio
async def test_several_requests_at_once_are_done_in_order() -> None:
    async def ask(ctx: Context) -> None:
        counts = await asyncio.gather(ctx.together("count", _count), ctx.set_strategy("ring"))
        ctx.decide("goes on", count=counts[0])

    decisions, _ = await adapted(lambda comm: [Doing(ask)], steps=5)
    assert words(decisions) == [(3, "Doing", "strategy star -> ring"), (3, "Doing", "goes on")]
    assert decisions[1].evidence == {"count": 4}


@pytest.mark.asyncio
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("bad", [(2,), (0, 1, 2, 3)])
@pytest.mark.parametrize("hook", HOOKS)
async def test_a_policy_that_raises_is_off_everywhere(
    hook: str, bad: tuple[int, ...], is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The others ask for a strategy meanwhile: it stays. The other policy goes on."""
    at = 0 if hook == "on_start" else 2

    def make(comm: Communicator) -> list[Policy]:
        async def later(ctx: Context) -> None:
            await asyncio.sleep(0)
            fails(ctx)

        def ask(ctx: Context) -> None:
            ctx.set_strategy("ring")

        do = (later if is_async else fails) if comm.rank in bad else ask
        return [Doing(do, at, hook, "Bad"), Doing(lambda ctx: ctx.set_strategy("clique") and None, 5, name="Good")]

    with caplog.at_level(logging.INFO, "kfcomm.adapt"):
        decisions, in_force = await adapted(make, steps=8)
    met = at + 1 if hook == "after_step" else at
    where = "every rank" if len(bad) == 4 else "rank 2"
    off = f"switched off: it raised on {where}: ValueError in {hook}: oops"
    assert words(decisions) == [(met, "Bad", off), (6, "Good", "strategy star -> clique")]
    assert decisions[0].evidence["ranks"] == bad
    assert in_force == ["star"] * 6 + ["clique"] * 2
    raised = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert sorted(one.getMessage() for one in raised) == [f"rank {rank}: policy Bad raised in {hook}" for rank in bad]
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING] == [str(decisions[0])]


@pytest.mark.asyncio
async def test_ranks_that_ask_for_different_things() -> None:
    def make(comm: Communicator) -> list[Policy]:
        return [Doing(lambda ctx: ctx.set_strategy("ring" if comm.rank else "clique") and None)]

    decisions, in_force = await adapted(make)
    assert "switched off: the ranks disagree: rank 0 asks for strategy clique [" in decisions[0].what
    assert "rank 1 asks for strategy ring [" in decisions[0].what
    assert set(in_force) == {"star"}


@pytest.mark.asyncio
async def test_one_rank_asks_and_waits_and_the_others_ask_for_nothing() -> None:
    ended = []

    def make(comm: Communicator) -> list[Policy]:
        async def ask(ctx: Context) -> None:
            if comm.rank == 1:
                try:
                    await ctx.set_strategy("ring")
                finally:
                    ended.append(comm.rank)

        return [Doing(ask)]

    decisions, in_force = await adapted(make)
    assert len(decisions) == 1
    assert "the ranks disagree: rank 0 asks for nothing, rank 1 asks for strategy ring" in decisions[0].what
    assert set(in_force) == {"star"}
    assert ended == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", [(1,), (0, 1, 2, 3)])
async def test_a_policy_that_raises_right_after_its_change_has_it_undone(bad: tuple[int, ...]) -> None:
    def make(comm: Communicator) -> list[Policy]:
        async def ask(ctx: Context) -> None:
            await ctx.set_strategy("ring")
            if comm.rank in bad:
                fails(ctx)

        return [Doing(ask)]

    decisions, in_force = await adapted(make, steps=6)
    assert [one.what.partition(":")[0] for one in decisions] == ["strategy star -> ring", "switched off"]
    assert set(in_force) == {"star"}


@pytest.mark.asyncio
@pytest.mark.parametrize("is_awaited", [False, True])
@pytest.mark.parametrize("bad", [(1,), (0, 1, 2, 3)])
async def test_something_done_together_that_fails(bad: tuple[int, ...], is_awaited: bool) -> None:
    def make(comm: Communicator) -> list[Policy]:
        async def call(comm: Communicator) -> None:
            await comm.barrier()
            if comm.rank in bad:
                raise OSError("no disk")

        async def ask(ctx: Context) -> None:
            request = ctx.together("write", call)
            if is_awaited:
                await request

        return [Doing(ask)]

    decisions, in_force = await adapted(make)
    assert len(decisions) == 1
    assert "switched off: it raised on " in decisions[0].what
    assert "no disk" in decisions[0].what
    assert decisions[0].evidence["ranks"] == bad
    assert set(in_force) == {"star"}


@pytest.mark.asyncio
async def test_a_policy_that_catches_the_failure_stays() -> None:
    async def call(comm: Communicator) -> None:
        raise OSError("no disk")

    async def ask(ctx: Context) -> None:
        try:
            await ctx.together("write", call)
        except OSError:
            await ctx.set_strategy("ring")

    decisions, in_force = await adapted(lambda comm: [Doing(ask)], steps=5)
    assert words(decisions) == [(3, "Doing", "strategy star -> ring")]
    assert in_force[-1] == "ring"


@pytest.mark.asyncio
async def test_a_policy_that_never_has_enough_does_not_hold_up_the_job() -> None:
    class Restless(Policy):
        async def after_step(self, ctx: Context) -> None:
            if ctx.step == 0:
                while True:
                    await ctx.together("again", _count)

    _, in_force = await adapted(lambda comm: [Restless()], steps=3)
    assert len(in_force) == 3


@pytest.mark.asyncio
async def test_a_method_that_is_cancelled_has_failed() -> None:
    async def ask(ctx: Context) -> None:
        raise asyncio.CancelledError

    decisions, _ = await adapted(lambda comm: [Doing(ask)])
    assert "it was cancelled" in decisions[0].what


@pytest.mark.asyncio
async def test_on_end_can_ask_for_nothing_and_its_failure_harms_no_rank(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Policy):
        def on_end(self, ctx: Context) -> None:
            ctx.set_strategy("ring")

    decisions, in_force = await adapted(lambda comm: [Late()], steps=1)
    assert not decisions
    assert in_force == ["star"]
    assert "nothing can be asked for any more" in str(caplog.records[0].exc_info)


@pytest.mark.asyncio
async def test_a_program_that_raises_in_a_step_leaves_no_rank_waiting() -> None:
    async with world(3, aborted=True) as comms:
        adaptations = [Adaptation(comm, [Policy()], meter=ScriptedMeter(comm, steady)) for comm in comms]
        await asyncio.gather(*(one.start() for one in adaptations))

        async def step(comm: Communicator, *, bad: bool) -> None:
            async with adaptations[comm.rank].step():
                if bad:
                    raise ValueError("a bad batch")

        outcomes = await ends(comms, lambda comm: step(comm, bad=comm.rank == 1))
        assert_kinds(outcomes, CollectiveAborted, ValueError, CollectiveAborted)
        assert "ValueError" in str(outcomes[0]) or "a bad batch" in str(outcomes[0])
        assert_kinds(await ends(comms, lambda comm: step(comm, bad=True)), ValueError)
        await everywhere(comms, lambda comm: step(comm, bad=False))
        assert [one.num_steps for one in adaptations] == [3] * 3
        assert adaptations[0].metrics is not None
        assert adaptations[0].metrics.step == 2
        await asyncio.gather(*(one.close() for one in adaptations))
        await works(comms)


@pytest.mark.asyncio
async def test_a_rank_that_is_lost_ends_the_meeting() -> None:
    async with world(3, quiet=False) as comms:

        async def main(comm: Communicator) -> None:
            async with Adaptation(comm, [Policy()]) as adaptation:
                async with adaptation.step():
                    await comm.barrier()
                async with adaptation.step():
                    if comm.rank == 2:
                        comms.kill(2)
                        await asyncio.Event().wait()

        tasks = [asyncio.ensure_future(main(comm)) for comm in comms]
        outcomes = await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert_kinds(outcomes, PeerLost)
        tasks[2].cancel()
        await asyncio.wait({tasks[2]})


@pytest.mark.asyncio
async def test_ranks_with_different_policies_do_not_begin() -> None:
    async with world(3) as comms:

        async def main(comm: Communicator) -> None:
            policies = [Doing(fails, name="A"), *([Doing(fails, name="B")] if comm.rank == 2 else [])]
            async with Adaptation(comm, policies):
                raise AssertionError

        outcomes = await ends(comms, main)
        assert_kinds(outcomes, CollectiveMismatch)
        assert "rank 0 has A, every 1 steps; rank 2 has A, B, every 1 steps" in str(outcomes[0])
        await works(comms)


@pytest.mark.asyncio
async def test_ranks_at_different_steps() -> None:
    async with world(2) as comms:

        async def main(comm: Communicator) -> None:
            async with Adaptation(comm, []) as adaptation:
                adaptation._host.num_steps += comm.rank
                async with adaptation.step():
                    pass

        outcomes = await ends(comms, main)
        assert_kinds(outcomes, CollectiveMismatch)
        assert "the ranks are at different steps: [0, 1]" in str(outcomes[0])


@pytest.mark.asyncio
async def test_closing_drops_what_is_not_done_and_may_come_twice() -> None:
    async with world(2) as comms:

        async def ask(ctx: Context) -> None:
            await ctx.set_strategy("ring")

        async def main(comm: Communicator) -> None:
            adaptation = Adaptation(comm, [Doing(ask, at=0)])
            async with adaptation.step():
                await comm.barrier()
            await adaptation.close()
            await adaptation.close()
            with pytest.raises(ConfigError, match="closed"):
                await adaptation.start()
            with pytest.raises(ConfigError, match="closed"):
                async with adaptation.step():
                    raise AssertionError
            assert not adaptation.decisions

        await everywhere(comms, main)
        await turns()
        await works(comms)


@pytest.mark.asyncio
async def test_misuse() -> None:
    async with world(1) as comms:
        comm = comms[0]
        with pytest.raises(ConfigError, match=r"instance of kfcomm.adapt.Policy, not <class"):
            Adaptation(comm, [Policy])  # type: ignore[list-item]
        for every in (0, 1.5, "2"):
            with pytest.raises(ConfigError, match="every is a whole number of steps, at least 1"):
                Adaptation(comm, [], every=every)  # type: ignore[arg-type]
        async with Adaptation(comm, []) as adaptation:
            step = adaptation.step()
            async with step:
                with pytest.raises(ConfigError, match="a step is under way"):
                    async with adaptation.step():
                        raise AssertionError
            with pytest.raises(ConfigError, match="entered once"):
                async with step:
                    raise AssertionError
        assert adaptation.policies == ()


@pytest.mark.asyncio
async def test_a_step_that_is_cancelled_while_a_policy_works() -> None:
    """The policy waits for something of its own; the waiting step is cancelled, and the other ranks are notified."""
    async with world(2, aborted=True) as comms:
        gates = [asyncio.Event(), asyncio.Event()]
        inside = asyncio.Event()

        def make(comm: Communicator) -> Policy:
            async def wait(ctx: Context) -> None:
                if comm.rank == 0:
                    inside.set()
                    await gates[0].wait()

            return Doing(wait, at=0, hook="before_step")

        adaptations = [Adaptation(comm, [make(comm)]) for comm in comms]
        await asyncio.gather(*(one.start() for one in adaptations))

        async def step(number: int) -> None:
            async with adaptations[number].step():
                pass

        mine, theirs = asyncio.ensure_future(step(0)), asyncio.ensure_future(step(1))
        await inside.wait()
        mine.cancel()
        with pytest.raises(CollectiveAborted):
            await theirs
        assert mine.cancelled()
        gates[0].set()
        await asyncio.gather(step(0), step(1))
        await asyncio.gather(*(one.close() for one in adaptations))
        await works(comms)


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["the meeting", "what follows"])
async def test_a_step_that_is_cancelled_at_its_end_leaves_no_rank_waiting(where: str) -> None:
    """One rank leaves the meeting, or what follows from it: the others hear of it."""
    async with world(3, aborted=True) as comms:
        inside = asyncio.Event()

        async def call(comm: Communicator) -> None:
            if comm.rank == 0:
                inside.set()
                await asyncio.Event().wait()

        ask = Doing(lambda ctx: ctx.together("wait", call) and None, at=0, hook="before_step")
        adaptations = [Adaptation(comm, [ask] if where == "what follows" else []) for comm in comms]
        await asyncio.gather(*(one.start() for one in adaptations))

        async def step(number: int) -> None:
            async with adaptations[number].step():
                if number and where == "the meeting":
                    await inside.wait()

        tasks = [asyncio.ensure_future(step(number)) for number in range(3)]
        if where == "what follows":
            await inside.wait()
        else:
            await until(lambda: comms[0]._session.engine.in_flight())
            inside.set()
        tasks[0].cancel()
        assert_kinds(
            await asyncio.gather(*tasks, return_exceptions=True),
            asyncio.CancelledError, CollectiveAborted, CollectiveAborted,
        )  # fmt: skip
        await asyncio.gather(*(one.close() for one in adaptations))
        await works(comms)


def test_a_decision_in_words() -> None:
    decision = Decision(
        7, "Mine", "goes on", {"MB_s": 12.3456, "votes": (1, 2), "by": {"a": 1.0}, "all": list(range(20))}
    )
    shown = ", ".join(map(str, range(16)))
    assert str(decision) == f"step 7: Mine: goes on (MB s 12.35, votes [1, 2], by {{a: 1}}, all [{shown}, 4 more])"
    assert str(Decision(7, "Mine", "goes on")) == "step 7: Mine: goes on"

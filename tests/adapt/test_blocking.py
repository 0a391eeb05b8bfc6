"""The blocking form: the same meetings and policies, on the I/O thread."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy as np
import pytest

from kfcomm import adapt, sync
from kfcomm.adapt import Context, Policy
from kfcomm.errors import CollectiveAborted, ConfigError
from kfcomm.testing import run_threads, sync_world


class Switch(Policy):
    """Asks for the ring once, and notes on which thread."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    async def after_step(self, ctx: Context) -> None:
        self.threads.add(threading.current_thread().name)
        if ctx.step == 1:
            await ctx.set_strategy("ring")


def test_a_policy_changes_the_strategy_under_a_blocking_program() -> None:
    def main(comm: sync.Communicator) -> Any:
        policy = Switch()
        with sync.Adaptation(comm, [policy]) as adaptation:
            for _ in range(4):
                with adaptation.step():
                    total = comm.all_reduce(np.ones(10), "x")
            assert total[0] == comm.size
            assert adaptation.policies == (policy,)
            assert adaptation.num_steps == 4
            assert adaptation.metrics is not None
            assert adaptation.metrics.counts == (1,) * comm.size
        return [one.what for one in adaptation.decisions], comm.strategy.name, policy.threads

    with sync_world(3, strategy="star") as comms:
        assert run_threads(comms, main) == [(["strategy star -> ring"], "ring", {"kfcomm-io"})] * 3


def test_a_block_that_raises_leaves_no_rank_waiting() -> None:
    def main(comm: sync.Communicator) -> str:
        adaptation = sync.Adaptation(comm, [])
        adaptation.start()
        kind: type[Exception] = ValueError if comm.rank == 0 else CollectiveAborted
        with pytest.raises(kind), adaptation.step():  # noqa: PT012  the block is what is tested
            if comm.rank == 0:
                raise ValueError("a bad batch")
        with adaptation.step():
            pass
        adaptation.close()
        with pytest.raises(ConfigError, match="closed"), adaptation.step():
            raise AssertionError
        return "done"

    with sync_world(2) as comms:
        assert run_threads(comms, main) == ["done"] * 2


def test_bad_arguments_are_refused_at_once() -> None:
    with sync_world(1) as comms, pytest.raises(ConfigError, match="instance of"):
        sync.Adaptation(comms[0], [1])  # type: ignore[list-item]


def test_it_has_what_the_async_one_has() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(adapt.Adaptation) - public(sync.Adaptation) == {"begin", "end", "end_badly", "give_up"}
    assert public(sync.Adaptation) <= public(adapt.Adaptation)
    ours, theirs = inspect.signature(sync.Adaptation), inspect.signature(adapt.Adaptation)
    assert list(ours.parameters) == list(theirs.parameters)

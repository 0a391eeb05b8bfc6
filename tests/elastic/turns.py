"""Random programs of two samplers, in turns or one within a step of the other; and what has to be true of them."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Any

import numpy as np

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.errors import EpochChanged


class Turns:
    """A program, by chance.

    Attributes:
        is_nested: validation comes within steps of training.
        begun: numbers of the steps that any rank has begun.
    """

    def __init__(self, random: Random) -> None:
        self.is_nested = random.random() < 0.4
        self.begun: list[int] = []
        self._lengths = {"train": random.choice([12, 24]), "val": random.choice([4, 12])}
        self._epochs = random.choice([1, 2, 3])
        self._by_state = random.random() < 0.5
        self._names = {"train": "used", "val": "val" if self.is_nested or random.random() < 0.5 else "used"}
        self._on_loss = random.choice(["finish", "finish", "raise", "restart_step"])
        self._is_validated_first = random.random() < 0.5
        self._is_broken_off = self.is_nested and random.random() < 0.3

    async def run(self, comm: Any, **options: Any) -> Any:
        """One rank's life: how often each sample was used; None if it was released."""
        comm = ElasticCommunicator(comm)
        state = State(**{kind: np.zeros(length) for kind, length in self._lengths.items()}, epoch=0)
        async with Elastic(comm, state, on_loss=self._on_loss, **options) as elastic:
            samplers = {kind: ElasticSampler(length, 4) for kind, length in self._lengths.items()}
            await (self._nested if self.is_nested else self._in_turns)(comm, elastic, state, samplers)
        return None if elastic.is_released else {kind: getattr(state, kind).tolist() for kind in self._lengths}

    async def _in_turns(self, comm: Any, elastic: Any, state: State, samplers: dict[str, ElasticSampler]) -> None:
        for epoch in range(self._epochs):
            if self._by_state and epoch < state.epoch:
                continue
            for kind, sampler in samplers.items():
                passes = None if self._by_state else epoch + 1
                async for step in elastic.steps(sampler, passes=passes, used_in=self._names[kind]):
                    with self._guard(step):
                        await self._use(comm, state, kind, step)
            if not elastic.is_replaying:
                state.epoch = epoch + 1

    async def _nested(self, comm: Any, elastic: Any, state: State, samplers: dict[str, ElasticSampler]) -> None:
        async for step in elastic.steps(samplers["train"], passes=self._epochs, used_in="used"):
            with self._guard(step):
                if not self._is_validated_first:
                    await self._use(comm, state, "train", step)
                if step.batch[0] % 3 == 0:
                    await self._validate(comm, elastic, state, samplers["val"])
                if self._is_validated_first:
                    await self._use(comm, state, "train", step)

    async def _validate(self, comm: Any, elastic: Any, state: State, sampler: ElasticSampler) -> None:
        async for one in elastic.steps(sampler, used_in="val"):
            with self._guard(one):
                await self._use(comm, state, "val", one)
            if self._is_broken_off:
                break

    def _guard(self, step: Any) -> Any:
        return step if self._on_loss == "restart_step" else contextlib.suppress(EpochChanged)

    async def _use(self, comm: Any, state: State, kind: str, step: Any) -> None:
        self.begun.append(step.number)
        await asyncio.sleep(0.005)
        mask = np.zeros(self._lengths[kind])
        mask[step.indices] = 1
        total = await comm.all_reduce(mask, name=self._names[kind])
        setattr(state, kind, getattr(state, kind) + total)

    def check(self, ends: list[Any]) -> None:
        """Each sample was used once in each pass, as all know that came to the end."""
        for one in ends:
            assert one == ends[0], f"unlike states: {one} and {ends[0]}"
            assert set(one["train"]) == {float(self._epochs)}, one
            assert self._is_broken_off or len(set(one["val"])) == 1, one
            assert self.is_nested or one["val"][0] == self._epochs, one

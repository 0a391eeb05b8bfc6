"""Pollux's policy: the batch, and the number of ranks, with the highest goodput."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context
from kfcomm.common.imports import is_installed, lacking
from kfcomm.errors import ConfigError
from kfcomm.train.gradient_statistics import GradientStatistics
from kfcomm.train.policies.measured import GradientPolicy
from kfcomm.train.pollux import Observation, Shape, Throughput, best_shape, fit, goodput
from kfcomm.types import override

MOST_KEPT = 20
"""Latest measurements of one shape that count."""
MOST_PATIENCE = 8
"""So many times ``rest`` lie between two looks at most, when they change nothing."""
STEP_OF_BATCHES = 1.25
"""From one batch that is thought of to the next."""

Key = tuple[int, int, int]
"""Hosts, ranks, and samples of a rank."""


class PolluxGoodput(GradientPolicy):
    """Fits a model to the steps so far, and goes where it predicts the highest goodput: samples a second, by worth.

    1. The seconds of each step are noted by its shape (hosts, ranks, samples of a rank); the first after a change
       does not count. So are the gradients' norms.
    2. After ``rest`` steps (after a look that changes nothing, twice as many as before it, up to 8 times ``rest``) the
       throughput model is fitted to all of them (``kfcomm.train.fit``), and the goodput of all
       shapes in reach is predicted: batches of up to twice the largest that was seen, and at most ``most_local`` on a
       rank; where the ranks may change, up to twice as many ranks as were seen.
    3. What is predicted to be better by more than ``least_gain`` is asked for: another number of ranks first, the batch
       when they are there.

    The noise of gradients shows among at least two ranks: it does not move away from one before it has seen more.

    More ranks are taken only while each is worth ``least_utility`` of what one alone would be, as in Pollux's scaling
    of clusters: goodput(n) / (n goodput(1)).

    Args:
        most_local: samples that a rank can hold at once.
        least_local: the fewest of a rank.
        sizes: the numbers of ranks between which it may choose, least and most; None for as they are.
        rest: steps from one look to the next; at least 2.
        least_gain: a part.
        least_utility: 0 to 1.

    Raises:
        ConfigError: a number is out of its range, or SciPy is not installed.

    Source: Qiao et al., "Pollux", OSDI 2021; see ``kfcomm.train.fit``.
    """

    changes_back = True

    def __init__(
        self, most_local: int, *, least_local: int = 1, sizes: tuple[int, int] | None = None, rest: int = 20,
        least_gain: float = 0.02, least_utility: float = 0.0,
    ) -> None:  # fmt: skip
        if not 1 <= least_local <= most_local:
            raise ConfigError(f"a rank has samples from 1 on, and not {least_local!r} to {most_local!r}")
        if sizes is not None and not 1 <= sizes[0] <= sizes[1]:
            raise ConfigError(f"sizes are a least and a most number of ranks, not {sizes!r}")
        if rest < 2 or not 0 <= least_gain < 1 or not 0 <= least_utility <= 1:
            raise ConfigError(
                f"rest is at least 2, least_gain below 1 and least_utility 0 to 1, not {rest!r}, {least_gain!r} and "
                f"{least_utility!r}"
            )
        if not is_installed("scipy"):
            raise ConfigError(lacking("PolluxGoodput", "scipy"))
        self._bounds = least_local, most_local
        self._sizes = sizes
        self._rest = rest
        self._least_gain = least_gain
        self._least_utility = least_utility

    @override
    def on_start(self, ctx: Context) -> None:
        super().on_start(ctx)
        self._seen: dict[Key, list[float]] = {}
        self._last: Key | None = None
        self._num_since = 0
        self._patience = self._rest
        self._initial_batch = ctx.hyperparameters.batch_size
        self._asked_size: int | None = None

    async def after_step(self, ctx: Context) -> None:
        """Note the step; look for a better shape now and then."""
        metrics, batch = ctx.metrics, ctx.hyperparameters.batch_size
        if metrics is None or batch is None:
            return
        self._gradients.update(metrics)
        self._note(ctx, metrics)
        least, most = self._bounds
        local = min(max(round(batch / ctx.size), least), most)
        if local * ctx.size != batch:  # it was made for other ranks
            ctx.set_batch_size(local * ctx.size, ranks=ctx.size)
            return
        here = Shape(ctx.layout.num_hosts, ctx.size, batch // ctx.size)
        if self._num_since >= self._patience and self._gradients.scale is not None:
            self._num_since = 0
            if self._is_one_batch():
                self._try_another_batch(ctx, here)
            else:
                await self._look(ctx, here)

    def _note(self, ctx: Context, metrics: StepMetrics) -> None:
        batch = metrics.hyperparameters.batch_size
        if batch is None or batch % metrics.size:
            return
        key = (ctx.layout.num_hosts, metrics.size, batch // metrics.size)
        if key != self._last:
            self._last, self._num_since = key, 0  # links are opened, memory is taken: it does not count
            self._patience = self._rest
            return
        kept = self._seen.setdefault(key, [])
        kept.append(max(metrics.seconds))
        del kept[:-MOST_KEPT]
        self._num_since += 1

    def _is_one_batch(self) -> bool:
        """Whether the cost of a sample is unknown: no number of ranks was observed with two batches."""
        ranks = [ranks for _, ranks, _ in self._seen]
        return self._bounds[0] < self._bounds[1] and all(ranks.count(one) < 2 for one in ranks)

    def _try_another_batch(self, ctx: Context, here: Shape) -> None:
        least, most = self._bounds
        local = int(here.batch)
        other = 2 * local if 2 * local <= most else max(least, local // 2)
        if other != local:
            ctx.set_batch_size(other * ctx.size, why="to tell what of a step depends on its samples")

    async def _look(self, ctx: Context, here: Shape) -> None:
        signal, noise, first = self._gradients.signal, self._gradients.noise, self._initial_batch
        if signal is None or noise is None or first is None:
            return
        model = await asyncio.to_thread(fit, self._observations())
        view = _Estimate(model, GradientStatistics(signal, noise / first), first)
        of_here = view.goodput(here)
        bound = (1 + self._least_gain) * of_here
        best = view.best(self._shapes(ctx, ctx.size))
        larger = self._best_size(ctx, view, best)
        chosen = best if larger is None or larger.ranks == self._asked_size else larger
        if view.goodput(chosen) <= bound:
            self._patience = min(2 * self._patience, MOST_PATIENCE * self._rest)
            return
        evidence: dict[str, Any] = {
            "goodput": of_here, "predicted": view.goodput(chosen), "ranks": chosen.ranks,
            "samples_of_a_rank": int(chosen.batch), "noise_scale": self._gradients.scale,
        }  # fmt: skip
        if chosen.ranks != ctx.size:
            self._asked_size = chosen.ranks
            fits = self._bounds[1] * chosen.ranks // ctx.size * ctx.size
            if fits < here.samples:  # fewer ranks could not hold it
                ctx.set_batch_size(max(fits, ctx.size), **evidence)
            ctx.resize(chosen.ranks, **evidence)
        else:
            ctx.set_batch_size(int(chosen.batch) * ctx.size, **evidence)

    def _best_size(self, ctx: Context, view: _Estimate, present: Shape) -> Shape | None:
        """The best shape of another number of ranks, if it is better than the best of the present one."""
        if self._sizes is None:
            return None
        alone = view.goodput(view.best(self._shapes(ctx, 1)))
        most = min(self._sizes[1], 2 * max([ctx.size, *(ranks for _, ranks, _ in self._seen)]))
        found = [view.best(self._shapes(ctx, size)) for size in range(self._sizes[0], most + 1) if size != ctx.size]
        worth = [one for one in found if view.goodput(one) >= self._least_utility * one.ranks * alone]
        return max([present, *worth], key=view.goodput) if worth else None

    def _observations(self) -> list[Observation]:
        return [Observation(Shape(*key), median(times)) for key, times in sorted(self._seen.items())]

    def _shapes(self, ctx: Context, ranks: int) -> list[Shape]:
        """Shapes with batches of a rank up to twice the largest that was observed, in steps of a quarter."""
        least, most = self._bounds
        most = max(least, min(most, 2 * max(batch for _, _, batch in self._seen)))
        found, value = {most}, float(least)
        while value <= most:
            found.add(int(value))
            value = max(value * STEP_OF_BATCHES, value + 1)
        hosts = 1 if ranks == 1 else -(-ranks // self._ranks_of_host(ctx))
        return [Shape(hosts, ranks, batch) for batch in sorted(found)]

    def _ranks_of_host(self, ctx: Context) -> int:
        """Largest mean number of ranks observed on one host: new ones are assumed to be placed alike."""
        return max(
            -(-ranks // hosts) for hosts, ranks in [(ctx.layout.num_hosts, ctx.size), *(key[:2] for key in self._seen)]
        )

    @override
    def state_dict(self) -> Any:
        seen = [[list(key), times] for key, times in sorted(self._seen.items())]
        return [self._gradients.state_dict(), seen, self._initial_batch]

    @override
    def load_state_dict(self, state: Any) -> None:
        self._gradients.load_state_dict(state[0])
        self._seen = {(hosts, ranks, batch): list(times) for (hosts, ranks, batch), times in state[1]}
        self._initial_batch = state[2]


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Present estimate of throughput and gradients."""

    throughput: Throughput
    gradients: GradientStatistics
    initial_batch: float

    def goodput(self, shape: Shape) -> float:
        return goodput(self.throughput, self.gradients, self.initial_batch, shape)

    def best(self, shapes: Sequence[Shape]) -> Shape:
        return best_shape(self.throughput, self.gradients, self.initial_batch, shapes)[0]

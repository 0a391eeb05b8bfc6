"""A training of any arrays in one object: algorithm, monitor, policies, guarded and elastic steps.

It composes what the rest of the package has: an `Agreement`, a `GradientMonitor`, an ``Adaptation`` and an ``Elastic``.
The loop, the gradients and the update stay the program's.

Invariant: a void step leaves the model, and the algorithm where it keeps replicas, as they were before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from kfcomm.adapt import Adaptation, Hyperparameters, Policy
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.course import Step
from kfcomm.elastic.sampler import share
from kfcomm.errors import ConfigError, StepVoid
from kfcomm.train.agreement import Agreement, Tree
from kfcomm.train.algorithms import Algorithm, Kind
from kfcomm.train.composite import CompositeState
from kfcomm.train.gradient_monitor import GradientMonitor
from kfcomm.train.procedure import Comm, is_elastic
from kfcomm.train.work import ModelExchange, Work, awaited, waited

Apply = Callable[[Tree, Tree], Any]


class Training:
    """Model of a training whose ranks agree, are measured, adapt and may change. Made alike on every rank.

    ::

        with kfcomm.sync.init(elastic=True) as comm:
            training = kfcomm.train.Training(comm, weights, monitor=True, learning_rate=0.1,
                                             policies=[NoiseScaleBatch(most=4096), GuardSteps()])
            for step in training.steps(ElasticSampler(len(x), batch=64), passes=10):
                loss, gradients = loss_and_gradients(training.model, x[step.indices], y[step.indices])
                training.update(gradients, lambda w, g: w - training.learning_rate * g, loss=loss)

    With a communicator of ``kfcomm.init``: ``async for``, and ``await training.update(...)``. Without ``elastic=True``
    the ranks stay the same, and nothing else changes.

    Args:
        comm: of either interface.
        model: at the beginning: a tree of arrays of any kind, the same on all ranks.
        algorithm: by which ranks agree: a name, an `Algorithm` or a class of one. Several: policies may change from the
            first, by their names (``SwitchAgreement``).
        monitor: True to measure the noise of gradients, or options of `GradientMonitor`; with synchronous SGD only.
        policies: of ``kfcomm.adapt``, the same on every rank.
        learning_rate: that policies may change; None if the program does not follow one.
        free: further hyperparameters that policies may change; see ``Hyperparameters``.
        state: further values that joining ranks and checkpoints get, by name, such as momenta. The program reads and
            sets them as attributes of ``training.state``, a ``kfcomm.elastic.State``.
        name: prefix of the collectives; another one for each training on one communicator.

    Attributes:
        model: the model, of the next step; may be set.
        state: what joining ranks and checkpoints get.

    Raises:
        ConfigError: an argument is not valid; on all ranks, from the first step: their arguments differ.

    Cost: that of the algorithm, monitor and policies; see these.
    """

    def __init__(
        self, comm: Comm, model: Tree, *, algorithm: Kind | Algorithm | Sequence[Any] = "ssgd", monitor: Any = False,
        policies: Sequence[Policy] = (), learning_rate: float | None = None, free: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None, name: str = "training",
    ) -> None:  # fmt: skip
        self.comm = comm
        self.model: Tree = model
        self.monitor = _monitor(comm, monitor)
        self._name = name
        given: list[Any] = list(algorithm) if isinstance(algorithm, (list, tuple)) else [algorithm]
        self._algorithms = {str(one): one for one in map(Algorithm.of, given)}
        if len(self._algorithms) < len(given) or not given:
            raise ConfigError(f"algorithms have different names, and there is at least one, not {given!r}")
        if self.monitor is not None and all(one.keeps_replicas for one in self._algorithms.values()):
            raise ConfigError(f"a monitor measures averages of gradients, and {', '.join(self._algorithms)} makes none")
        self._ways: dict[str, Agreement] = {}
        self._chosen = next(iter(self._algorithms))
        self._policies = policies
        names = tuple(self._algorithms) if len(self._algorithms) > 1 else ()
        options: dict[str, Any] = {"free": free} if free else {}
        self._first = Hyperparameters(learning_rate=learning_rate, agreements=names, **options)
        self._is_blocking = hasattr(comm, "all_reduce_async")
        self._adaptation: Any = None
        self._now: Any = None  # the step of the adaptation that is under way
        self.before_end: Callable[[], object] = _nothing  # of each step: wait until its exchange has run
        self.way  # noqa: B018  made now, so that its errors come from here
        self.state = State(training=self, **(state or {}))

    def __repr__(self) -> str:
        return f"<Training by {self._chosen}, rank {self.comm.rank} of {self.comm.size}>"

    # ---------------------------------------------------------------- for the program

    @property
    def way(self) -> Agreement:
        """The algorithm in force."""
        found = self._ways.get(self._chosen)
        if found is None:
            chosen = self._algorithms[self._chosen]
            if self.monitor is not None and not chosen.keeps_replicas:
                chosen = Algorithm(chosen.kind, **chosen.options, monitor=self.monitor)
            found = self._ways[self._chosen] = chosen.made(self.comm, self.model, self._name)
        return found

    @property
    def adaptation(self) -> Any:
        """The ``Adaptation`` of the steps under way: hyperparameters, metrics and decisions; None before the first."""
        return self._adaptation

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of this step, lowered after void ones by `GuardSteps`."""
        found: float | None = (self._adaptation or self._first).learning_rate
        return found

    @property
    def is_void(self) -> bool:
        """Whether the step under way counts for nothing: ``update`` has applied nothing."""
        return self._now is not None and self._now.is_void

    def value(self, name: str) -> Any:
        """Return a free hyperparameter."""
        return self._started("value").value(name)

    def observe(self, **values: float) -> None:
        """Report numbers of this step to the policies of all ranks; see ``Adaptation.observe``."""
        self._started("observe").observe(**values)

    def update(self, gradients: Tree, apply: Apply, *, loss: Any = None) -> Any:
        """Exchange gradients, or models, and apply the result; all ranks call it once in each step.

        Args:
            gradients: a tree like the model's, of this rank's samples: their mean.
            apply: ``apply(model, gradients)`` returns the next model, or None if it has changed the arrays of ``model``
                in place. It is not called in a void step.
            loss: of this rank, for `GuardSteps`: a number, or an array of one.

        Returns:
            The next model, which is ``training.model`` from now on; with a communicator of ``kfcomm.init``: awaited.

        Raises:
            ConfigError: no step is under way.
            GuardFailed: no good step for long; see `GuardSteps`.
            CollectiveError: an exchange failed.
        """
        work = self._updated(gradients, apply, loss)
        return waited(work) if self._is_blocking else awaited(work)

    def exchange(self, gradients: Tree, *, loss: Any = None) -> Any:
        """Exchange gradients, or models, as ``update`` does, and apply nothing.

        Returns:
            The model that the step begins from, and the gradients to apply to it; None for these in a void step. The
            program sets ``training.model``. With a communicator of ``kfcomm.init``: awaited.

        Raises:
            ConfigError, GuardFailed, CollectiveError: see ``update``.
        """
        work = self._exchanged(gradients, loss)
        return waited(work) if self._is_blocking else awaited(work)

    def steps(self, sampler: ElasticSampler, *, passes: int | None = None, **elastic: Any) -> TrainingSteps:
        """Return the steps of one pass of a sampler, or until a number of passes: ``for``, or ``async for``.

        They end with the step at which a policy says ``ctx.stop``.

        Args:
            sampler: its batch follows the policies'.
            passes: see ``Elastic.steps``.
            elastic: options of ``Elastic``, where the communicator is elastic: ``checkpoint``, ``on_loss``, ...

        Raises:
            ConfigError: options are given, and the communicator is not elastic.
        """
        if elastic and not is_elastic(self.comm):
            raise ConfigError(f"{', '.join(elastic)} of steps are for a communicator of init(elastic=True)")
        return TrainingSteps(self, sampler, passes, elastic)

    # ---------------------------------------------------------------- a step

    def _updated(self, gradients: Tree, apply: Apply, loss: Any) -> Work:
        model, reduced = yield from self._exchanged(gradients, loss)
        if reduced is not None:
            found = apply(model, reduced)
            self.model = model if found is None else found
        return self.model

    def _exchanged(self, gradients: Tree, loss: Any) -> Work:
        way, now = self.way, self._now
        if now is None:
            raise ConfigError("gradients are exchanged in a step: for step in training.steps(sampler): ...")
        try:
            if way.keeps_replicas:
                # Judged before the algorithm moves: it keeps what models and gradients leave behind.
                models = ModelExchange(way, self.model)
                reduced = yield now.guarded(gradients, loss=loss, way=models, name=self._name)
                model = models.model
            else:
                model = self.model = yield way.parameters(self.model)
                reduced = yield now.guarded(gradients, loss=loss, way=way, name=self._name)
        except StepVoid:
            return self.model, None
        if self.monitor is not None:
            self._adaptation.observe(**self.monitor.observed())
        return model, reduced

    def _begin(self, step: Step) -> Any:
        """Begin a step: returns the context of the adaptation's."""
        adaptation = self._started("steps")
        if adaptation.agreement is not None:
            self._chosen = adaptation.agreement
        if self.monitor is not None:
            self.monitor.batch = max(1, len(step.indices))
        self._now = adaptation.step(step)
        return self._now

    def _end(self, sampler: ElasticSampler) -> bool:
        """End a step; returns whether a policy has ended the training."""
        self._now = None
        batch = self._adaptation.batch_size
        if batch is not None:
            sampler.batch = batch
        return bool(self._adaptation.is_over)

    def _adapting(self, sampler: ElasticSampler) -> Any:
        """The adaptation of the steps through a sampler, not open yet."""
        # The blocking one is a part of kfcomm.sync, which asyncio's programs do without.
        from kfcomm.sync import Adaptation as Blocking

        make: Any = Blocking if self._is_blocking else Adaptation
        given = self._first.having("batch_size", sampler.batch)
        self._adaptation = make(self.comm, self._policies, hyperparameters=given)
        return self._adaptation

    def _started(self, what: str) -> Any:
        if self._adaptation is None:
            raise ConfigError(f"{what} of a training is known from its first step on: for step in training.steps(...)")
        return self._adaptation

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Model, algorithm, monitor and adaptation, for ``State``, joining ranks and checkpoints."""
        return {"model": self.model, "chosen": self._chosen} | self._parts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another rank, or of a checkpoint."""
        self.model, self._chosen = state["model"], str(state["chosen"])
        self._parts.load_state_dict(state)

    def merging(self) -> dict[str, str]:
        """Return how parts that differ between ranks are converted when the ranks change; see ``kfcomm.elastic``."""
        return ({"model": "mean"} if self.way.keeps_replicas else {}) | self._parts.merging()

    @property
    def _parts(self) -> CompositeState:
        parts: dict[str, Any] = {"way": self.way}
        if self.monitor is not None:
            parts["monitor"] = self.monitor
        if self._adaptation is not None:
            parts["adaptation"] = _WholeState(self._adaptation)
        return CompositeState(parts)


class _WholeState:
    """Object with a state of any form, as a part of a composite one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def state_dict(self) -> dict[str, Any]:
        """The state under one key."""
        return {"state": self._inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it."""
        self._inner.load_state_dict(state["state"])


class TrainingSteps:
    """Steps of a `Training` through a sampler, for ``for`` or ``async for``, once."""

    def __init__(
        self, training: Training, sampler: ElasticSampler, passes: int | None, options: Mapping[str, Any]
    ) -> None:
        self._training, self._sampler, self._passes, self._options = training, sampler, passes, options

    def __iter__(self) -> Iterator[Step]:
        training, sampler = self._training, self._sampler
        if not training._is_blocking:
            raise ConfigError("with a communicator of kfcomm.init steps are awaited: write async for")
        if not is_elastic(training.comm):
            with training._adapting(sampler):
                for step in self._fixed():
                    with training._begin(step):
                        yield step
                        training.before_end()
                    if training._end(sampler):
                        break
            return
        # Over a blocking communicator it is the blocking one.
        elastic: Any = Elastic(training.comm, training.state, **self._options)
        # Made before the Elastic is entered, where it gets the state of a checkpoint.
        adaptation = training._adapting(sampler)
        with elastic, adaptation:
            for step in elastic.steps(sampler, passes=self._passes):
                with training._begin(step):
                    yield step
                    training.before_end()
                if training._end(sampler):
                    break

    async def __aiter__(self) -> AsyncIterator[Step]:
        training, sampler = self._training, self._sampler
        if training._is_blocking:
            raise ConfigError("with a communicator of kfcomm.sync nothing is awaited: write for")
        if not is_elastic(training.comm):
            async with training._adapting(sampler):
                for step in self._fixed():
                    async with training._begin(step):
                        yield step
                    if training._end(sampler):
                        break
            return
        elastic = Elastic(training.comm, training.state, **self._options)
        adaptation = training._adapting(sampler)
        async with elastic, adaptation:
            async for step in elastic.steps(sampler, passes=self._passes):
                async with training._begin(step):
                    yield step
                if training._end(sampler):
                    break

    def _fixed(self) -> Iterator[Step]:
        """Steps of ranks that stay the same; a void step's samples are given again."""
        comm, sampler = self._training.comm, self._sampler
        until = sampler.passes + 1 if self._passes is None else self._passes
        number = 0
        while len(batch := sampler.take_until(until)):
            step = Step(number, share(batch, comm.rank, comm.size), batch, sampler)
            yield step
            number += 1
            if not step.counts:
                sampler.give_back(batch)


def _nothing() -> None:
    """Without an exchange that runs behind the program."""


def _monitor(comm: Comm, given: Any) -> GradientMonitor | None:
    """A monitor by the argument ``monitor``; a rank's samples are known at each step."""
    if given is False or given is None:
        return None
    options = dict(given) if isinstance(given, Mapping) else {}
    return GradientMonitor(comm, 1, **{"every": "auto"} | options)

"""The host of policies in a running program: what is decided is done on its communicator."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kfcomm.adapt.decision import Decision
from kfcomm.adapt.host import SIZE, STRATEGY, Host, Named, checked_rank, checked_size
from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.recording import strategy_as_json
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.adapt.recording import Recorder
    from kfcomm.adapt.requests import Request
    from kfcomm.adapt.runner import Runner
    from kfcomm.world.communicator import Communicator

logger = logging.getLogger("kfcomm.adapt")

T = TypeVar("T")


class LiveHost(Host):
    """That of an ``Adaptation``.

    Args:
        comm: of all ranks.
        hyperparameters: what holds at first.
        recorder: writes down what happens; None for nobody.
    """

    def __init__(self, comm: Communicator, hyperparameters: Hyperparameters, recorder: Recorder | None) -> None:
        super().__init__(hyperparameters)
        self.comm = comm
        self.recorder = recorder

    @property
    def size(self) -> int:
        """See `Host`."""
        return self.comm.size

    @property
    def rank(self) -> int:
        """See `Host`."""
        return self.comm.rank

    @property
    def layout(self) -> Layout:
        """See `Host`."""
        return self.comm.layout

    @property
    def strategy(self) -> AnyStrategy:
        """See `Host`."""
        return self.comm.strategy

    def record(self, decision: Decision, level: int = logging.INFO) -> None:
        """Keep and log a decision; on ranks other than 0, which decide the same, the log has it for debugging only."""
        super().record(decision, level)
        logger.log(level if self.rank == 0 else logging.DEBUG, "%s", decision)
        tracer = self.comm._session.engine.tracer
        if tracer is not None:
            tracer.instant("decision", policy=decision.policy, what=decision.what, why=decision.why)
        if self.recorder is not None:
            self.recorder.decided(decision)

    # ---------------------------------------------------------------- what is done together

    async def change_strategy(self, chosen: AnyStrategy, runner: Named | None) -> None:
        """See `Host`."""
        if self.comm.strategy.digest != chosen.digest:
            await self.comm.set_strategy(chosen)
        self._held_by(STRATEGY, runner)
        self._note(STRATEGY, runner, value=strategy_as_json(chosen))

    async def change_hyperparameter(self, name: str, value: Any, runner: Named | None) -> None:
        """See `Host`."""
        await super().change_hyperparameter(name, value, runner)
        self._note(name, runner, value=value)

    def check_size(self, size: int) -> int:
        """See `Host`."""
        return checked_size(size, can_change=self.comm.outlives)

    async def change_size(self, size: int, runner: Named) -> None:
        """See `Host`."""
        await self._ask(lambda world: world.propose_size(size))
        self._held_by(SIZE, runner)
        self._note(SIZE, runner, value=size)

    def check_rank(self, rank: int) -> int:
        """See `Host`."""
        return checked_rank(rank, self.size, can_change=self.comm.outlives)

    async def replace_rank(self, rank: int) -> None:
        """See `Host`."""
        await self._ask(lambda world: world.propose_replacement(rank))

    async def _ask(self, call: Callable[[Any], Awaitable[None]]) -> None:
        """The first rank asks something of the job, and all hear what came of it; the world is an elastic one."""
        wrong = None
        if self.rank == 0:
            try:
                await call(self.comm)
            except ConfigError as error:
                wrong = str(error)
        wrong = await self.comm.broadcast_object(wrong, 0, "kfcomm/adaptation/size")
        if wrong is not None:
            raise ConfigError(wrong)

    async def together(self, what: str, call: Callable[[Communicator], Awaitable[T]], runner: Runner) -> T:
        """See `Host`."""
        result = await call(self.comm)
        if self.recorder is not None:
            self.recorder.done_together(runner, what, result)
        return result

    def overruled(self, request: Request[Any], by: str, words: str) -> None:
        """See `Host`."""
        super().overruled(request, by, words)
        self._note(request.subject, request.runner, words=request.words, overruled=words, by=by)

    def switched_off(self, runner: Runner, what: str, evidence: Mapping[str, Any]) -> None:
        """See `Host`."""
        super().switched_off(runner, what, evidence)
        self._note("", runner, off=what, evidence=evidence)

    def met_again(self) -> None:
        """See `Host`."""
        if self.recorder is not None:
            self.recorder.met()

    def _note(self, subject: str, who: Named | None, **what: Any) -> None:
        if self.recorder is not None:
            self.recorder.changed(subject, who, what)

"""Outcomes of the guard's judgements, on all ranks alike: decisions, samples of void steps, kept states."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kfcomm.adapt.guard import GuardActions, GuardSteps
from kfcomm.adapt.policy import Decision
from kfcomm.errors import ConfigError
from kfcomm.torch.reductions import is_elastic

if TYPE_CHECKING:
    from kfcomm.adapt.guard import Void
    from kfcomm.torch.attached import Attached

logger = logging.getLogger("kfcomm.adapt")


class Outcomes:
    """Outcomes of the steps of one attachment.

    Attributes:
        decisions: of the guard so far.
    """

    def __init__(self, comm: Any) -> None:
        self.decisions: list[Decision] = []
        self._comm = comm
        self._saved: Any = None

    def void(self, number: int, void: Void, step: Any, actions: GuardActions) -> None:
        """Give the samples of a void step back, but for those that are set aside.

        Args:
            number: of the step.
            void: the judgement.
            step: of the elastic job; None outside of one.
            actions: of the guard.
        """
        given = ""
        if step is not None:
            step.void()
            given = "; its samples are given again"
            if actions.set_aside:
                step.sampler.set_aside(actions.set_aside)
                given += f", but for {len(actions.set_aside)}, which are set aside"
        self._decide(number, f"{void}{given}", {"ranks": void.ranks})

    def keep_or_go_back(self, number: int, actions: GuardActions, elastic: Any, attached: Attached) -> None:
        """Keep the state of training, or continue from the state that was kept last.

        Raises:
            ConfigError: in an elastic job, outside of ``attached.steps()``: ranks that join would have no kept state.
        """
        if not (actions.keep or actions.roll_back):
            return
        if elastic is None and is_elastic(self._comm):
            raise ConfigError("GuardSteps(roll_back_after=...) in an elastic job needs the steps of attached.steps()")
        if actions.keep:
            if elastic is None:
                self._saved = copy.deepcopy(attached.state_dict())
            else:
                elastic.keep()
        if actions.roll_back:
            self._decide(number, "continues from the state that was kept last", {})
            if elastic is not None:
                elastic.roll_back()  # at the next boundary
            elif self._saved is not None:
                attached.load_state_dict(copy.deepcopy(self._saved))

    def _decide(self, number: int, what: str, evidence: Mapping[str, Any]) -> None:
        decision = Decision(number, GuardSteps.__name__, what, evidence)
        self.decisions.append(decision)
        logger.log(logging.WARNING if self._comm.rank == 0 else logging.DEBUG, "%s", decision)
        for observer in self._comm._session.engine.all_observers():
            observer.instant("decision", policy=decision.policy, what=what, why=decision.why)

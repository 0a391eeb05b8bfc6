# Written by `python -m tests.sync.stub` from the signatures of the asyncio verbs: change those, and run it.
from typing import Any

from kfcomm.adapt import Decision, Hyperparameters, Policy, StepMetrics
from kfcomm.adapt.adaptation import Adaptation
from kfcomm.adapt.guarded import StepGuard
from kfcomm.elastic.loop import Elastic
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.driver import Driver

class AdaptationMembers(Adapter[Adaptation]):
    """Members of ``kfcomm.adapt.Adaptation``."""

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Policies that are not switched off."""

    @property
    def decisions(self) -> list[Decision]:
        """Decisions, with their evidence; the same on every rank, from its first step on."""

    @property
    def metrics(self) -> StepMetrics | None:
        """Metrics of the last step at whose end the ranks met; None before."""

    @property
    def num_steps(self) -> int:
        """Number of steps that have ended."""

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters in force; the same object until one changes."""

    @property
    def batch_size(self) -> int | None:
        """Number of samples of a step, of all ranks together; None if the program has not given it."""

    @property
    def local_batch_size(self) -> int | None:
        """This rank's share of the batch; shares differ by at most one, the first ones are larger."""

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next step, lowered after a void one by `GuardSteps`; None if it was not given."""

    @property
    def agreement(self) -> str | None:
        """Name of the algorithm by which the replicas agree; None if the program has not given it."""

    @property
    def wire_dtype(self) -> str | None:
        """Dtype of gradients on the wire, for the argument ``wire_dtype`` of collectives."""

    @property
    def num_samples(self) -> int:
        """Number of samples of all steps that count; see ``Context.num_samples``."""

    @property
    def is_over(self) -> bool:
        """Whether a policy has asked for the end of training; the same on all ranks after each step."""

    def value(self, name: str) -> Any:
        """Value of a hyperparameter by its name, also of a free one, in the next step."""

    def state_dict(self) -> Any:
        """State for a checkpoint: hyperparameters, counts, and policies; None before the first step."""

    def load_state_dict(self, state: Any) -> None:
        """Continue with the ``state_dict`` of another adaptation, from the next step on; called on all ranks."""

    def observe(self, /, **values: float) -> None:
        """Report numbers of this step to the policies of all ranks, at the next meeting."""

    @property
    def guard(self) -> StepGuard:
        """Guard of the steps, for algorithms that reduce gradients; see ``Step.guarded``."""

class ElasticMembers:
    """Members of ``kfcomm.elastic.Elastic``."""

    _inner: Elastic
    _driver: Driver

    @property
    def is_released(self) -> bool:
        """Whether a change of size has released this rank: its loop has ended, and it has to close."""

    @property
    def is_replaying(self) -> bool:
        """Whether this rank has joined, or resumes from a checkpoint, and has not reached the steps to resume."""

    @property
    def num_changes(self) -> int:
        """Number of changes of the ranks while it was open."""

    @property
    def paused_s(self) -> float:
        """Total time that calls have waited for changes of the ranks, in seconds."""

    @property
    def heirs(self) -> dict[int, int | None]:
        """Uid of the heir of each rank that took part in the last complete ``commit`` and is lost, by its uid."""

    @property
    def inherited(self) -> dict[int, dict[str, Any]]:
        """Committed values of ``own`` of each rank to which this rank is heir, by uid and name; NumPy arrays."""

    def restore(self) -> None:
        """Restore this rank's ``own`` from the last complete ``commit``."""

    def keep(self) -> None:
        """Copy the state, and the positions of samplers, in memory at the boundary after this step."""

    def roll_back(self) -> None:
        """Return to the copy of ``keep`` at the boundary after this step; all ranks call it in the same step."""

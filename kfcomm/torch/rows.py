"""Rows of a step in which an algorithm exchanges models and gradients by itself.

Such gradients are not in buckets. Each rank squares its own when the optimizer's step begins, and sends a separate row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import BucketPlace
from kfcomm.torch.marks import GradientMarks
from kfcomm.torch.reductions import aside
from kfcomm.torch.tensors import read
from kfcomm.torch.watch import GradientWatch

if TYPE_CHECKING:
    from kfcomm.sync import Communicator


class Rows(Protocol):
    """Rows of all ranks: of a `GradientExchange`, or `StepRows`."""

    @property
    def is_left_out(self) -> bool:
        """Whether a ``GradScaler`` lets this rank's step update nothing, though the others' may."""

    @property
    def places(self) -> Sequence[BucketPlace]:
        """All gradients."""

    @property
    def means(self) -> Sequence[BucketPlace]:
        """Gradients that are averaged, and so the same on all ranks."""

    def wait_for_rows(self) -> None:
        """Wait for the rows of all ranks."""

    def put_back(self) -> None:
        """Make the state of compressors what it was before the step."""

    def begin_step(self) -> None:
        """Note that the step was made."""


class StepRows:
    """Rows of all ranks, one for each step: what a `GradientExchange` has with its marks.

    Args:
        comm: of the ranks.
        name: of the collective.
        parameters: with their names.
        watch: whose rows they are.
        is_left_out: whether this rank's step will update nothing, since a ``GradScaler`` has found infinite gradients.
    """

    def __init__(
        self, comm: Communicator, name: str, parameters: Mapping[str, torch.Tensor], watch: GradientWatch,
        is_left_out: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._comm, self._name = comm, name
        self._parameters = parameters
        self._watch = watch
        self._asked = is_left_out
        self._marks: GradientMarks | None = None
        self._births: Any = None

    means: Sequence[BucketPlace] = ()  # known only after the algorithm

    @property
    def is_left_out(self) -> bool:
        """Whether this rank's step will update nothing, though the others' may."""
        return self._asked()

    @property
    def places(self) -> list[BucketPlace]:
        """Gradients that exist, where they are."""
        return [BucketPlace(name, one, one.grad) for name, one in self._parameters.items() if one.grad is not None]

    def wait_for_rows(self) -> None:
        """Square this rank's gradients, and exchange the rows, if steps are guarded."""
        if not self._watch.guards:
            return
        if not self.is_left_out:
            for place in self.places:
                if place.view.layout is not torch.strided:
                    raise ConfigError(f"the gradient of {place.name} is sparse: only dense ones can be judged")
                alone: Any = SimpleNamespace(places=[place], is_exact=False)
                self._watch.left(alone, read(place.view))
        if self._marks is None or self._births != self._comm.births:
            self._births = self._comm.births
            self._marks = GradientMarks(
                self._comm, (), aside(self._comm, f"{self._name}/rows"), num_numbers=self._watch.num_numbers
            )
        self._marks.begin(0, self._watch.row())
        self._marks.wait()
        self._watch.told(self._comm.size, self._marks.ranks, self._marks.numbers)

    def put_back(self) -> None:
        """Nothing: there are no compressors."""

    def begin_step(self) -> None:
        """Nothing."""

"""Guarded steps of an attachment: evidence from the rows of all ranks, and the state before a void step.

A step is judged within ``optimizer.step()``, before any update, when the rows of the backward pass have come. All ranks
read the same rows. A step that the program or its ``GradScaler`` skips is not judged. A void step

- makes no update: the optimizer sees no parameters during its step;
- restores the model's buffers, which the forward pass has changed already, and the state of compressors;
- sets gradients to zero, so that nothing of it is added to the next step.

Buffers are copied before the first forward pass after a step. If a ``GradScaler`` has skipped a step because of
infinite gradients, and buffers are not finite either, they are restored before the next forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.adapt.guard import GuardSteps, StepEvidence, Void
from kfcomm.torch.compiling import uncompiled
from kfcomm.torch.marks import GradientMarks
from kfcomm.torch.reductions import aside
from kfcomm.torch.watch import Array, exact_squared_norm_of, unfit

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kfcomm.sync import Communicator
    from kfcomm.torch.buckets import Bucket, BucketPlace

GIVEN, LATE = 1, 2
"""Of a rank's loss: it is in the row; the rank has observed one only after its pass, in some earlier step."""
MAX_NAMES = 4
"""Parameters that a rank names."""


class Evidence:
    """Numbers of a pass for the guard: each rank's loss, and the squared norm of its own gradient.

    Attributes:
        names: parameters in which this rank's own gradients are not finite, since the last step.
        rows: of the ranks that were there, by rank; None before the first pass of a step.
    """

    num_numbers = 3
    is_looking = True

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: dict[int, Sequence[float]] | None = None
        self.size = 0
        self._first_bad: dict[int, Sequence[float]] | None = None
        self._sq_norm = 0.0
        self._loss: float | None = None
        self._is_sent = False  # the row of this step's latest pass
        self._is_bad = False
        self._is_late = False

    def observe(self, loss: float) -> None:
        """Take this rank's loss of the step."""
        self._loss = loss
        self._is_late = self._is_late or self._is_sent

    def catch_up(self) -> None:
        """Nothing: a step waits for its numbers."""

    def left(self, bucket: Bucket, sq_norm: float | torch.Tensor, cost_s: float) -> None:
        """Add a bucket."""
        sq_norm = float(sq_norm)
        self._sq_norm += sq_norm
        if not math.isfinite(sq_norm):
            self.names += unfit(bucket)

    def arrived(self, bucket: Bucket) -> None:
        """Nothing."""

    def row(self) -> Sequence[float]:
        """The squared norm, the loss, and what is known of that."""
        sq_norm, self._sq_norm = self._sq_norm, 0.0
        self._is_sent = True
        return [sq_norm, self._loss or 0.0, GIVEN * (self._loss is not None) + LATE * self._is_late]

    def told(self, ranks: Sequence[int], numbers: Array) -> None:
        """Keep the rows until the step."""
        self.size = len(numbers)
        self.rows = {rank: numbers[rank].tolist() for rank in ranks}
        # Later passes of the step add to a gradient that all ranks have got from this one.
        self._is_bad = not self.is_finite
        if not self._is_bad:
            self.names.clear()
        if self._first_bad is None and self._is_bad:
            self._first_bad = self.rows

    @property
    def is_finite(self) -> bool:
        """Whether all norms of the latest pass are finite."""
        return self.rows is None or all(math.isfinite(row[0]) for row in self.rows.values())

    @property
    def is_zero(self) -> bool:
        """Whether all gradients are zeros, as a void step leaves them."""
        return all(row[0] == 0 for row in (self.rows or {}).values())

    @property
    def lacks_losses(self) -> bool:
        """Whether losses are observed too late for the rows, on some rank; all ranks answer alike."""
        rows = (self.rows or {}).values()
        return any(int(row[2]) & LATE for row in rows) and not all(int(row[2]) & GIVEN for row in rows)

    def late_row(self) -> Sequence[float]:
        """The loss, and whether there is one."""
        return [self._loss or 0.0, float(self._loss is not None)]

    def of_step(self, step: int, scale: float, batch: Any, late: dict[int, Sequence[float]]) -> StepEvidence:
        """Evidence for the guard."""
        rows = self.rows or {}
        culprits = rows if self._first_bad is None or self.is_finite else self._first_bad
        losses: list[float | None] = [None] * self.size
        sq_norms: list[float | None] = [None] * self.size
        for rank, row in rows.items():
            sq_norms[rank] = culprits.get(rank, row)[0] / (scale * scale)
            if int(row[2]) & GIVEN:
                losses[rank] = row[1]
        for rank, (loss, is_given) in late.items():
            if is_given:
                losses[rank] = loss
        return StepEvidence(step, losses, sq_norms, batch)

    def leave_out(self) -> bool:
        """Whether the latest pass was not finite, and no step has followed; once. Then its loss is forgotten."""
        was_bad, self._is_bad = self._is_bad, False
        if was_bad:
            self._loss = None
        return was_bad

    def begin_step(self) -> None:
        """Forget the step that is over."""
        self.names = []
        self.rows = self._first_bad = None
        self._loss = None
        self._is_sent = self._is_bad = False


class ForwardHook:
    """Hook before forward passes of a module. A copy of the module, or one that was pickled, has one without a call."""

    def __init__(self, call: Callable[[torch.nn.Module], object] | None = None) -> None:
        self._call = call

    @uncompiled
    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        """Make the call."""
        if self._call is not None:
            self._call(module)

    def __reduce__(self) -> Any:
        return ForwardHook, ()


def before_forward(module: torch.nn.Module, call: Callable[[torch.nn.Module], object]) -> RemovableHandle:
    """Call ``call(module)`` before each forward pass of a module, and before its other hooks."""
    found: RemovableHandle = module.register_forward_pre_hook(ForwardHook(call), prepend=True)
    return found


class SavedBuffers:
    """Copies of a model's buffers, from before the forward passes of a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._of = [module for module in model.modules() if module._buffers]
        self._kept: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        self._is_fresh: set[torch.nn.Module] = set()

    def hooks(self, model: torch.nn.Module, before: Callable[[], object]) -> list[RemovableHandle]:
        """Call ``before()``, and copy buffers that are not copied since the last step, before forward passes."""
        # A program may call parts of its model, so these, and each module with buffers, have hooks of their own.
        found = [before_forward(one, self._keep) for one in self._of]
        found += [before_forward(one, lambda _: before()) for one in model.children()]
        found.append(before_forward(model, lambda _: self.keep()))
        return [*found, before_forward(model, lambda _: before())]  # the last one is called first

    def begin_step(self) -> None:
        """Copy buffers again before the next forward pass."""
        self._is_fresh.clear()

    def keep(self) -> None:
        """Copy all buffers that are not copied yet."""
        for module in self._of:
            self._keep(module)

    @torch.inference_mode(mode=False)  # type: ignore[untyped-decorator]
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _keep(self, module: torch.nn.Module) -> None:
        if module in self._is_fresh:
            return
        self._is_fresh.add(module)
        kept = self._kept.setdefault(module, {})
        for name, buffer in module._buffers.items():
            if buffer is None:
                kept.pop(name, None)
            elif name in kept and (kept[name].shape, kept[name].dtype) == (buffer.shape, buffer.dtype):
                kept[name].copy_(buffer)
            else:
                kept[name] = buffer.detach().clone()

    @property
    def are_damaged(self) -> bool:
        """Whether a number has become infinite or NaN since they were copied."""
        for module in self._is_fresh:
            for name, kept in self._kept[module].items():
                buffer = module._buffers.get(name)
                if buffer is not None and not buffer.isfinite().all() and kept.isfinite().all():
                    return True
        return False

    @torch.inference_mode(mode=False)  # type: ignore[untyped-decorator]
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def put_back(self) -> None:
        """Make the buffers what they were."""
        for module in self._is_fresh:
            for name, kept in self._kept[module].items():
                buffer = module._buffers.get(name)
                if buffer is not None and (kept.shape, kept.dtype) == (buffer.shape, buffer.dtype):
                    buffer.copy_(kept)
                else:
                    module._buffers[name] = kept.clone()


class Guarded:
    """Judge of the steps of one attachment.

    Attributes:
        evidence: part of the exchange's watch.
        buffers: of the model.
    """

    def __init__(self, guard: GuardSteps, comm: Communicator, model: torch.nn.Module, name: str) -> None:
        self.guard = guard
        self.evidence = Evidence()
        self.buffers = SavedBuffers(model)
        self._order = {one: number for number, (one, _) in enumerate(model.named_parameters())}
        self._comm = comm
        self._name = name
        self._births: Any = None
        self._late: GradientMarks | None = None
        self._void: Void | None = None
        self.is_again = False
        """Whether the judgement is that of the step before: another step on gradients that were void."""

    def begin_step(self) -> None:
        """Begin the next step."""
        self.evidence.begin_step()
        self.buffers.begin_step()

    def judge(self, step: int, scale: float, batch: Any, means: Iterable[BucketPlace]) -> Void | None:
        """Judge a step by its rows, which have come. All ranks call it.

        Args:
            step: number of the step.
            scale: factor of the loss whose gradients were exchanged.
            batch: see `StepEvidence`.
            means: gradients that are the same on all ranks, where they are averaged.

        Returns:
            None for a good step.

        Raises:
            GuardFailed: see `GuardSteps.judge`.
        """
        evidence = self.evidence
        has_news = evidence.rows is not None and (self._void is None or not evidence.is_zero)
        self.is_again = not has_news and self._void is not None
        if has_news:
            found = evidence.of_step(step, scale, batch, self._losses())
            self._void = self.guard.judge(_with_lost_ranks(found, means))
        return self._void

    def _losses(self) -> dict[int, Sequence[float]]:
        """Losses, each with 1 where there is one, that are not in the rows."""
        if not self.evidence.lacks_losses:
            return {}
        if self._late is None or self._births != self._comm.births:
            self._births = self._comm.births
            self._late = GradientMarks(self._comm, (), aside(self._comm, f"{self._name}/losses"), num_numbers=2)
        self._late.begin(0, self.evidence.late_row())
        self._late.wait()
        return dict(zip(self._late.ranks, self._late.numbers.tolist(), strict=True))

    def named(self, places: Iterable[BucketPlace]) -> Void:
        """The judgement of a void step, with the parameters that have wrong numbers: the first ones, or the largest.

        Args:
            places: of all gradients, which have arrived.
        """
        void, names, mine = self._void, list[str](), self._comm.rank
        if void is None:
            raise RuntimeError("the step is good")
        if mine in void.ranks:
            names = sorted(set(self.evidence.names), key=self._order.__getitem__)
            names = names or (_largest(places) if void.is_finite else [])
        if len(names) > MAX_NAMES:
            names[MAX_NAMES - 1 :] = [f"{len(names) - MAX_NAMES + 1} more"]
        told = self._comm.all_gather_object([mine, names], aside(self._comm, f"{self._name}/culprits"))
        self._void = replace(void, names=tuple(f"rank {rank}: {', '.join(given)}" for rank, given in told if given))
        return self._void


def _with_lost_ranks(evidence: StepEvidence, means: Iterable[BucketPlace]) -> StepEvidence:
    """Evidence in which a rank that was lost before its row has the norm of the mean that it may have part in."""
    views = [place.view for place in means]
    if None not in evidence.sq_norms or not views:
        return evidence
    of_mean = sum(map(exact_squared_norm_of, views))
    return replace(evidence, sq_norms=[of_mean if one is None else one for one in evidence.sq_norms])


def _largest(places: Iterable[BucketPlace]) -> list[str]:
    """Names of the parameters whose gradients make up most of the norm, the largest first."""
    squares = {place.name: exact_squared_norm_of(place.view) for place in places}
    whole, found = sum(squares.values()), list[str]()
    for name in sorted(squares, key=lambda one: -squares[one]):
        found.append(name)
        if len(found) == MAX_NAMES or sum(squares[one] for one in found) > whole / 2:
            break
    return found

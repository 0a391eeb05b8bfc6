"""Driver of an attachment's steps: monitor, guard and policies, at the hooks of the optimizer's step.

A step of the program::

    backward pass       squared norms are taken as buckets pass; the rows of all ranks come with the marks
    optimizer.step()    before: the rows are judged, the monitor learns from them; a void step sees no parameters
                        the step itself, with the learning rate times the factors of policies and guard
                        after: the policies' meeting, and what they have changed, for the next step

One step is one ``optimizer.step()``, whatever number of passes came before it. Another algorithm begins before the next
forward pass, since hooks on steps cannot be exchanged from within one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.adapt.guard import GuardSteps
from kfcomm.errors import ConfigError
from kfcomm.torch.adapting import Adapted, ChangeReceivers, Policies, RateFactors, StepSamples
from kfcomm.torch.compiling import uncompiled
from kfcomm.torch.guarded import Guarded, before_forward
from kfcomm.torch.measuring import Measuring
from kfcomm.torch.outcomes import Outcomes
from kfcomm.torch.steps import Closure, ModelCopy, Withholding, is_outermost, is_skipped, loss_scale
from kfcomm.torch.watch import GradientWatch, WatchPart
from kfcomm.train import GradientMonitor
from kfcomm.train.composite import CompositeState
from kfcomm.train.policies import NoiseScaleBatch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kfcomm.adapt.guard import Void
    from kfcomm.adapt.policy import Decision
    from kfcomm.elastic.course import Step
    from kfcomm.sync.elastic import Elastic
    from kfcomm.torch.attached import Attached
    from kfcomm.torch.rows import Rows


class StepDriver:
    """Monitor, guard and policies of one attachment.

    Args:
        model: attached.
        optimizer: whose steps are driven.
        comm: of the ranks.
        name: of the collectives.
        adapted: what the program asks for.

    Attributes:
        monitor: of the gradients; None without one.
        watch: for the exchange.
        last_void: the judgement of the latest step, if that was void.

    Raises:
        ConfigError: a batch size is missing; there are two guards.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Any, name: str, adapted: Adapted
    ) -> None:
        self._model, self._optimizer, self._comm = model, optimizer, comm
        self._batch_size, self._sampler = adapted.batch_size, adapted.sampler
        self._attached: Any = None
        self._follow: Callable[[str | None, Mapping[str, Any]], object] = lambda *_: None
        self._policies: Policies | None = None
        self._rows: Any = None
        self._elastic: Any = None
        self._step: Any = None  # of the elastic job
        self._num_steps = 0
        self._is_judged = self._is_skipped = False  # the step under way
        self._outcomes = Outcomes(comm)
        self._copy: ModelCopy | None = None
        self._rate = 1.0  # factor that the guard asks for, for the step under way
        self.last_void: Void | None = None
        guards = [policy for policy in adapted.policies if isinstance(policy, GuardSteps)]
        if len(guards) > 1:
            raise ConfigError(f"policies have {len(guards)} GuardSteps: give one, which judges all steps")
        self._guarded = Guarded(guards[0], comm, model, name) if guards else None
        self.monitor = self._monitor(adapted.monitor)
        self._measuring = None if self.monitor is None else Measuring(self.monitor, name)
        parts: list[WatchPart] = [] if self._guarded is None else [self._guarded.evidence]
        parts += [] if self._measuring is None else [self._measuring]
        self.watch = GradientWatch(parts, guards=bool(guards))
        self._rates, self._withholding = RateFactors(optimizer), Withholding(optimizer)
        others = [policy for policy in adapted.policies if policy not in guards]
        for policy in others:
            if isinstance(policy, NoiseScaleBatch) and policy.optimizer is None:
                policy.optimizer = type(optimizer).__name__
        if others:
            changes = ChangeReceivers(self._set_batch_size, self._set_wire_dtype, self._set_free)
            self._policies = Policies(comm, others, adapted.followed(optimizer), changes)

    def _monitor(self, given: Any) -> GradientMonitor | None:
        if not given or isinstance(given, GradientMonitor):
            return given or None
        options = dict(given) if isinstance(given, Mapping) else {}
        if self.local_batch_size is None:
            raise ConfigError("attach(monitor=True) needs to know the batch: batch_size=, the samples of all ranks")
        return GradientMonitor(self._comm, self.local_batch_size, **{"every": "auto", **options})

    def drive(self, rows: Rows) -> None:
        """Drive the steps of another method, whose rows these are."""
        self._rows = rows
        if self._policies is not None:
            self._set_wire_dtype(self._policies.hyperparameters.wire_dtype)

    # ---------------------------------------------------------------- for the program

    @property
    def batch_size(self) -> int | None:
        """Samples of the next step, over all ranks; None if they are not known."""
        return self._batch_size if self._sampler is None else self._sampler.batch

    @property
    def local_batch_size(self) -> int | None:
        """This rank's samples: those of the elastic step under way, or its share; the first ranks' may be larger."""
        if self._step is not None:
            return len(self._step.indices)
        whole, size = self.batch_size, self._comm.size
        return None if whole is None else whole // size + (self._comm.rank < whole % size)

    @property
    def is_over(self) -> bool:
        """Whether a policy has asked for the end of training; the same on all ranks after each step."""
        return self._policies is not None and self._policies.is_over

    @property
    def decisions(self) -> list[Decision]:
        """Decisions of the guard and of policies, by step; the same on every rank."""
        found = [*self._outcomes.decisions, *([] if self._policies is None else self._policies.decisions)]
        return sorted(found, key=lambda one: one.step)

    def observe(self, values: Mapping[str, Any]) -> None:
        """Take numbers of this rank for the guard and for policies, before the step that they are of."""
        numbers = {name: _number(value) for name, value in values.items()}
        if self._guarded is not None and "loss" in numbers:
            self._guarded.evidence.observe(numbers["loss"])
        if self._policies is not None:
            self._policies.observe(numbers)

    # ---------------------------------------------------------------- at the hooks

    def hooks(
        self, attached: Attached, follow: Callable[[str | None, Mapping[str, Any]], object]
    ) -> list[RemovableHandle]:
        """Register hooks on the ends of steps, and on forward passes.

        Args:
            attached: whose state is kept.
            follow: called with the name of an algorithm, and options, before each forward pass.
        """
        self._attached = attached
        self._follow = follow
        after = self._optimizer.register_step_post_hook(self._after_step)
        self._optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # others may look at the groups
        found = [after]
        if self._guarded is not None:
            found += self._guarded.buffers.hooks(self._model, self._before_forward)
        if self._policies is not None and self._policies.changes_algorithms:
            # A program may call parts of its model.
            found += [before_forward(one, self._follow_agreement) for one in self._model.modules()]
        return found

    def _before_forward(self) -> None:
        # A scaler has left the step out: its infinite gradients may come from infinite inputs.
        if self._guarded is not None and self._guarded.evidence.leave_out():
            self._rows.put_back()
            self._repair()

    def _repair(self) -> None:
        if self._guarded is not None and self._guarded.buffers.are_damaged:
            self._guarded.buffers.put_back()

    def _follow_agreement(self, *_: Any) -> None:
        if self._policies is not None:
            options = {name: one for name, one in self._policies.changed.items() if not self._is_of_groups(name)}
            self._follow(self._policies.hyperparameters.agreement, options)

    def _is_of_groups(self, name: str) -> bool:
        return any(name in group for group in self._optimizer.param_groups)

    def judge(self, finish: Callable[[], object], scale: float | None = None) -> bool:
        """Judge a step without a closure, once, before anything of it is applied or exchanged.

        Args:
            finish: waits for everything that was deferred or is under way.
            scale: factor of the loss of these gradients; by default that of the ``GradScaler`` that makes the step.

        Returns:
            False for a void step, whose gradients are zeros now.

        Raises:
            CollectiveError: the backward pass has failed on a rank.
            GuardFailed: on all ranks, see `GuardSteps`.
        """
        if self._is_judged:
            return self.last_void is None
        self.last_void, self._is_judged = None, True
        if self._guarded is not None or self._policies is not None:
            self._rows.wait_for_rows()
        scale = loss_scale(self._optimizer) if scale is None else scale
        if self._is_void(scale):
            finish()
            self._undo()
        elif self._rows.is_left_out:
            self._repair()
        elif self._measuring is not None:
            self._measuring.stepped(scale)
        return self.last_void is None

    def begin(self, finish: Callable[[], object], scale: float | None = None) -> bool:
        """Begin a step without a closure, within its hook; arguments and results as of ``judge``.

        The optimizer will see no parameters in a void step, and else the learning rates times their factor.
        """
        self._give_back()
        self._is_skipped = is_skipped(self._optimizer)
        if self._is_skipped:
            return True
        if not self.judge(finish, scale):
            self._withholding.begin()
            return False
        self._rates.begin(self._factor)
        return True

    def around(self, finish: Callable[[], object], settled: Callable[[Any], Any]) -> Callable[[Closure], Any]:
        """Begin a step with a closure; returns the function that evaluates it, and judges the first evaluation.

        Args:
            finish: see ``judge``.
            settled: exchanges the gradients of an evaluation; from its loss to the loss of all ranks.
        """
        self._give_back()
        self._rates.begin(self._factor)
        self.last_void, self._is_judged = None, False
        self._copy = None if self._guarded is None else ModelCopy(self._optimizer)
        first: list[Any] = []

        def evaluated(closure: Closure) -> Any:
            if self.last_void is not None:  # the optimizer is to come to its end
                return first[0]
            loss = closure()
            if self._is_judged:  # a line search may look at any point
                return settled(loss)
            first.append(loss)
            if self._guarded is not None and loss is not None:
                self._guarded.evidence.observe(_number(loss))
            return settled(loss) if self.judge(finish, 1.0) else loss

        return evaluated

    def _give_back(self) -> None:
        # A step that has raised may have left these.
        self._withholding.end()
        self._rates.end()

    @property
    def _factor(self) -> float:
        factor = 1.0 if self._policies is None else self._policies.factor
        return factor * self._rate

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        if not is_outermost(optimizer):
            return
        self._give_back()
        kept, self._copy = self._copy, None
        if self._is_skipped:
            return
        if kept is not None and self.last_void is not None:
            kept.put_back()
        self._is_judged = False
        self._rows.begin_step()
        if self._guarded is not None:
            self._guarded.begin_step()
            self._rate = self._guarded.guard.actions.rate
            number = self._num_steps
            self._outcomes.keep_or_go_back(self._number, self._guarded.guard.actions, self._elastic, self._attached)
            self._num_steps = number  # steps count on
        self._num_steps += 1
        if self._policies is not None:
            if self.monitor is not None:
                self._policies.observe(self.monitor.observed())
            self._policies.end_step(self._samples())
        self._tell_batch()

    # ---------------------------------------------------------------- the guard

    @property
    def _number(self) -> int:
        """Number of the step; that of the elastic job counts what was repeated."""
        return self._num_steps if self._step is None else int(self._step.number)

    def _is_void(self, scale: float) -> bool:
        if self._guarded is None:
            return False
        batch = None if self._step is None else self._step.batch
        self.last_void = self._guarded.judge(self._number, scale, batch, self._rows.means)
        return self.last_void is not None

    def _undo(self) -> None:
        """Leave gradients, buffers and compressors as before the step, and give its samples back."""
        guarded = self._guarded
        if guarded is None:
            return
        if not guarded.is_again:
            self.last_void = guarded.named(self._rows.places)
        self._rows.put_back()
        with torch.no_grad():
            for place in self._rows.places:
                if place.parameter.grad is not None:
                    place.parameter.grad.zero_()
        guarded.buffers.put_back()
        if self._measuring is not None:
            self._measuring.dropped()
        if guarded.is_again:  # another step on gradients that were judged already
            return
        if self.last_void is not None:
            self._outcomes.void(self._number, self.last_void, self._step, guarded.guard.actions)

    # ---------------------------------------------------------------- an elastic job

    def through(self, steps: Iterator[Step], elastic: Elastic) -> Iterator[Step]:
        """Drive the steps of an elastic job."""
        self._elastic = elastic
        try:
            for step in steps:
                self._step = step
                self._tell_batch()
                yield step
                self._step = None
        finally:
            self._step = self._elastic = None
            self.close()

    # ---------------------------------------------------------------- changes by policies

    def _set_batch_size(self, batch_size: int) -> None:
        self._batch_size = batch_size
        if self._sampler is not None:
            self._sampler.batch = batch_size

    def _set_wire_dtype(self, name: str | None) -> None:
        for bucket in getattr(self._rows, "buckets", ()):
            bucket.average.set_wire_dtype(name)

    def _set_free(self, name: str, value: Any) -> None:
        """Set an option of the optimizer's groups; those of the algorithm change before the next forward pass."""
        for group in self._optimizer.param_groups:
            if name in group:
                group[name] = value

    def _samples(self) -> StepSamples:
        if self.last_void is not None:
            return StepSamples((), None if self._step is None else self._step.sampler)
        if self._step is None:
            return StepSamples(range(self.batch_size or 0))
        return StepSamples(self._step.batch, self._step.sampler)

    def _tell_batch(self) -> None:
        batch = self.local_batch_size
        if self.monitor is not None and batch:
            self.monitor.batch = batch

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """State of monitor, guard and policies."""
        self.watch.catch_up()
        return {"num_steps": self._num_steps, **self._state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._num_steps = int(state["num_steps"])
        self._state.load_state_dict(state)
        self._rate = 1.0 if self._guarded is None else self._guarded.guard.actions.rate

    def merging(self) -> dict[str, str]:
        """Keys of the state whose values differ between ranks."""
        return self._state.merging()

    @property
    def _state(self) -> CompositeState:
        guard = None if self._guarded is None else self._guarded.guard
        every: dict[str, Any] = {"monitor": self.monitor, "guard": guard, "policies": self._policies}
        return CompositeState({name: one for name, one in every.items() if one is not None})

    def close(self) -> None:
        """End the policies' meetings."""
        if self._policies is not None:
            self._policies.close()


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)

"""Policies, the context they are given, and their requests to all ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kfcomm.adapt.hyperparameters import Hyperparameters, in_words
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.requests import SIZE, STOP, STRATEGY, Request, sign_of, words_of
from kfcomm.common.arguments import plain_text, whole_number
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.adapt.host import Action, PolicyHost
    from kfcomm.adapt.runner import Runner
    from kfcomm.world.communicator import Communicator


__all__ = ["Context", "Decision", "Policy", "Request", "sign_of"]

T = TypeVar("T")

MAX_SHOWN = 16
"""Items of a sequence in the log."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a policy, with its evidence.

    Attributes:
        step: number of the step at whose end it was made.
        policy: name of the policy.
        what: in words.
        evidence: the numbers behind it.
    """

    step: int
    policy: str
    what: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The evidence in words."""
        return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in self.evidence.items())

    def __str__(self) -> str:
        return f"step {self.step}: {self.policy}: {self.what}" + (f" ({self.why})" if self.why else "")


class Policy:
    """Base of policies: override what you need. Each method may be a plain or an ``async`` one.

    The same policies, in the same order, are given to ``Adaptation`` on every rank. They decide by ``ctx`` only, which
    is the same on every rank: without clocks, random numbers or the rank. If two policies ask for the same thing at
    once, the first in that order wins.

    A policy that raises, on one rank or on all, or that asks for different things on different ranks, is switched off
    on every rank, which is logged with its name; the job continues without it.

    Attributes:
        changes_back: its requests may set again what was taken back a few steps ago, as those of trials do; see
            ``Adaptation(rest=...)``.
    """

    changes_back: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name for the log."""
        return type(self).__name__

    def on_start(self, ctx: Context) -> Any:
        """Begin, before the first step; called again, for the new ``ctx.size``, when the ranks have changed."""

    def before_step(self, ctx: Context) -> Any:
        """Act before a step at whose end the ranks meet."""

    def after_step(self, ctx: Context) -> Any:
        """Act after such a step, with its ``ctx.metrics``."""

    def on_epoch_start(self, ctx: Context) -> Any:
        """Act before the first step of an epoch, in a program that has epochs: see ``Adaptation.epoch``."""

    def on_epoch_end(self, ctx: Context) -> Any:
        """Act after the last step of an epoch, ``ctx.epoch``."""

    def on_end(self, ctx: Context) -> Any:
        """End, after the last step; requests are not possible any more."""

    def state_dict(self) -> Any:
        """Return its state for all ranks when the ranks have changed; msgpack can carry it."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Continue with the ``state_dict`` of another rank, after ``on_start``; not called for None."""


class Context:
    """Interface of a policy to all ranks: shared state, and requests. It is the same object in every call."""

    def __init__(self, host: PolicyHost, runner: Runner) -> None:
        self._host = host
        self._runner = runner

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self._host.num_steps

    @property
    def num_samples(self) -> int:
        """Number of samples of all steps that count, of all ranks together.

        A step has the samples of its step of an ``Elastic``, where that is given, else a batch; void ones do not count.
        """
        return self._host.progress.num_samples

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self._host.progress.epoch

    @property
    def size(self) -> int:
        """Number of ranks."""
        size: int = self._host.comm.size
        return size

    @property
    def layout(self) -> Layout:
        """Hosts of the ranks."""
        layout: Layout = self._host.comm.layout
        return layout

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force."""
        strategy: AnyStrategy = self._host.comm.strategy
        return strategy

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters from the next step on; those of the last step are ``metrics.hyperparameters``."""
        return self._host.hyperparameters

    @property
    def set_by(self) -> Mapping[str, str]:
        """Name of the policy that has last changed ``"strategy"``, ``"size"`` or a hyperparameter, by that subject."""
        return MappingProxyType({subject: runner.name for subject, runner in self._host.holders.items()})

    @property
    def metrics(self) -> StepMetrics | None:
        """Metrics of the last step at whose end the ranks met; None before the first."""
        return self._host.metrics

    def decide(self, what: str, **evidence: Any) -> None:
        """Log and record a decision, with the numbers behind it."""
        self._host.decide(self._runner, what, evidence)

    def take_strategy(self) -> None:
        """Leave the strategy to policies: ``auto`` improves itself no more. For ``on_start``, on all ranks."""
        self._host.take_strategy()

    def set_strategy(self, strategy: StrategySpec, **evidence: Any) -> Request[bool]:
        """Ask for another strategy; see ``Communicator.set_strategy``.

        The ranks compare their requests at the next meeting: at the end of the next step or, if they have just done
        something together, at once. Then all of them change, unless an earlier policy asks for another strategy.

        Args:
            strategy: a name, a ``Strategy``, a ``GraphPair`` or a ``Graph``.
            evidence: numbers to be logged with the change.

        Returns:
            A request that may be awaited: True when the strategy is in force, False if another policy has overruled it,
            or if it was taken back a few steps ago (see ``Adaptation(rest=...)``). The policy is not called again until
            its method has returned.

        Raises:
            ConfigError: the strategy is unknown, or is for another number of ranks.
        """
        chosen = build(strategy, self.layout)

        words = words_of(f"strategy {chosen.name}", chosen.digest)

        async def change() -> bool:
            before = self.strategy
            if self._host.refuses(self._runner, STRATEGY, chosen.digest.hex(), words):
                return False
            await self._host.change_strategy(chosen, self._runner)
            self.decide(f"strategy {before.name} -> {chosen.name}", **evidence)
            return True

        return self._runner.ask(Request(words, change, STRATEGY))

    def set_batch_size(self, batch_size: int, **evidence: Any) -> Request[bool]:
        """Ask for another batch, of all ranks together; see ``set_strategy`` for when it holds, and what is returned.

        Raises:
            ConfigError: it is not a whole number from 1 on, or does not divide among the ranks, or the program does not
                follow a batch size.
        """
        return self._ask_for("batch_size", batch_size, evidence)

    def set_learning_rate(self, learning_rate: float, **evidence: Any) -> Request[bool]:
        """Ask for another learning rate, which is rounded to nine digits; see ``set_strategy``.

        Raises:
            ConfigError: it is not finite, or negative, or the program does not follow a learning rate.
        """
        return self._ask_for("learning_rate", learning_rate, evidence)

    def set_agreement(self, name: str, **evidence: Any) -> Request[bool]:
        """Ask for another algorithm by which the replicas agree; see ``set_strategy``.

        Raises:
            ConfigError: the program does not know this name.
        """
        return self._ask_for("agreement", name, evidence)

    def set_wire_dtype(self, name: str | None, **evidence: Any) -> Request[bool]:
        """Ask that gradients travel as ``"bfloat16"`` or ``"float16"``, or (None) as they are; see ``set_strategy``.

        Raises:
            ConfigError: the program does not know this name.
        """
        return self._ask_for("wire_dtype", name, evidence)

    def set(self, name: str, value: Any, **evidence: Any) -> Request[bool]:
        """Ask for another value of a hyperparameter, also of a free one; see ``set_strategy``.

        Raises:
            ConfigError: the program does not follow it, or the value is not valid: see ``Free``.
        """
        return self._ask_for(name, value, evidence)

    def stop(self, reason: str, **evidence: Any) -> Request[bool]:
        """Ask for the end of training: ``Adaptation.is_over`` becomes true, on all ranks after the same step."""

        async def change() -> bool:
            self._host.stop(plain_text(reason), self._runner)
            self.decide(f"stops: {reason}", **evidence)
            return True

        return self._runner.ask(Request(words_of(f"a stop: {reason}"), change, STOP))

    def resize(self, size: int, **evidence: Any) -> Request[bool]:
        """Ask for another number of ranks, in a program with an open ``Elastic``; see ``set_strategy``.

        When the ranks have agreed, the first rank asks the job. From then on, ranks join as they come, and surplus
        ranks leave, between steps; then ``on_start`` is called with the new ``ctx.size``.

        Raises:
            ConfigError: it is not a whole number from 1 on, or the ranks of this program cannot change. A size outside
                the job's range is an error of awaiting the request, on every rank.
        """
        wanted = _checked_size(self._host, size)

        async def change() -> bool:
            before = self.size
            if self._host.refuses(self._runner, SIZE, wanted, f"{wanted} ranks"):
                return False
            await self._host.change_size(wanted, self._runner)
            self.decide(f"asks for {wanted} ranks instead of {before}", **evidence)
            return True

        return self._runner.ask(Request(f"{wanted} ranks", change, SIZE))

    def replace(self, rank: int, **evidence: Any) -> Request[bool]:
        """Ask for another process in the place of a rank, in a program with an open ``Elastic``; see ``resize``.

        The rank is released between two steps from then on; the other process joins when it has started.

        Raises:
            ConfigError: the rank is out of range, or the ranks of this program cannot change.
        """
        checked = _checked_rank(self._host, rank)

        async def change() -> bool:
            await self._host.replace_rank(checked)
            self.decide(f"asks for another in place of rank {checked}", **evidence)
            return True

        return self._runner.ask(Request(f"another in place of rank {checked}", change))

    def keep(self, **evidence: Any) -> Request[bool]:
        """Ask for a copy of the state, in a program with an open ``Elastic``: see ``Elastic.keep``.

        Raises:
            ConfigError: the program has no open ``Elastic``.
        """
        return self._act("keep", "keeps the state", (), evidence)

    def roll_back(self, **evidence: Any) -> Request[bool]:
        """Ask to return to the state that was kept last: see ``Elastic.roll_back``, and ``keep``."""
        return self._act("roll_back", "restores the kept state", (), evidence)

    def set_aside(self, samples: Iterable[int], **evidence: Any) -> Request[bool]:
        """Ask that samples are not given again: see ``ElasticSampler.set_aside``.

        For programs that give their steps of an ``Elastic``: ``adaptation.step(step)``.
        """
        found = tuple(sorted({int(sample) for sample in samples}))
        return self._act("set_aside", f"sets {len(found)} samples aside", found, evidence)

    def together(self, what: str, call: Callable[[Communicator], Awaitable[T]]) -> Request[T]:
        """Ask for an action of all ranks together, such as a probe: ``call(comm)``, on every rank.

        Args:
            what: description of the action; equal descriptions are taken for the same action.
            call: may use collectives, because all ranks run it at the same place. Its result should be the same on
                every rank, if the policy decides by it, and a value for JSON, if the run is to be replayed.

        Returns:
            A request that may be awaited; its result is that of ``call``.
        """
        return self._runner.ask(Request(words_of(what), lambda: self._host.together(what, call, self._runner)))

    def _act(self, action: Action, what: str, samples: tuple[int, ...], evidence: Mapping[str, Any]) -> Request[bool]:
        self._host.check_action(action)

        async def change() -> bool:
            self._host.act(action, samples)
            self.decide(what, **({"samples": samples} if samples else {}), **evidence)
            return True

        return self._runner.ask(Request(words_of(f"{what} {samples or ''}".rstrip()), change))

    def _ask_for(self, name: str, value: Any, evidence: Mapping[str, Any]) -> Request[bool]:
        checked = self.hyperparameters.checked(name, value, self.size)
        words = in_words(name)

        async def change() -> bool:
            before = self.hyperparameters.value(name)
            if self._host.refuses(self._runner, name, checked, f"{words} {checked}"):
                return False
            await self._host.change_hyperparameter(name, checked, self._runner)
            if before != checked:
                self.decide(f"{words} {_plain(before)} -> {_plain(checked)}", **evidence)
            return True

        return self._runner.ask(Request(f"{words} {checked}", change, name))


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    """A value, or several, as the log shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        left_out = len(value) - MAX_SHOWN
        return "[" + ", ".join(map(_shown, value[:MAX_SHOWN])) + (f", {left_out} more]" if left_out > 0 else "]")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) + "}"
    return str(value)


def _checked_size(host: PolicyHost, size: Any) -> int:
    number = whole_number(size)
    if number is None or number < 1:
        raise ConfigError(f"a size is a whole number from 1 on, not {size!r}")
    if not host.comm.outlives:
        raise ConfigError(f"{size} ranks were asked for, but these cannot change: that needs an open Elastic")
    return number


def _checked_rank(host: PolicyHost, rank: Any) -> int:
    number = whole_number(rank)
    if number is None or not 0 <= number < host.comm.size:
        raise ConfigError(f"a rank is a whole number from 0 to {host.comm.size - 1}, not {rank!r}")
    if not host.comm.outlives:
        raise ConfigError(f"another was asked for in place of rank {rank}, but these cannot change: open an Elastic")
    return number

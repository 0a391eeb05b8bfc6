"""Policies, the context they are given, and their requests to all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kfcomm.adapt.host import SIZE, STRATEGY
from kfcomm.adapt.hyperparameters import Hyperparameters, in_words
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.common.arguments import plain_text
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.adapt.host import PolicyHost
    from kfcomm.adapt.runner import Runner
    from kfcomm.world.communicator import Communicator


T = TypeVar("T")

NOTHING, FAILED = 0, 1
"""The signs of a policy that asks for nothing, and of one that has raised."""


class Request(Generic[T]):
    """Something asked for. It may be awaited, or left: it is carried out either way.

    Attributes:
        words: what is asked for; ranks compare them.
        subject: what it is about, where only one value can hold: of several policies the first has its way.
        runner: of the policy that asks.
    """

    runner: Runner

    def __init__(self, words: str, call: Callable[[], Awaitable[T]], subject: str = "") -> None:
        self.words = words
        self.subject = subject
        self.is_awaited = False
        self._call = call
        self._outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._outcome.done():
            self.is_awaited = True
            self.runner.at_rest.set()
        return self._outcome.__await__()

    async def carry_out(self) -> None:
        """Do it. What it raises goes to whoever awaits it.

        Raises:
            Exception: what it raised, if nobody awaits it.
        """
        try:
            result = await self._call()
        except Exception as error:
            if not self.is_awaited:
                raise
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    def overrule(self: Request[bool]) -> None:
        """It is not done: who awaits it gets False."""
        self._outcome.set_result(False)


def words_of(what: str, digest: bytes = b"") -> str:
    """What is asked for, and the digest of what words cannot tell."""
    text = plain_text(what)
    return f"{text} [{digest.hex()[:8]}]" if digest else text


def sign_of(requests: Sequence[Request[Any]]) -> int:
    """A number that stands for what is asked for: 0 for nothing, else 48 bits of a digest of all words, and never 1."""
    if not requests:
        return NOTHING
    text = "\0".join(request.words for request in requests).encode()
    return 2 + int.from_bytes(blake2b(text, digest_size=6).digest(), "little")


def overruled(asked: Sequence[Sequence[Request[Any]]]) -> list[tuple[Request[Any], Request[Any]]]:
    """Requests that are not done, each with the one that is done instead.

    Args:
        asked: what each policy asks for, in the order of the policies. Of those that ask for the same subject the first
            has its way; what another asks for is overruled, unless it is the same.
    """
    winners: dict[str, Request[Any]] = {}
    lost = []
    for requests in asked:
        own = {}
        for request in requests:
            winner = winners.get(request.subject)
            if winner is None:
                own[request.subject] = request  # of its own requests the last one holds in the end
            elif winner.words != request.words:
                lost.append((request, winner))
        own.pop("", None)
        winners.update(own)
    return lost


class Policy:
    """Base of policies: override what you need. Each method may be a plain or an ``async`` one.

    The same policies, in the same order, are given to ``Adaptation`` on every rank. They decide by what ``ctx`` holds,
    which is the same on every rank, and by nothing else: no clock, no chance, no rank. Where two ask for the same
    thing at once, the one that is first in that order has its way.

    A policy that raises, on one rank or on all, or that asks for something else on one rank than on another, is
    switched off on every rank, which is logged with its name; the job goes on as it is.
    """

    @property
    def name(self) -> str:
        """By which it is logged."""
        return type(self).__name__

    def on_start(self, ctx: Context) -> Any:
        """Before the first step; and again when the ranks have changed, for ``ctx.size`` of them: it begins anew."""

    def before_step(self, ctx: Context) -> Any:
        """Before a step at whose end the ranks meet."""

    def after_step(self, ctx: Context) -> Any:
        """After it, with ``ctx.metrics`` of it."""

    def on_end(self, ctx: Context) -> Any:
        """After the last step; nothing can be asked for any more."""

    def state_dict(self) -> Any:
        """What it has learned and wants all ranks to know when they have changed, as msgpack can carry it."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on with what another rank's ``state_dict`` gave, after ``on_start``; not called for None."""


class Context:
    """What a policy sees: what all ranks share. It is the same object in every call."""

    def __init__(self, host: PolicyHost, runner: Runner) -> None:
        self._host = host
        self._runner = runner

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self._host.num_steps

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
        """What holds of the training from the next step on; of the last one: ``metrics.hyperparameters``."""
        return self._host.hyperparameters

    @property
    def set_by(self) -> Mapping[str, str]:
        """The name of the policy that has last changed ``strategy``, ``size``, or a hyperparameter, by its name."""
        return MappingProxyType({subject: runner.name for subject, runner in self._host.holders.items()})

    @property
    def metrics(self) -> StepMetrics | None:
        """Of the last step at whose end the ranks met; None before the first."""
        return self._host.metrics

    def decide(self, what: str, **evidence: Any) -> None:
        """Log and record a decision, with the numbers behind it."""
        self._host.decide(self._runner, what, evidence)

    def set_strategy(self, strategy: StrategySpec, **evidence: Any) -> Request[bool]:
        """Ask for another strategy; see ``Communicator.set_strategy``.

        The ranks compare what they ask for when they meet next: at the end of the next step or, where they have just
        done something together, at once. Then all of them change, unless a policy that is before this one asks for
        another.

        Args:
            strategy: a name, a ``Strategy``, a ``GraphPair`` or a ``Graph``.
            evidence: numbers to be logged with the change.

        Returns:
            What may be awaited: the policy goes on when the strategy is in force (True), or another policy had its way
            (False). Until its method has returned, it is not called again.

        Raises:
            ConfigError: there is no such strategy, or it is for another number of ranks.
        """
        chosen = build(strategy, self.layout)

        async def change() -> bool:
            before = self.strategy
            await self._host.change_strategy(chosen, self._runner)
            self.decide(f"strategy {before.name} -> {chosen.name}", **evidence)
            return True

        return self._runner.ask(Request(words_of(f"strategy {chosen.name}", chosen.digest), change, STRATEGY))

    def set_batch_size(self, batch_size: int, **evidence: Any) -> Request[bool]:
        """Ask for another batch, of all ranks together; see ``set_strategy`` for when it holds, and what is returned.

        Raises:
            ConfigError: it is no whole number from 1 on, does not divide among the ranks, or the program follows none.
        """
        return self._ask_for("batch_size", batch_size, evidence)

    def set_learning_rate(self, learning_rate: float, **evidence: Any) -> Request[bool]:
        """Ask for another learning rate, which is rounded to nine digits; see ``set_strategy``.

        Raises:
            ConfigError: it is not finite, or negative, or the program follows none.
        """
        return self._ask_for("learning_rate", learning_rate, evidence)

    def set_agreement(self, name: str, **evidence: Any) -> Request[bool]:
        """Ask for another way in which the replicas agree; see ``set_strategy``.

        Raises:
            ConfigError: the program knows none of this name.
        """
        return self._ask_for("agreement", name, evidence)

    def set_wire_dtype(self, name: str | None, **evidence: Any) -> Request[bool]:
        """Ask that gradients travel as ``"bfloat16"`` or ``"float16"``, or (None) as they are; see ``set_strategy``.

        Raises:
            ConfigError: the program knows none of this name.
        """
        return self._ask_for("wire_dtype", name, evidence)

    def resize(self, size: int, **evidence: Any) -> Request[bool]:
        """Ask for another number of ranks, in a program with an open ``Elastic``; see ``set_strategy``.

        When the ranks have agreed, it is asked of the job. Others are let in as they are there, and those that are too
        many leave, between two steps from then on; then ``on_start`` is called, and ``ctx.size`` is another.

        Raises:
            ConfigError: it is no whole number from 1 on, or the ranks of this program cannot change. If the job does
                not have so many, that comes of awaiting it, on every rank.
        """
        wanted = self._host.check_size(size)

        async def change() -> bool:
            before = self.size
            await self._host.change_size(wanted, self._runner)
            self.decide(f"asks for {wanted} ranks instead of {before}", **evidence)
            return True

        return self._runner.ask(Request(f"{wanted} ranks", change, SIZE))

    def replace(self, rank: int, **evidence: Any) -> Request[bool]:
        """Ask for another process in the place of a rank, in a program with an open ``Elastic``; see ``resize``.

        The rank goes between two steps from then on, as one that is released; the other is let in when it is there.

        Raises:
            ConfigError: there is no such rank, or the ranks of this program cannot change.
        """
        checked = self._host.check_rank(rank)

        async def change() -> bool:
            await self._host.replace_rank(checked)
            self.decide(f"asks for another in place of rank {checked}", **evidence)
            return True

        return self._runner.ask(Request(f"another in place of rank {checked}", change))

    def together(self, what: str, call: Callable[[Communicator], Awaitable[T]]) -> Request[T]:
        """Ask for something that all ranks do together, such as a probe: ``call(comm)``, on every rank.

        Args:
            what: in words; ranks that say the same are taken to mean the same.
            call: may use collectives, since all ranks run it at the same place. Its result should be the same on
                every rank, if the policy is to decide by it, and such as JSON can carry, if that is to be replayed.

        Returns:
            What may be awaited; the result is that of ``call``.
        """
        return self._runner.ask(Request(words_of(what), lambda: self._host.together(what, call, self._runner)))

    def _ask_for(self, name: str, value: Any, evidence: Mapping[str, Any]) -> Request[bool]:
        checked = self.hyperparameters.checked(name, value, self.size)
        words = in_words(name)

        async def change() -> bool:
            before = getattr(self.hyperparameters, name)
            await self._host.change_hyperparameter(name, checked, self._runner)
            if before != checked:
                self.decide(f"{words} {_plain(before)} -> {_plain(checked)}", **evidence)
            return True

        return self._runner.ask(Request(f"{words} {checked}", change, name))


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

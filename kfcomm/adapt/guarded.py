"""Guarded exchange of gradients in the loops of a program: evidence that travels with them, and what follows.

Each rank fills a row of its own in a small array that is reduced along with its gradients; so all ranks read the same
rows, which cost no message. A void step costs one more exchange, in which the culprits tell the names of arrays.

A rank whose block raises an error that the guard catches makes the same calls as the others, with gradients of zero and
a row that shows it. In the first step of new ranks it does not know which arrays the others give. So there the ranks
exchange one message before, and none goes on to the gradients if one has raised.

The exchange is a generator of calls, which ``Adaptation`` carries out over either interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfcomm.adapt.guard import GuardActions, GuardSteps, StepEvidence, Void
from kfcomm.adapt.host import PolicyHost
from kfcomm.adapt.runner import Runner
from kfcomm.arrays import adapt
from kfcomm.arrays.norms import squared_norm
from kfcomm.arrays.trees import Tree, leaves, rebuilt
from kfcomm.common.sizes import shortened
from kfcomm.errors import CollectiveMismatch, ConfigError, StepVoid

GUARD = "/guard"
"""Name of the array of rows; in a tree only an array under an empty key has it."""
OPS = ("avg", "sum", "adasum")
"""Ops that leave the rows of the ranks readable: rows have no other rank's numbers in their places."""
MAX_NAMES = 4
"""Names of arrays that a culprit tells."""
MAX_REASON = 200

_NUM_COLUMNS = 5
_PRESENT, _RAISED, _HAS_LOSS, _LOSS, _NORM = range(_NUM_COLUMNS)

Exchange: TypeAlias = Generator[Callable[[Any], Any], Any, Tree]
"""Yields functions that begin a call on the program's communicator, and is sent their results."""


class ElasticStep(Protocol):
    """A step of ``kfcomm.elastic.Elastic``."""

    batch: Any
    sampler: Any

    def void(self) -> None:
        """Give the samples of the step again."""


@dataclass(frozen=True, slots=True)
class GuardedCall:
    """Call by which guarded gradients are exchanged."""

    way: Any = None  # an algorithm of ``kfcomm.train``; None for an ``all_reduce_many``
    op: Any = "avg"
    name: str = "guarded"
    wire_dtype: Any = None


class StepGuard:
    """Guard of the steps of one program, on this rank. Without a `GuardSteps` among the policies nothing is judged."""

    def __init__(self, host: PolicyHost) -> None:
        guards = [(runner, runner.policy) for runner in host.runners if isinstance(runner.policy, GuardSteps)]
        if len(guards) > 1:
            raise ConfigError("one GuardSteps among the policies judges the steps, not several")
        self._host = host
        self._runner: Runner | None = None
        self.policy = GuardSteps()  # the judge; without one among the policies it has nothing to do
        if guards:
            self._runner, self.policy = guards[0]
        self._met: Any = None  # uids of the ranks that know each other's arrays
        self._again: tuple[GuardedCall, dict[str, tuple[tuple[int, ...], Any]]] = GuardedCall(), {}  # the last exchange
        self.begin(None)

    def begin(self, step: ElasticStep | None) -> None:
        """Begin a step, which may be one of an ``Elastic``."""
        self.step = self._host.step = step
        self.void: Void | None = None
        self.actions = GuardActions(rate=self.rate)
        self.is_exchanged = False
        self._given: Mapping[str, Any] = {}
        self._loss: float | None = None
        self._reason = ""  # error of this rank, in words
        self._is_unreadable = False
        self._evidence: StepEvidence | None = None
        self._has_suspects = False
        self._observed = self._host.observed.take() if self.is_on else {}
        self._host.observed.observe(self._observed)

    @property
    def rate(self) -> float:
        """Factor of the learning rate."""
        return self.policy.actions.rate if self.is_on else 1.0

    @property
    def is_on(self) -> bool:
        """Whether steps are judged."""
        return self._runner is not None and not self._runner.is_off

    def catches(self, error: BaseException) -> bool:
        """Whether an error of the block makes the step void: only before its gradients were exchanged."""
        return self.is_on and not self.is_exchanged and isinstance(error, self.policy.catch)

    # ---------------------------------------------------------------- the exchange

    def exchange(self, gradients: Tree, loss: Any, call: GuardedCall) -> Exchange:
        """Exchange gradients; return those to apply. `StepVoid` on all ranks, where the step is void.

        Raises:
            ConfigError: the step has exchanged gradients already; or the op cannot be guarded.
            CollectiveMismatch: the ranks have unlike options of `GuardSteps`.
        """
        if self.is_exchanged:
            raise ConfigError("gradients of this step are exchanged already: give all of them to one call of guarded")
        if call.way is None and call.op not in OPS:
            raise ConfigError(f"guarded gradients are reduced by one of {', '.join(OPS)}, not by {call.op!r}")
        self._loss = _scalar(loss)
        self.is_exchanged = True
        if self.is_on:
            yield from self._introduce()
            self._again = call, {name: _form(x) for name, x in leaves(gradients).items()}
        return (yield from self._told(gradients, call))

    def failed(self, error: BaseException) -> Exchange:
        """Make the calls of a step whose block has raised on this rank; ends with `StepVoid`, as on the others."""
        self.is_exchanged = True
        self._reason = shortened(f"{type(error).__name__}: {error}", MAX_REASON)
        yield from self._introduce()
        # Known: in a first step the introduction has ended it.
        call, forms = self._again
        zeros = {name: np.zeros(shape, dtype) for name, (shape, dtype) in forms.items()}
        return (yield from self._told(zeros, call))

    def _introduce(self) -> Exchange:
        """Exchange a first message with new ranks: in their first step a rank that has raised knows no arrays."""
        comm = self._host.comm
        if self._met == comm.births:
            return
        own = [comm.rank, self._reason, self.policy.options]
        said = yield lambda comm: comm.all_gather_object(own, "kfcomm/adaptation/guarded")
        unlike = next((one for one in said if one[2] != said[0][2]), None)
        if unlike is not None:
            raise CollectiveMismatch(
                f"the ranks guard steps differently: rank {said[0][0]} by {said[0][2]}; rank {unlike[0]} by {unlike[2]}"
            )
        raised = {rank: reason for rank, reason, _ in said if reason}
        if raised:
            self._judge({rank: [1.0, rank in raised, 0, 0, 0] for rank, *_ in said}, {})
            self._finish([[rank, [reason]] for rank, reason in raised.items()])
        self._met = comm.births

    def _told(self, gradients: Tree, call: GuardedCall) -> Exchange:
        """Exchange; if the step is void, tell why."""
        try:
            return (yield from self._exchanged(gradients, call))
        except StepVoid:
            own = [self._host.comm.rank, self._names(), self._numbers()]
            said = yield lambda comm: comm.all_gather_object(own, "kfcomm/adaptation/void")
            self._finish([one[:2] for one in said], {one[0]: one[2] for one in said})
        finally:
            self._given = {}
        raise AssertionError("unreachable")

    def _exchanged(self, gradients: Tree, call: GuardedCall) -> Exchange:
        way, given = call.way, leaves(gradients)
        if not self.is_on:
            if way is not None:
                return (yield lambda comm: way.gradients(gradients))
            found = yield lambda comm: comm.all_reduce_many(given, call.name, op=call.op, wire_dtype=call.wire_dtype)
            return rebuilt(gradients, found)
        if hasattr(way, "guarded"):
            return (yield lambda comm: way.guarded(gradients, self))
        if way is None and call.wire_dtype is None:
            row = self.row(given)
            found = yield lambda comm: comm.all_reduce_many({**given, GUARD: row}, call.name, op=call.op)
            self.judge(found.pop(GUARD), found)
            return rebuilt(gradients, found)
        # An algorithm may keep what gradients leave behind, and a dtype on the wire would round the rows: judged first.
        row = self.row(given)
        self.judge((yield lambda comm: comm.all_reduce(row, f"{call.name}/guard")), {})
        if way is not None:
            return (yield lambda comm: way.gradients(gradients))
        found = yield lambda comm: comm.all_reduce_many(given, call.name, op=call.op, wire_dtype=call.wire_dtype)
        return rebuilt(gradients, found)

    # ---------------------------------------------------------------- for what reduces gradients

    def row(self, given: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Array to reduce with a rank's gradients by ``avg``, ``sum`` or ``adasum``; this rank fills its part.

        Its shape is (ranks · 5,), its dtype float64 if all of them have it, else float32.
        """
        self._given = given
        is_double = all(adapt(x).dtype == np.float64 for x in given.values())
        table = np.zeros((self._host.comm.size, _NUM_COLUMNS), np.float64 if is_double else np.float32)
        with np.errstate(over="ignore"):
            table[self._host.comm.rank] = self._numbers()
        return table.ravel()

    def judge(self, rows: Any, found: Mapping[str, Any]) -> None:
        """Judge the step by the reduced rows, and the reduced gradients.

        Raises:
            StepVoid: the step is void; the caller applies nothing and learns nothing from it.
            GuardFailed: see ``GuardSteps.judge``.
        """
        table = np.asarray(rows, np.float64).reshape(-1, _NUM_COLUMNS)
        shares = table[:, _PRESENT]
        if not np.isfinite(shares).all():
            # Adasum multiplies by inner products: one NaN is in all rows. Each rank's own numbers come with the names.
            self._is_unreadable = True
            raise StepVoid("the numbers of the ranks are not finite")
        # A rank's share of an average is in its first column, as in the others; 0 for a lost rank.
        numbers = {rank: (table[rank] / share).tolist() for rank, share in enumerate(shares.tolist()) if share}
        overflows = self._overflows(numbers, found)
        self._judge(numbers, dict.fromkeys(numbers, math.inf) if overflows else {})
        if self.void is not None:
            raise StepVoid(str(self.void))

    def _overflows(self, numbers: Mapping[int, list[float]], found: Mapping[str, Any]) -> bool:
        """Whether finite gradients have a sum that is not."""
        total = sum(one[_NORM] for one in numbers.values())
        largest = min((_largest(adapt(x).dtype) for x in found.values()), default=math.inf)
        return largest <= total < math.inf and not math.isfinite(squared_norm(found.values()))

    def _judge(self, numbers: Mapping[int, list[Any]], norms: Mapping[int, float]) -> None:
        """Let the policy judge; ``norms`` replace those of the rows."""
        losses: list[float | None] = [None] * self._host.comm.size
        sq_norms: list[float | None] = [None] * self._host.comm.size
        raised = []
        for rank, row in numbers.items():
            norm = norms.get(rank, row[_NORM])
            sq_norms[rank] = norm * norm
            if row[_HAS_LOSS]:
                losses[rank] = row[_LOSS]
            if row[_RAISED]:
                raised.append(rank)
        batch = None if self.step is None else self.step.batch
        self._evidence = StepEvidence(self._host.num_steps, losses, sq_norms, batch, tuple(raised))
        self._has_suspects = self.policy.has_suspects
        self.void = self.policy.judge(self._evidence)
        self.actions = self.policy.actions

    def _numbers(self) -> list[float]:
        norm = 0.0 if self._reason else math.sqrt(squared_norm(self._given.values()))
        return [1.0, bool(self._reason), self._loss is not None, self._loss or 0.0, norm]

    def _names(self) -> list[str]:
        """Causes on this rank: its error, or its arrays that are not finite; of a jump those with the largest norms."""
        void, rank = self.void, self._host.comm.rank
        if void is not None and rank not in void.ranks:
            return []
        if self._reason:
            return [self._reason]
        squares = {name: squared_norm([x]) for name, x in self._given.items()}
        wrong = [name for name, one in squares.items() if not math.isfinite(one)]
        if not wrong and void is not None and void.is_finite:
            wrong = sorted(squares, key=lambda name: -squares[name])[:1]
        return wrong[:MAX_NAMES]

    def _finish(self, said: Any, numbers: Mapping[int, list[float]] | None = None) -> None:
        """Note what the culprits tell, and end the block of the step."""
        if self._is_unreadable and numbers is not None:
            norms = {} if any(_is_wrong(one) for one in numbers.values()) else dict.fromkeys(numbers, math.inf)
            self._judge(numbers, norms)
        if self.void is not None:
            ranks = self.void.ranks
            names = tuple(f"rank {rank}: {', '.join(found)}" for rank, found in said if found and rank in ranks)
            self.void = replace(self.void, names=names)
        raise StepVoid(str(self.void))

    # ---------------------------------------------------------------- the end of a step

    def settle(self) -> None:
        """Carry out what follows from the judgement, at the end of the step."""
        void, actions, step, host = self.void, self.actions, self.step, self._host
        if self._runner is None or self._evidence is None:
            return
        if host.recorder is not None:
            # Samples of a good step matter only where some are suspected.
            evidence = self._evidence if void is not None or self._has_suspects else replace(self._evidence, batch=None)
            host.recorder.judged(evidence, () if void is None else void.names)
        for what, numbers in outcomes(void, actions):
            host.decide(self._runner, what, numbers)
        if void is not None:
            # What the program has observed of this step may be as wrong as its gradients.
            host.observed.take()
            host.observed.observe(self._observed)
            if step is not None:
                step.void()
                if actions.set_aside:
                    step.sampler.set_aside(actions.set_aside)
        self._keep_or_return(self._runner)

    def _keep_or_return(self, runner: Runner) -> None:
        """Let the open ``Elastic`` keep its state, or restore it."""
        elastic: Any = getattr(self._host.comm, "elastic", None)
        actions = self.actions
        problem = "" if elastic is not None else "it needs an open Elastic"
        try:
            if actions.roll_back and not problem:
                elastic.roll_back()
            elif actions.keep and not problem:
                elastic.keep()
        except ConfigError as error:
            # After the loss of all ranks a checkpoint holds the guard's counts, and no copy is in memory.
            problem = str(error)
        if actions.roll_back and problem:
            self._host.decide(runner, f"cannot restore the state: {problem}", {})


def outcomes(void: Void | None, actions: GuardActions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a judgement led to, in words, with the evidence."""
    if void is not None:
        evidence: dict[str, Any] = {"set aside": actions.set_aside} if actions.set_aside else {}
        yield f"step is {void}", evidence | ({"rate": actions.rate} if actions.rate < 1 else {})
    if actions.roll_back:
        yield "restores the kept state", {}


def _scalar(loss: Any) -> float | None:
    if loss is None:
        return None
    try:
        return float(loss.item() if hasattr(loss, "item") else loss + 0.0)
    except (TypeError, ValueError):
        raise ConfigError(f"a loss is a number, or an array of one number, not {loss!r:.60}") from None


def _form(x: Any) -> tuple[tuple[int, ...], Any]:
    array = adapt(x)
    return array.shape, array.dtype


def _largest(dtype: np.dtype[Any]) -> float:
    """Largest number of a dtype; infinite for dtypes without infinity."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).max)
    return 3e38 if dtype.name == "bfloat16" else math.inf


def _is_wrong(row: list[float]) -> bool:
    return bool(row[_RAISED]) or not (math.isfinite(row[_LOSS]) and math.isfinite(row[_NORM]))

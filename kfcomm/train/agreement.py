"""Base of the algorithms by which replicas agree: two methods for a step, and a check that all ranks use the same one.

An algorithm takes a rank's gradients, and its model, and returns those to continue with. One loop serves all of them::

    way = kfcomm.train.SMA(comm, alpha=0.1)
    for batch in batches:
        pending = way.parameters(model)              # under way while the gradient is computed
        gradients = gradient(model, batch)
        gradients = await way.gradients(gradients)
        model = apply(await pending, gradients)

With a communicator of ``kfcomm.sync``, write ``pending.wait()``. Models and gradients are trees (dicts, lists, tuples)
of arrays of any kind; they are not modified, and not to be modified while they are under way.

Invariant: before its first exchange each rank knows the algorithm, and its numbers, of all ranks. A difference, or a
number out of its range, is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from kfcomm.collectives.handle import looked_at
from kfcomm.common.arguments import checked_name
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.train.procedure import Comm, Procedure, call, carried, together
from kfcomm.train.tree import Tree, leaves, rebuilt

MEETS_AS = "agreement"
"""Name for the check of algorithms without a name, the same for all: ranks with different ones must meet."""

METHODS = ("gradients", "parameters")
DIFFERENT = "the ranks agree in different ways"


class Agreement:
    """Algorithm by which replicas agree. Made alike on every rank; subclasses define what travels, and when.

    Attributes:
        comm: communicator of the ranks that agree.
        name: prefix of its collectives. Several algorithms in use at once on one communicator need different names.
        num_steps: number of calls of ``parameters`` on this rank.

    Raises:
        ConfigError: a number is out of its range; on the other ranks their first exchange raises it.
    """

    default_name: ClassVar[str]
    shares_gradients = False
    """Whether all ranks continue with the same gradients."""

    def __init__(self, comm: Comm, name: str | None, numbers: Mapping[str, Any], problem: str | None = None) -> None:
        name = None if name is None else checked_name(name)
        self.comm = comm
        self.name = self.default_name if name is None else name
        self.num_steps = 0
        self._meets_as = MEETS_AS if name is None else name
        given = ", ".join(f"{one}={value!r}" for one, value in numbers.items())
        self._said = f"{type(self).__name__}({given})"
        self._introduced: set[str] = set()
        if problem is not None:
            refuse(comm, self._said, problem, *map(self._introduction, METHODS))

    def __repr__(self) -> str:
        return f"<{self._said} of rank {self.comm.rank} of {self.comm.size}>"

    @carried
    def introduce(self) -> Procedure[None]:
        """Check now, not at the first exchange, that all ranks use the same algorithm. Every rank calls it, or none.

        Raises:
            CollectiveMismatch, ConfigError: see ``gradients``.
        """
        names = [self._introduction(method) for method in METHODS]
        self._introduced.update(METHODS)
        rows = yield from together(call("all_gather_object", [self._said, None], name) for name in names)
        for name, told in zip(names, rows, strict=True):  # after both: what one rank has told is heard by all
            check_alike(self.comm.rank, self._said, told, name)

    @carried
    def gradients(self, tree: Tree) -> Procedure[Tree]:
        """Exchange gradients; returns a `Pending` tree like ``tree`` for the optimizer.

        Raises:
            CollectiveMismatch: from waiting: the ranks agree in different ways.
            ConfigError: another rank was given numbers that cannot be.
            CollectiveError: an exchange failed.
        """
        yield from self._introduce("gradients")
        return (yield from self._gradients(tree))

    @carried
    def parameters(self, tree: Tree) -> Procedure[Tree]:
        """Exchange models; returns a `Pending` tree like ``tree`` to continue with. Called once a step.

        Raises:
            CollectiveMismatch, ConfigError, CollectiveError: see ``gradients``.
        """
        yield from self._introduce("parameters")
        self.num_steps += 1
        return (yield from self._parameters(tree))

    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        """Procedure for gradients; without an exchange, unless a subclass overrides it."""
        yield from ()
        return tree

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        """Procedure for models; without an exchange, unless a subclass overrides it."""
        yield from ()
        return tree

    def _introduction(self, method: str) -> str:
        return f"{self._meets_as}/introduction of {method}"

    def _introduce(self, method: str) -> Procedure[None]:
        """Check that all ranks use the same algorithm; both methods do, because they may be under way together."""
        if method in self._introduced:
            return
        self._introduced.add(method)
        yield from introduction(self.comm.rank, self._said, self._introduction(method))

    def _reduced(self, tree: Tree, what: str, op: Any = "avg") -> Procedure[Tree]:
        """Reduce the arrays of a tree over all ranks."""
        found = yield call("all_reduce_many", leaves(tree), f"{self.name}/{what}", op=op)
        return rebuilt(tree, found)


def refuse(comm: Comm, said: str, problem: str, *names: str) -> NoReturn:
    """Raise the fault of a rank's numbers, and report it in the checks that the other ranks will come to.

    Raises:
        ConfigError: always.
    """
    for name in names:
        introduce(comm, said, name, problem)
    raise ConfigError(f"{said}: {problem}")


def introduce(comm: Comm, said: str, name: str, problem: str | None = None) -> Any:
    """Begin to exchange what the ranks have; returns a handle of all reports, for `check_alike`."""
    tell = getattr(comm, "all_gather_object_async", comm.all_gather_object)
    told = tell([said, problem], name)
    told.add_done_callback(looked_at)
    return told


def introduction(rank: int, said: str, name: str, wrong: str = "the ranks agree in different ways") -> Procedure[None]:
    """Check that all ranks report the same: of their algorithm, or of the subject of ``wrong``.

    Raises:
        ConfigError, CollectiveMismatch: see ``check_alike``.
    """
    told = yield call("all_gather_object", [said, None], name)
    check_alike(rank, said, told, name, wrong)


def check_alike(rank: int, said: str, told: Sequence[Any], name: str, wrong: str = DIFFERENT) -> None:
    """Compare the reports of all ranks: what each has, and the fault of that.

    Raises:
        ConfigError: a rank was given what cannot be.
        CollectiveMismatch: two ranks say something else.
    """
    for other, (way, problem) in enumerate(told):
        if problem is not None:
            raise ConfigError(f"rank {other} has {way}: {problem}; rank {rank} has {said}")
    unlike = next((other for other, one in enumerate(told) if one != told[0]), None)
    if unlike is not None:
        raise CollectiveMismatch(f"{wrong}: rank 0 has {told[0][0]}; rank {unlike} has {told[unlike][0]}", key=name)


def alpha_problem(alpha: Any, most: float = 1.0) -> str | None:
    """Fault of a coefficient of averaging; None without one."""
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    return None if is_number and 0 < alpha <= most else f"alpha is above 0 and at most {most:g}, not {alpha!r}"


def count_problem(what: str, value: Any) -> str | None:
    """Fault of a number of steps; None without one."""
    return None if type(value) is int and value >= 1 else f"{what} is a whole number, at least 1, not {value!r}"

"""Base of the algorithms by which replicas agree: two methods for a step, and a check that all ranks use the same one.

An algorithm takes a rank's gradients, and its model, and returns those to continue with. One loop serves all of them::

    way = kfcomm.train.SMA(comm, alpha=0.1)
    for batch in batches:
        pending = way.parameters(model)              # under way while the gradient is computed
        gradients = gradient(model, batch)
        gradients = await way.gradients(gradients)
        model = apply(await pending, gradients)

With a communicator of ``kfcomm.sync``, write ``pending.wait()``. Models and gradients are trees (dicts, lists, tuples)
of arrays of any kind; they are not modified, and not to be modified while they are under way. Collectives take mappings
from names to arrays, which `leaves` and `rebuilt` convert.

Invariant: before its first exchange each rank knows the algorithm, and its numbers, of all ranks. A difference, or a
number out of its range, is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

from kfcomm.collectives.handle import looked_at
from kfcomm.common.arguments import checked_name
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.train.procedure import Comm, Procedure, call, carried, together

Tree: TypeAlias = Any
"""An array, or a dict, list or tuple of trees."""

ALONE = "x"
"""The name of an array that is a tree by itself."""


def leaves(tree: Tree) -> dict[str, Any]:
    """Return the arrays of a tree, at least one, by name: keys and positions on the way to each, joined by slashes."""
    found: dict[str, Any] = {}
    _collect(tree, "", found)
    if not found:
        raise ConfigError("a tree without arrays has nothing to agree on")
    return found


def rebuilt(tree: Tree, arrays: Mapping[str, Any], path: str = "") -> Tree:
    """Rebuild a tree like ``tree`` with other arrays, by the names of ``leaves``."""
    children = _children(tree)
    if children is None:
        return arrays[path or ALONE]
    made = {key: rebuilt(child, arrays, _below(path, key)) for key, child in children}
    if isinstance(tree, Mapping):
        return made
    parts = list(made.values())
    if isinstance(tree, tuple):
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return parts


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Map ``function`` over the arrays of ``tree`` and the same ones of ``others``; return a tree like ``tree``."""
    first, rest = leaves(tree), [leaves(other) for other in others]
    for other in rest:
        if other.keys() != first.keys():
            unlike = ", ".join(sorted(other.keys() ^ first.keys())[:4])
            raise ConfigError(f"the trees have different arrays: {unlike}")
    return rebuilt(tree, {name: function(x, *(other[name] for other in rest)) for name, x in first.items()})


def copied(tree: Tree) -> Tree:
    """Copy a tree: programs update models in place, and kept models must not follow."""
    return mapped(lambda x: 1 * x, tree)


def _collect(tree: Tree, path: str, found: dict[str, Any]) -> None:
    children = _children(tree)
    if children is None:
        if (path or ALONE) in found:
            raise ConfigError(f"two arrays of a tree have the name {path!r}")
        found[path or ALONE] = tree
        return
    for key, child in children:
        _collect(child, _below(path, key), found)


def _children(tree: Tree) -> list[tuple[Any, Any]] | None:
    """Keys and subtrees; None for an array."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    return None


def _below(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


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

    # Without an exchange, unless a subclass overrides them.

    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        yield from ()
        return tree

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        yield from ()
        return tree

    def _introduction(self, method: str) -> str:
        return f"{self._meets_as}/introduction of {method}"

    def _introduce(self, method: str) -> Procedure[None]:
        # Each method by itself, since both may be under way together.
        if method not in self._introduced:
            self._introduced.add(method)
            yield from introduction(self.comm.rank, self._said, self._introduction(method))

    def _reduced(self, tree: Tree, what: str, op: Any = "avg") -> Procedure[Tree]:
        """Reduce the arrays of a tree over all ranks."""
        found = yield call("all_reduce_many", leaves(tree), f"{self.name}/{what}", op=op)
        return rebuilt(tree, found)


def refuse(comm: Comm, said: str, problem: str, *names: str) -> NoReturn:
    """Raise the fault of a rank's numbers, and report it in the checks that the other ranks will come to."""
    for name in names:
        introduce(comm, said, name, problem)
    raise ConfigError(f"{said}: {problem}")


def introduce(comm: Comm, said: str, name: str, problem: str | None = None) -> Any:
    """Begin to exchange reports; return a handle of the reports of all ranks, for `check_alike`."""
    tell = getattr(comm, "all_gather_object_async", comm.all_gather_object)
    told = tell([said, problem], name)
    # The caller may raise first, and read no result: that must not be reported as an unread error.
    told.add_done_callback(looked_at)
    return told


def introduction(rank: int, said: str, name: str, wrong: str = DIFFERENT) -> Procedure[None]:
    """Check that all ranks report the same: of their algorithm, or of the subject of ``wrong``; see `check_alike`."""
    told = yield call("all_gather_object", [said, None], name)
    check_alike(rank, said, told, name, wrong)


def check_alike(rank: int, said: str, told: Sequence[Any], name: str, wrong: str = DIFFERENT) -> None:
    """Compare the reports of all ranks: the algorithm of each, and its fault (a `ConfigError`)."""
    for other, (way, problem) in enumerate(told):
        if problem is not None:
            raise ConfigError(f"rank {other} has {way}: {problem}; rank {rank} has {said}")
    unlike = next((other for other, one in enumerate(told) if one != told[0]), None)
    if unlike is not None:
        raise CollectiveMismatch(f"{wrong}: rank 0 has {told[0][0]}; rank {unlike} has {told[unlike][0]}", key=name)

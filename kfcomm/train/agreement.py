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

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Self

from kfcomm.common.arguments import checked_name
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.train.introductions import check_alike, introduce, introduction, refuse
from kfcomm.train.procedure import Comm, Procedure, call, carried, epoch_of, together
from kfcomm.train.trees import Tree, converted, copied, is_array, leaves, mapped, rebuilt, state_digests
from kfcomm.train.turns import AlgorithmTurn, Model, digest_of, model_of

__all__ = [
    "Agreement", "Tree", "check_alike", "copied", "introduce", "introduction", "leaves", "mapped", "rebuilt", "refuse",
]  # fmt: skip

logger = logging.getLogger("kfcomm")

MEETS_AS = "agreement"
"""Name for the check of algorithms without a name, the same for all: ranks with different ones must meet."""

METHODS = ("gradients", "parameters")
HAND_OVER = "hand the algorithm to new ranks by State(way=...) of an Elastic, or by load_state_dict"


class Agreement:
    """Algorithm by which replicas agree. Made alike on every rank; subclasses define what travels, and when.

    *State.* Subclasses name the attributes that are their state in ``shared_state`` and ``rank_state``; ``state_dict``
    and ``load_state_dict`` follow, so that the algorithm can be given to ``kfcomm.elastic.State``.

    *Ranks that change.* In an elastic job an algorithm is kept: it compares itself with the new ranks in the first step
    with them, and ranks that are behind take over its state. After ``shrink`` of a plain communicator assign the new
    one to ``comm``.

    *Switching.* When another algorithm begins for a model of this communicator, by its ``parameters``, all ranks first
    continue with the mean of their models, unless these are equal, and the algorithm begins from that.

    Attributes:
        comm: communicator of the ranks that agree.
        name: prefix of its collectives. Several algorithms in use at once on one communicator need different names.
        num_steps: number of calls of ``parameters`` on this rank, since it began.

    Raises:
        ConfigError: a number is out of its range; on the other ranks their first exchange raises it.
    """

    default_name: ClassVar[str]
    takes_model: ClassVar[bool] = False
    """Whether the constructor takes a model, or a tree like it, after the communicator."""
    shared_state: ClassVar[tuple[str, ...]] = ()
    """Attributes with state that is the same on all ranks: trees of arrays, or values."""
    rank_state: ClassVar[Mapping[str, str]] = {}
    """Attributes with state that differs between ranks, and how it is converted when the ranks change; see
    ``merging``."""
    counts_alike: ClassVar[bool] = True
    """Whether all ranks make the same number of steps; else each its own."""
    shares_gradients = False
    """Whether all ranks continue with the same gradients."""
    keeps_replicas = True
    """Whether the ranks' models differ between exchanges. A subclass that shares gradients keeps none by default."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "shares_gradients" in vars(cls) and "keeps_replicas" not in vars(cls):
            cls.keeps_replicas = not cls.shares_gradients

    def __init__(self, comm: Comm, name: str | None, numbers: Mapping[str, Any], problem: str | None = None) -> None:
        name = None if name is None else checked_name(name)
        self._comm = comm
        self.name = self.default_name if name is None else name
        self.num_steps = 0
        self._meets_as = MEETS_AS if name is None else name
        given = ", ".join(f"{one}={value!r}" for one, value in numbers.items())
        self._said = f"{type(self).__name__}({given})"
        self._introduced: dict[str, int] = {}
        """Epoch in which the ranks have compared each method."""
        self._turn = AlgorithmTurn(self._said, self.keeps_replicas)
        self._model: Model | None = None
        self._is_anew = False
        """Whether it has begun anew in this step, and knows it."""
        self._left_alone: Collection[str] = ()  # parts that ``load_state_dict`` leaves as they are
        if problem is not None:
            refuse(comm, self._said, problem, *map(self._introduction, METHODS))

    @classmethod
    def over(cls, comm: Comm, model: Tree, *, name: str | None = None, **options: Any) -> Self:
        """Make the algorithm for a model: `Algorithm` does so for every kind.

        Args:
            comm: communicator of the ranks that agree.
            model: at the beginning, a tree of arrays.
            name: see `Agreement`.
            options: of the constructor.

        Raises:
            ConfigError: a number is out of its range.
        """
        given = (model,) if cls.takes_model else ()
        make: Callable[..., Self] = cls
        return make(comm, *given, name=name, **options)

    def __repr__(self) -> str:
        return f"<{self._said} of rank {self.comm.rank} of {self.comm.size}>"

    @property
    def comm(self) -> Comm:
        """Communicator of the ranks that agree; to be replaced by that of the ranks that survive (``shrink``)."""
        return self._comm

    @comm.setter
    def comm(self, comm: Comm) -> None:
        self._comm = comm
        self._introduced.clear()
        if self._model is not None:
            former, self._model = self._model, model_of(comm, self._model.key)
            if former.latest is self._turn:
                self._model.latest = self._turn

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state by name: arrays, in containers of the program, and values. Cost: no copies.

        The arrays are the algorithm's own. They are not modified later, and not to be modified.
        """
        latest_of = self._model.key[1] if self._model is not None and self._is_latest else ""
        found = {"num_steps": self.num_steps, "latest_of": latest_of}
        for key, value in self._parts():
            if hasattr(value, "state_dict"):
                found |= {f"{key}/{one}": part for one, part in value.state_dict().items()}
            else:
                found[key] = value
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; its arrays are copied, and converted to the kinds of the algorithm's own.

        Raises:
            ConfigError: it is the state of another algorithm, or of another model; nothing is loaded.
        """
        objects = self._objects()
        given = {key: value for key, value in state.items() if key.partition("/")[0] not in objects}
        own = {key: value for key, value in Agreement.state_dict(self).items() if key.partition("/")[0] not in objects}
        if own.keys() != given.keys():
            raise ConfigError(
                f"the state of {self._said} has {', '.join(sorted(own))}; the given one {', '.join(sorted(given))}"
            )
        found = {key: converted(own[key], value, f"{key} of {self._said}") for key, value in given.items()}
        for key, one in objects.items():
            if key not in self._left_alone:
                one.load_state_dict({k.partition("/")[2]: v for k, v in state.items() if k.partition("/")[0] == key})
        self.num_steps = int(found["num_steps"])
        for one in (*self.shared_state, *self.rank_state):
            if one.lstrip("_") in found:
                setattr(self, one, found[one.lstrip("_")])
        self._become_latest_of(found["latest_of"])

    def merging(self) -> dict[str, str]:
        """Return how the parts of the state that differ between ranks are converted when the ranks change.

        ``mean``: floating-point numbers become the mean over the ranks that have them, other values those of the lowest
        rank. ``sum``: the total over these ranks, divided by the new number of ranks. All other parts are the same on
        all ranks.
        """
        ways = {one.lstrip("_"): how for one, how in self.rank_state.items()}
        found: dict[str, str] = {}
        for key, value in self._parts():
            if hasattr(value, "state_dict"):
                own = value.merging() if hasattr(value, "merging") else dict.fromkeys(value.state_dict(), ways.get(key))
                found |= {f"{key}/{one}": how for one, how in own.items() if how is not None}
            elif key in ways:
                found[key] = ways[key]
        return found

    def _parts(self) -> list[tuple[str, Any]]:
        return [(one.lstrip("_"), getattr(self, one)) for one in (*self.shared_state, *self.rank_state)]

    def _objects(self) -> dict[str, Any]:
        return {key: value for key, value in self._parts() if hasattr(value, "state_dict")}

    def restart(self, model: Tree) -> None:
        """Begin anew with a model that is the same on all ranks, as if made with it now."""
        self.num_steps = 0
        self._start_from(model)

    def _start_from(self, model: Tree) -> None:
        """Begin from this model. A subclass copies what it keeps of it."""

    # ---------------------------------------------------------------- exchanges

    @carried
    def introduce(self) -> Procedure[None]:
        """Check now, not at the first exchange, that all ranks use the same algorithm. Every rank calls it, or none.

        Raises:
            CollectiveMismatch, ConfigError: see ``gradients``.
        """
        names = [self._introduction(method) for method in METHODS]
        rows = yield from together(call("all_gather_object", [self._said, None], name) for name in names)
        for name, told in zip(names, rows, strict=True):  # after both: what one rank has told is heard by all
            check_alike(self.comm.rank, self._said, told, name)

    @carried
    def gradients(self, tree: Tree) -> Procedure[Tree]:
        """Exchange gradients; returns a `Pending` tree like ``tree`` for the optimizer.

        Raises:
            CollectiveMismatch: from waiting: the ranks agree in different ways.
            ConfigError: another rank was given numbers that cannot be; or gradients are shared, and the models of the
                ranks differ since another algorithm: call ``parameters`` first.
            CollectiveError: an exchange failed.
        """
        if self._introduced.get("gradients") != epoch_of(self._comm) or self._unequal_since is not None:
            yield from self._introduce_gradients(tree)
        return (yield from self._gradients(tree))

    @carried
    def parameters(self, tree: Tree) -> Procedure[Tree]:
        """Exchange models; returns a `Pending` tree like ``tree`` to continue with. Called once a step.

        Raises:
            CollectiveMismatch, ConfigError, CollectiveError: see ``gradients``.
        """
        begins = self._introduced.get("parameters") != epoch_of(self._comm) or not self._is_latest
        former = self._take_turn(tree) if begins else None
        self._step_begins()
        if begins:
            tree = yield from self._begin(tree, former)
        self.num_steps += 1
        return (yield from self._parameters(tree))

    # Without an exchange, unless a subclass overrides them.

    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        yield from ()
        return tree

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        yield from ()
        return tree

    def _step_begins(self) -> None:
        """Decide what is decided once for the gradients and the model of a step, before any wait."""

    def _ranks_changed(self, tree: Tree) -> None:
        """Follow the size and the rank, before the first exchange with these ranks; ``tree`` is the model."""

    # ---------------------------------------------------------------- the first exchange with these ranks

    def _introduction(self, method: str) -> str:
        return f"{self._meets_as}/introduction of {method}"

    @property
    def _is_latest(self) -> bool:
        return self._model is not None and self._model.latest is self._turn

    @property
    def _unequal_since(self) -> AlgorithmTurn | None:
        """Turn of another algorithm, after which models differ, where this one needs equal ones; else None."""
        if not self.shares_gradients or self._model is None:
            return None
        latest = self._model.latest
        return None if latest is None or latest is self._turn or not latest.keeps_replicas else latest

    def _become_latest_of(self, digest: str) -> None:
        """Take the turn of a model, or return the turn of any; nothing begins by that."""
        if not digest:
            self._return_turn()
            return
        self._model = model_of(self._comm, (self._meets_as, digest))
        if not self._is_latest:
            self._model.take(self._turn)

    def _model_of(self, tree: Tree) -> Model:
        return model_of(self._comm, (self._meets_as, digest_of(leaves(tree))))

    def _take_turn(self, tree: Tree) -> AlgorithmTurn | None:
        """Become the latest algorithm of the model, anew; returns the turn of another one that was it."""
        self._model, self._is_anew = self._model_of(tree), False
        if self._is_latest:
            # A rank was lost in the first step, which may be made again, with the models of before: agree on them, too.
            return self._turn.former if self.shares_gradients and self.num_steps == 1 else None
        former = self._model.take(self._turn)
        # Without a former turn the state is one that was loaded: of an algorithm that another one has followed.
        self._is_anew = former is not None or self.num_steps > 0
        if self._is_anew:
            self.restart(tree)
        return former

    def _return_turn(self) -> None:
        if self._model is not None and self._is_latest:
            self._model.latest = self._turn.former

    def _introduce_gradients(self, tree: Tree) -> Procedure[None]:
        if self._model is None:
            self._model = self._model_of(tree)
        self._introduced["gradients"] = epoch_of(self._comm)
        name, unequal = self._introduction("gradients"), self._unequal_since
        row = [self._said, None, self.shares_gradients, None if unequal is None else unequal.said]
        told = yield call("all_gather_object", row, name)
        check_alike(self.comm.rank, self._said, told, name)
        for rank, (_, _, shares, since) in enumerate(told):
            if since is not None:
                raise ConfigError(
                    f"the models of the ranks differ since {since}, and {self._said} shares gradients: call its "
                    "parameters(model) first, which makes them equal"
                )
            if shares != told[0][2]:
                raise CollectiveMismatch(
                    f"{self._said} of rank {rank} {'shares' if shares else 'does not share'} gradients by now, unlike "
                    f"that of rank 0: {HAND_OVER}", key=name,
                )  # fmt: skip

    def _begin(self, tree: Tree, former: AlgorithmTurn | None) -> Procedure[Tree]:
        """Compare the ranks at the first step, after another algorithm, and when the ranks have changed."""
        name = self._introduction("parameters")
        self._ranks_changed(tree)
        self._introduced["parameters"] = epoch_of(self._comm)
        # Now, not when the others have answered: until then gradients may be exchanged, from which a monitor learns.
        digests = state_digests(self._objects(), self.merging())
        row = [self._said, None, self.num_steps, former and former.keeps_replicas, self.comm.rank, digests]
        try:
            told = yield call("all_gather_object", row, name)
            check_alike(self.comm.rank, self._said, told, name)
            replicas = [one[3] for one in told if one[3] is not None]
            if not replicas:
                alike = dict(set.intersection(*(set(one[5].items()) for one in told)))
                yield from self._catch_up({rank: steps for _, _, steps, _, rank, _ in told}, alike)
                return tree
            if not self._is_anew:
                self.restart(tree)
            return (yield from self._switch(tree, any(replicas)))
        except BaseException:
            if former is not None:
                self._return_turn()
            self._introduced.pop("parameters", None)
            raise

    def _switch(self, tree: Tree, are_replicas: bool) -> Procedure[Tree]:
        """Continue with the mean of the models that another algorithm has left."""
        logger.info("rank %d: %s begins, after another algorithm", self.comm.rank, self._said)
        if are_replicas:
            tree = yield from self._reduced(tree, "agreed")
        self._start_from(tree)
        return tree

    def _catch_up(self, steps: Mapping[int, int], alike: Collection[str]) -> Procedure[None]:
        """Take over the state of the first rank that is ahead, where the program has not handed it to a new rank."""
        most = max(steps.values())
        if not self.counts_alike or min(steps.values()) == most:
            return
        root = min(rank for rank, one in steps.items() if one == most)
        # What is alike, such as a monitor that the program has handed over by itself, stays as it is.
        own = {key: value for key, value in self.state_dict().items() if key.partition("/")[0] not in alike}
        parts = leaves(own)
        arrays = {one: x for one, x in parts.items() if is_array(x)}
        values = {one: x for one, x in parts.items() if one not in arrays}
        told = yield call("all_gather_object", [self.comm.rank, values], f"{self.name}/state")
        found = dict(next(row for rank, row in told if rank == root))
        for one, x in arrays.items():
            found[one] = yield call("broadcast", x, root, f"{self.name}/state/{one}")
        if self.num_steps < most:
            self._left_alone = alike
            try:
                self.load_state_dict(rebuilt(own, found))
            finally:
                self._left_alone = ()

    def _reduced(self, tree: Tree, what: str, op: Any = "avg") -> Procedure[Tree]:
        """Reduce the arrays of a tree over all ranks; then ``_num_met`` is the number of those in the result."""
        made = call("all_reduce_many", leaves(tree), f"{self.name}/{what}", op=op)
        self._num_met = self.comm.size
        if not getattr(self.comm, "outlives", False):
            return rebuilt(tree, (yield made))
        handle = yield made._replace(is_begun=True)
        found = yield handle
        self._num_met = len(handle.contributors or ()) or self._num_met
        return rebuilt(tree, found)

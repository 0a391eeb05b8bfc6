"""Algorithms that are compared with those of the other ranks before they exchange anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.jax.collectives import all_reduce, broadcast, called
from kfcomm.sync.adapter import Adapter
from kfcomm.train.agreement import introduction, refuse
from kfcomm.train.procedure import Pending, is_elastic

Tree: TypeAlias = Any
T = TypeVar("T")


class ComparedAlgorithm:
    """An algorithm on this rank: its description, its comparison with the other ranks, and its collectives."""

    def __init__(self, comm: Any, name: str, said: str, problem: str | None) -> None:
        if not isinstance(comm, Adapter):
            raise ConfigError(f"optimizers of JAX need a communicator of kfcomm.sync, not a {type(comm).__name__}")
        self._comm: Any = comm
        self._name = checked_name(name)
        self._said = said
        self._is_elastic = is_elastic(comm)
        self._epoch: int | None = None
        if problem is not None:
            refuse(comm, said, problem, self._introduction)

    @property
    def _introduction(self) -> str:
        return f"{self._name}/introduction"

    def meet(self, tree: Tree) -> Any:
        """Compare the ranks of an elastic job when they have changed; returns their number, maybe a traced one."""
        if not self._is_elastic:
            return self._comm.size

        def number(given: list[Any]) -> list[Any]:
            epoch = self._comm.epoch
            if epoch != self._epoch:
                self._introduce()
                self._epoch = epoch
            return [np.full_like(given[0], self._comm.size)]

        # Of the tree only whether it is traced matters.
        (found,) = called(self._comm, number, [jnp.asarray(jax.tree.leaves(tree)[0]).ravel()[:1].sum()])
        return found

    def _introduce(self) -> None:
        Pending(self._comm, introduction(self._comm.rank, self._said, self._introduction)).wait()

    def starting(self, start: Callable[[Tree], T]) -> Callable[[Tree], T]:
        """An ``init`` that first compares this rank with the others."""

        def init(params: Tree) -> T:
            if self._is_elastic:
                return start(params)
            self._introduce()
            leaves = jax.tree.leaves(params)
            # Traced params have no values that could be compared.
            is_there = not any(isinstance(x, jax.core.Tracer) for x in leaves)
            if is_there and not self._comm.consensus(leaves, name=f"{self._name}/params"):
                raise ConfigError(
                    f"{self._said} begins with the same params on all ranks, and these differ: kfcomm.jax.broadcast"
                )
            return start(params)

        return init

    def on_models(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """An ``update`` that needs ``params``."""

        def checked(updates: Tree, state: Any, params: Tree = None) -> Any:
            if params is None:
                raise ConfigError(f"{self._said} agrees on models: update(updates, state, params) needs params")
            self.meet(params)
            return update(updates, state, params)

        return checked

    def reduced(self, tree: Tree, what: str, op: str = "avg") -> Tree:
        """The tree, reduced over all ranks."""
        return all_reduce(tree, self._comm, name=f"{self._name}/{what}", op=op)

    def of_first(self, tree: Tree, what: str) -> Tree:
        """The tree of rank 0."""
        return broadcast(tree, self._comm, name=f"{self._name}/{what}")

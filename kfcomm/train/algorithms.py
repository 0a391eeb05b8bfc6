"""Algorithms by name: one description, the same on all ranks, from which an algorithm is made for any model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kfcomm.common.arguments import hint
from kfcomm.errors import ConfigError
from kfcomm.train.adaalter import LocalAdaAlter
from kfcomm.train.adasgd import AdaSGD
from kfcomm.train.agreement import Agreement, Tree
from kfcomm.train.asynchronous import PairAveraging
from kfcomm.train.averages import SMA, DiLoCo, ElasticAveraging, LocalSGD, SynchronousSGD
from kfcomm.train.procedure import Comm

KINDS: Mapping[str, tuple[type[Agreement], dict[str, Any]]] = {
    "ssgd": (SynchronousSGD, {}),
    "adasum": (SynchronousSGD, {"op": "adasum"}),
    "sma": (SMA, {}),
    "ea-sgd": (ElasticAveraging, {}),
    "local-sgd": (LocalSGD, {}),
    "diloco": (DiLoCo, {}),
    "local-adaalter": (LocalAdaAlter, {}),
    "adasgd": (AdaSGD, {}),
    "pair-averaging": (PairAveraging, {}),
}
"""Class and fixed options of each name."""

Kind: TypeAlias = str | type[Agreement] | Callable[..., Agreement]


@dataclass(frozen=True)
class Algorithm:
    """How replicas agree, without a communicator or a model: what ``attach`` and other adapters take.

    ============== ======================== ====================================================
    kind           class                    options
    ============== ======================== ====================================================
    ssgd           `SynchronousSGD`         ``op``, ``monitor``, ``wire_dtype``
    adasum         the same                 none: a ``monitor`` and a ``wire_dtype`` are refused
    sma            `SMA`                    ``alpha``
    ea-sgd         `ElasticAveraging`       ``alpha``, ``every``
    local-sgd      `LocalSGD`               ``every``, which has to be given
    diloco         `DiLoCo`                 ``every``, ``lr``, ``momentum``
    local-adaalter `LocalAdaAlter`          ``every``, which has to be given, ``epsilon``, ``initial``
    adasgd         `AdaSGD`                 ``alpha``, ``after``
    pair-averaging `PairAveraging`          ``peers``, ``weights``, ``max_staleness``, ``seed``
    ============== ======================== ====================================================

    Args:
        kind: one of these names, a subclass of `Agreement`, or a function ``(comm, model, *, name)``, with the options
            as further keywords, that returns one.
        options: of the class.

    Raises:
        ConfigError: the kind is unknown, has no such option, or needs another one.
    """

    kind: Kind
    options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, kind: Kind, **options: Any) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "options", options)
        if isinstance(kind, str) and kind not in KINDS:
            raise ConfigError(f"algorithm {kind!r} is not known; known are {', '.join(KINDS)}{hint(kind, KINDS)}")
        if not isinstance(kind, str) and not callable(kind):
            raise ConfigError(f"expected the name of an algorithm, a class or a function, got {kind!r}")
        make, fixed = self._found
        if twice := fixed.keys() & options.keys():
            raise ConfigError(f"algorithm {str(self)!r} is one with a fixed {', '.join(sorted(twice))}")
        takes_model = True
        if _is_algorithm(make):
            if any("over" in vars(kind) for kind in make.__mro__[: make.__mro__.index(Agreement)]):
                make = make.over
            else:  # takes all options, and hands them to the class
                takes_model = make.takes_model
        try:
            inspect.signature(make).bind(*(None,) * (1 + takes_model), name=None, **fixed, **options)
        except TypeError as error:
            raise ConfigError(f"algorithm {str(self)!r}: {error}") from None

    def __str__(self) -> str:
        return self.kind if isinstance(self.kind, str) else getattr(self.kind, "__name__", repr(self.kind))

    @classmethod
    def of(cls, given: Algorithm | Kind) -> Algorithm:
        """Return an algorithm as it is, and that of a name, a class or a function without options.

        Raises:
            ConfigError: see `Algorithm`.
        """
        return given if isinstance(given, Algorithm) else cls(given)

    def has_option(self, name: str) -> bool:
        """Whether it takes an option of this name."""
        try:
            type(self)(self.kind, **{**self.options, name: None})
        except ConfigError:
            return False
        return True

    @property
    def keeps_replicas(self) -> bool:
        """Whether the ranks' models differ between exchanges; a function is taken to make such an algorithm."""
        return bool(getattr(self._found[0], "keeps_replicas", True))

    def made(self, comm: Comm, model: Tree, name: str | None = None) -> Agreement:
        """Make the algorithm.

        Args:
            comm: communicator of the ranks that agree.
            model: at the beginning, a tree of arrays, the same on all ranks.
            name: see `Agreement`.

        Raises:
            ConfigError: a number is out of its range; or the function returns something else.
        """
        make, fixed = self._found
        found = (make.over if _is_algorithm(make) else make)(comm, model, name=name, **fixed, **self.options)
        if not isinstance(found, Agreement):
            raise ConfigError(f"algorithm {str(self)!r} made a {type(found).__name__}, which is not an Agreement")
        return found

    @property
    def _found(self) -> tuple[Any, Mapping[str, Any]]:
        """Class or function, and the options that the name fixes."""
        return KINDS[self.kind] if isinstance(self.kind, str) else (self.kind, {})


def _is_algorithm(make: Any) -> bool:
    return isinstance(make, type) and issubclass(make, Agreement)

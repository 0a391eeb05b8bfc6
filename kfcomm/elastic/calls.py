"""Verbs that survive the loss of a rank, and calls of them with the caller's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from kfcomm.collectives.batches import names_of
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.specs import SPECS, VerbSpec
from kfcomm.collectives.units import many_key
from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.strategies import StrategySpec
from kfcomm.types import Verb
from kfcomm.world.communicator import Communicator


class VerbTraits(NamedTuple):
    """Traits of a verb that decide how it survives a loss."""

    # Each rank has a result of its own (or none), which other ranks do not have. Such a call is over when all ranks
    # have their results.
    is_own: bool = False
    is_rooted: bool = False
    can_shrink: bool = True  # the surviving ranks can repeat it without the lost ones


def _traits(spec: VerbSpec) -> VerbTraits:
    return VerbTraits(spec.for_root or spec.differs, spec.is_rooted, can_shrink=not spec.differs)


_ALL_REDUCE, _ALL_GATHER, _BROADCAST, _GATHER = (
    _traits(SPECS[verb]) for verb in (Verb.ALL_REDUCE, Verb.ALL_GATHER, Verb.BROADCAST, Verb.GATHER)
)
KINDS: Mapping[str, VerbTraits] = {str(verb): _traits(spec) for verb, spec in SPECS.items()} | {
    "monitored_all_reduce": _ALL_REDUCE,
    "all_reduce_many": _ALL_REDUCE,
    "consensus": _ALL_GATHER,
    "all_gather_object": _ALL_GATHER,
    "broadcast_object": _BROADCAST,
    "gather_object": _GATHER,
    # The parts of the root differ, and so does what is left of them if a rank is lost.
    "scatter": _traits(SPECS[Verb.ALL_TO_ALL]),
    "scatter_object": _traits(SPECS[Verb.ALL_TO_ALL]),
}
"""Verbs that survive the loss of a rank."""

_PARAMETERS = {verb: tuple(inspect.signature(getattr(Communicator, verb)).parameters.values())[1:] for verb in KINDS}
_PLACES = {verb: {one.name: place for place, one in enumerate(found)} for verb, found in _PARAMETERS.items()}
_DEFAULTS = {verb: {one.name: one.default for one in found} for verb, found in _PARAMETERS.items()}


@lru_cache(1 << 12)
def _checked(name: str) -> str:
    return checked_name(name)  # of names that come in each step: 50 bytecodes of each call


class ElasticCall:
    """Call of a verb, with the caller's arguments."""

    __slots__ = ("args", "kind", "kwargs", "verb")

    def __init__(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.verb = verb
        self.kind = KINDS[verb]
        self.args = args
        self.kwargs = kwargs

    def get(self, name: str) -> Any:
        """Return an argument; None if the verb does not have it, or it was left out and has no default."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = _PLACES[self.verb].get(name, len(self.args))
        if place < len(self.args):
            return self.args[place]
        default = _DEFAULTS[self.verb].get(name)
        return None if default is inspect.Parameter.empty else default

    def title(self) -> str:
        """Return the text by which the ranks match the call, as in a plain job; empty without a name."""
        name = self.kwargs.get("name")
        if name is None:
            name = self.get("name")
        name = _checked(name) if type(name) is str else checked_name(name)
        # Without a name, the names of the arrays identify the call, as in a plain job.
        if self.verb != "all_reduce_many":
            return name or ""
        names = names_of(self.get("arrays")) if name is None else [name]
        return many_key(names) if names else ""

    def begin(
        self, comm: Communicator, root: Any, out: Any, timeout_s: float | None = None, *, has_lost: bool = False
    ) -> Handle[Any]:
        """Call the verb with another root and ``out``, and with another timeout, if one is given.

        ``has_lost``: these are not all ranks of the step; a strategy that is not for so few is left out.
        """
        args, kwargs = self.args, self.kwargs
        places = _PLACES[self.verb]
        changed: dict[str, Any] = {}
        if has_lost and self.get("strategy") is not None and not _can_build(comm, self.get("strategy")):
            changed["strategy"] = None
        if self.kind.is_rooted:
            changed["root"] = root
        if "out" in places:
            changed["out"] = out
        if timeout_s is not None:
            changed["timeout"] = timeout_s
        # Arguments are replaced where the caller gave them, by position or by name, so that the verb
        # sees one value for each.
        for name in list(changed):
            place = places[name]
            if place < len(args):
                args = (*args[:place], changed.pop(name), *args[place + 1 :])
        begun: Handle[Any] = getattr(comm, self.verb)(*args, **(kwargs | changed))
        return begun


def _can_build(comm: Communicator, strategy: StrategySpec) -> bool:
    try:
        comm._group.build(strategy)
    except ConfigError:
        return False
    return True

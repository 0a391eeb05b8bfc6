"""Calls that carry objects, and those of single ranks: messages, queues, and what a rank keeps for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.programs.arrays import RANK_STRIDE, OneOf, Shape, filled
from tests.programs.calls import Action, Pipe


def an_object(salt: int, rank: int) -> Any:
    """Something that msgpack can carry, of a rank's own."""
    kinds: list[Any] = [
        salt * 10 + rank,
        f"rank {rank}, {salt}",
        bytes([rank, salt % 256]) * (salt % 50),
        None,
        {"rank": rank, "nested": [salt, {"x": [rank / 2, True]}, {}]},
        {rank: salt, "text": "é" * (salt % 7)},
        [],
        "x" * (salt % 3000) + str(rank),
    ]
    return kinds[(salt + rank) % len(kinds)]


@dataclass(frozen=True, slots=True)
class Objects:
    """A collective of objects."""

    verb: str
    size: int
    name: str | None
    salt: int
    root: int
    priorities: tuple[int, ...]

    @property
    def names(self) -> Sequence[str]:
        """See `Call`."""
        return [] if self.name is None else [self.name]

    def action(self, rank: int) -> Action:
        """See `Call`."""
        values = [an_object(self.salt, one) for one in range(self.size)]
        options: dict[str, Any] = {"name": self.name, "priority": self.priorities[rank]}
        if self.verb != "all_gather_object":
            options["root"] = self.root
        is_root = rank == self.root
        match self.verb:
            case "broadcast_object":
                return Action(self.verb, (values[rank],), options, values[self.root])
            case "all_gather_object":
                return Action(self.verb, (values[rank],), options, values)
            case "gather_object":
                return Action(self.verb, (values[rank],), options, values if is_root else None)
        return Action("scatter_object", (values if is_root else None,), options, values[rank])


@dataclass(frozen=True, slots=True)
class Message:
    """Message from one rank of a group to another; an object if it has no dtype."""

    source: int
    to: int
    tag: int | str
    salt: int
    dtype: str | None
    shape: Shape = ()

    @property
    def value(self) -> Any:
        """Sent value."""
        start = self.salt + RANK_STRIDE * self.source
        return an_object(self.salt, self.source) if self.dtype is None else filled(self.dtype, self.shape, start)


@dataclass(frozen=True, slots=True)
class Send:
    """``send`` or ``send_object``."""

    message: Message
    priority: int
    names: Sequence[str] = ()

    def action(self, rank: int) -> Action | None:
        """See `Call`."""
        one = self.message
        if rank != one.source:
            return None
        x = one.value
        options = {"priority": self.priority}
        if one.dtype is None:
            return Action("send_object", (x, one.to, one.tag), options)
        return Action("send", (x, one.to, one.tag), options, inputs=[x])


@dataclass(frozen=True, slots=True)
class Recv:
    """``recv``, ``recv_any`` or ``recv_object``.

    Attributes:
        others: ``recv_any`` of any rank, which may get one of these messages, too.
    """

    message: Message
    priority: int
    verb: str
    has_out: bool = False
    others: tuple[Message, ...] = ()
    names: Sequence[str] = ()

    def action(self, rank: int) -> Action | None:
        """See `Call`."""
        one = self.message
        if rank != one.to:
            return None
        value, options = one.value, {"priority": self.priority}
        if self.others:
            return Action(
                "recv_any", (None, one.tag), options, OneOf({each.source: each.value for each in self.others})
            )
        args = (one.source, one.tag)
        if self.verb == "recv_object":
            return Action("recv_object", args, options, value)
        out = np.full(value.shape, 1, value.dtype) if self.has_out else None
        if out is not None:
            options = {**options, "out": out}
        if self.verb == "recv_any":
            return Action("recv_any", args, options, (value, one.source))
        return Action("recv", args, options, value, out=out)


@dataclass(frozen=True, slots=True)
class Put:
    """``put`` of a queue."""

    pipe: Pipe
    message: Message
    names: Sequence[str] = ()

    def action(self, rank: int) -> Action | None:
        """See `Call`."""
        if rank != self.pipe.source:
            return None
        x = self.message.value
        return Action("put", (x,), inputs=[x], pipe=self.pipe)


@dataclass(frozen=True, slots=True)
class Get:
    """``get`` of a queue."""

    pipe: Pipe
    message: Message
    names: Sequence[str] = ()

    def action(self, rank: int) -> Action | None:
        """See `Call`."""
        return Action("get", expected=self.message.value, pipe=self.pipe) if rank == self.pipe.target else None


@dataclass(frozen=True, slots=True)
class Save:
    """``save`` on one rank; ``version`` None: the next one."""

    key: str
    message: Message
    version: int | None
    names: Sequence[str] = ()

    def action(self, rank: int) -> Action | None:
        """See `Call`."""
        if rank != self.message.source:
            return None
        x = self.message.value
        options = {} if self.version is None else {"version": self.version}
        return Action("save", (self.key, x), options, self.version, [x], any_result=self.version is None)


@dataclass(frozen=True, slots=True)
class Request:
    """``request`` of what a rank has saved, on these ranks."""

    save: Save
    ranks: tuple[int, ...]
    names: Sequence[str] = ()

    def action(self, rank: int) -> Action | None:
        """See `Call`."""
        one = self.save
        if rank not in self.ranks:
            return None
        options = {} if one.version is None else {"version": one.version}
        return Action("request", (one.key, one.message.source), options, one.message.value)

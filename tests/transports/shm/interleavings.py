"""All interleavings of a model: every state that can be reached, each looked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

S = TypeVar("S")


class TornError(AssertionError):
    """A rank has read what belongs to another use."""


def search(start: S, following: Callable[[S], Iterable[S]], ends: Callable[[S], bool]) -> int:
    """How many states there are; each is hashable.

    Args:
        start: the first one.
        following: those that may come next; raises if a state is wrong.
        ends: whether all may stay as they are, in a state that nothing follows.
    """
    todo, known = [start], {start}
    while todo:
        state = todo.pop()
        new = list(following(state))
        assert new or ends(state), f"they wait for ever: {state}"
        for one in new:
            if one not in known:
                known.add(one)
                todo.append(one)
    return len(known)

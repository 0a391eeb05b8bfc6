"""What the engine owes to links through which a payload is gone at once."""

from __future__ import annotations

import numpy as np

from kfcomm import testing
from tests.conformance.worlds import on_loop, turns, works

X = np.ones(3)


@on_loop
async def test_what_is_over_as_it_is_posted_has_left_by_then() -> None:
    """Its caller may block the loop from now on: the others must not wait for its next turn."""
    async with testing.world(2, strategy="star", transport="shm") as comms:
        await works(comms)
        leaf = comms[1].all_reduce(X, "x")
        while not any(key.early for key in comms[0]._session.engine.router._names):
            await turns(1)
        root = comms[0].all_reduce(X, "x")
        assert root.done()
        assert not comms[0]._session.engine.ends._dirty
        assert (await leaf).tolist() == root.result().tolist() == [2.0] * 3

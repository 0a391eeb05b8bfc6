"""Double trees among too many hosts: their time, from those of two small ones.

All ranks of a double tree differ: who is above others in the one tree is a leaf at another place of the other. But
chunks follow each other through both trees, so that each level adds the same time to the way of the last one. Two trees
all of whose leaves are equally deep are simulated, and the time grows linearly from the one to the other, and on.

Beside full runs at 150 to 4,500 hosts the error was −1 to +6 %, the most where few leaves lie on the deepest level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kfcomm.simulate.network import SimulatedNetwork
from kfcomm.simulate.results import CallResult, StepResult
from kfcomm.simulate.symmetry import MANY_MESSAGES, Simulated, chunk_nbytes_of_message, is_turnable
from kfcomm.strategies import Strategy
from kfcomm.strategies.builtin import double_tree
from kfcomm.types import Layout, Verb

_RANKS: Final = 1024
"""At most so many ranks have the larger of the small trees."""
_APART: Final = 2
"""Levels between them: what one level adds depends on whether it is an odd one, a little."""


def levels_of(num_hosts: int) -> int:
    """Depth of each tree."""
    return (num_hosts // 2).bit_length()


def is_too_large(calls: list[Simulated]) -> bool:
    """Whether this is one all_reduce along a double tree, of more messages than can be simulated, on equal hosts."""
    (call, *others) = calls
    layout = call.layout
    local = layout.size // layout.num_hosts
    if others or call.graphs.name != "double_tree" or call.message.verb is not Verb.ALL_REDUCE:
        return False
    if call.turns is not None or len(call.graphs.pairs) < 2:
        return False
    if not is_turnable(call.network) or call.network.hosts_per_switch or call.network.burst_nbytes:
        return False
    ranks = layout.size if call.classes is None else int(call.classes.max()) + 1
    if _hosts(local) >= layout.num_hosts or call.num_messages * ranks // layout.size <= MANY_MESSAGES:
        return False
    is_even = layout.hosts == tuple(rank // local for rank in range(layout.size))
    return is_even and double_tree(layout).pairs == call.graphs.pairs


def extrapolated(call: Simulated, run: Callable[[Strategy, Layout, SimulatedNetwork], StepResult]) -> StepResult:
    """The result, by ``run`` on two smaller networks."""
    layout, local = call.layout, call.layout.size // call.layout.num_hosts
    chunk_nbytes = chunk_nbytes_of_message(call.graphs, call.message, layout)
    small, large = (_run(call, hosts, local, chunk_nbytes, run) for hosts in (_hosts(local, _APART), _hosts(local)))
    more = levels_of(layout.num_hosts) - levels_of(large.num_hosts)
    seconds = large.seconds + more * (large.seconds - small.seconds) / _APART
    return replace(
        large,
        size=layout.size,
        num_hosts=layout.num_hosts,
        seconds=seconds,
        rank_seconds=(seconds,) * layout.size,
        calls=(_grown(large.calls[0], seconds, layout.size, large.size),),
        events=small.events + large.events,
        simulated_ranks=small.size + large.size,
        is_exact=False,
    )


def _grown(call: CallResult, seconds: float, size: int, simulated: int) -> CallResult:
    """A call among more ranks: in a tree each but the root sends and receives alike."""
    return replace(
        call,
        done_s=seconds,
        rank_seconds=(seconds,) * size,
        messages=call.messages * (size - 1) // (simulated - 1),
        nbytes_sent=call.nbytes_sent * (size - 1) // (simulated - 1),
    )


def _hosts(local: int, fewer: int = 0) -> int:
    """Hosts of a small tree whose leaves are all equally deep."""
    return (1 << max(2, (_RANKS // local).bit_length() - 1 - fewer)) - 1


def _run(
    call: Simulated, hosts: int, local: int, chunk_nbytes: int,
    run: Callable[[Strategy, Layout, SimulatedNetwork], StepResult],
) -> StepResult:  # fmt: skip
    whole = call.layout
    layout = Layout(tuple(rank // local for rank in range(hosts * local)), whole.num_cpus, whole.costs)
    strategy = replace(double_tree(layout), chunk_nbytes=chunk_nbytes)
    return run(strategy, layout, replace(call.network, hosts=call.network.hosts[:hosts]))

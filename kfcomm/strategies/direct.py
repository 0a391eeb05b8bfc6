"""Direct: every rank makes its result of all contributions, added in the order of the ranks. Owns those graphs.

Where the ranks share memory no message is needed: each shows what it gives, and reads what the others do (see
``transports.shm.slots``). Elsewhere every rank sends a short message to every other, one step where a star has two, if
a host has a processor for each of its ranks; else messages go along a star around rank 0, 2(n−1) and not n(n−1),
with the same bits. Those of more than `base.DIRECT_NBYTES` go along the graphs of ``chain_star``, and have their bits
in shared memory, too. The other verbs go as in ``clique`` if they are short and there are no slots, and as in
``chain_star`` if they are long. Does not look at the kind of links.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Direct, Strategy
from kfcomm.strategies.chain_star import chain_star
from kfcomm.strategies.cost import Cost
from kfcomm.strategies.shapes import host_sizes, star_around
from kfcomm.types import Layout

FORMULA = "steps 1; bytes n−1; between hosts max p(n−p)"


def direct(layout: Layout) -> Strategy:
    """One star around each rank, and for long messages a chain to it as well."""
    size = layout.size
    has_a_processor_each = not layout.num_cpus or max(host_sizes(layout)) <= layout.num_cpus
    return Strategy(
        "direct",
        tuple(GraphPair.of(star_around(size, r)) for r in range(size)),
        direct=Direct.ONE_STEP if has_a_processor_each else Direct.STAR,
        for_long=Strategy("direct", chain_star(layout).pairs, direct=Direct.CHAINS),
    )


def cost(layout: Layout) -> Cost:
    """Of ``n`` ranks: 1 step, n−1 bytes; between hosts the greatest p(n−p) of a host with ``p`` ranks.

    (No steps for a single rank.) The same in memory, where bytes are read and not sent.
    """
    size = layout.size
    return Cost(
        steps=min(1, size - 1),
        bytes=Fraction(size - 1),
        cross_host_bytes=max(Fraction(p * (size - p)) for p in host_sizes(layout)),
    )

"""The host's collectives that a call of device memory is made of: plans of its segments, signed as parts of the whole.

Invariants: which graphs a segment takes follows from its own size, as for any collective of the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kfcomm.collectives.plans import Plan, Planner
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.on_device.calls import Call


def plan_of(call: Call, count: int) -> Plan:
    """The plan of a segment of ``count`` elements.

    Signed with what the whole call is, so that ranks that differ in that find out, wherever their segments are alike.
    """
    plan, whole = _made(call, count), call.signature
    signature = plan.signature._replace(shape=whole.shape, counts=whole.counts, memory=whole.memory)
    return replace(plan, signature=signature)


def _made(call: Call, count: int) -> Plan:
    plans, dtype, shape, verb = call.plans, call.dtype, call.shape, call.verb
    if verb is Verb.ALL_REDUCE:
        return plans.all_reduce(dtype, (count,), call.op or Op.SUM, call.key)
    if verb is Verb.REDUCE:
        return plans.plan(Planner.reduce, dtype, (count,), call.op, call.root)
    if verb is Verb.BROADCAST:
        return plans.plan(Planner.broadcast, dtype, (count,), call.root)
    if verb is Verb.ALL_GATHER:
        return plans.plan(Planner.all_gather, dtype, shape)
    if verb is Verb.GATHER:
        return plans.plan(Planner.gather, dtype, shape, call.root)
    if verb is Verb.REDUCE_SCATTER:
        return plans.plan(Planner.reduce_scatter, dtype, shape, call.op)
    size = plans.planner.size
    return plans.plan(Planner.all_to_all, dtype, shape[1:], ((shape[0] // size,) * size,) * size)

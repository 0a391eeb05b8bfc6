"""Programs are the same for all ranks, of all verbs, and right by their own rules; what goes wrong is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kfcomm
from kfcomm import testing
from tests.programs.arrays import DTYPES, OPS, OneOf, difference, filled, folded
from tests.programs.calls import Do, Program, Step, Together, Wait
from tests.programs.generator import COLLECTIVES, MAX_IN_FLIGHT, program
from tests.programs.messages import Recv
from tests.programs.walker import Awaiting, Plan, Report, Walker, blocking, worst

SEEDS = st.integers(0, 1 << 31)
SIZES = st.integers(1, 5)
NOT_CALLED = {
    "agree", "close", "dump", "empty", "group", "mismatched", "probe", "queue", "refuse", "set_timeout", "shrink",
    "split", "statistics", "synchronize",
}  # fmt: skip
PROPERTIES = {
    "births", "epoch", "layout", "local_rank", "local_size", "name", "outlives", "rank", "route", "shares_memory",
    "size", "strategy",
}  # fmt: skip


def calls_of(step: Step) -> Sequence[Do]:
    return [step] if isinstance(step, Do) else step.dos if isinstance(step, Together) else []


def calls(one: Program) -> list[Do]:
    return [do for step in one.steps for do in calls_of(step)]


@given(SEEDS, SIZES)
def test_a_program_is_made_of_its_seed_and_a_shorter_one_is_its_beginning(seed: int, size: int) -> None:
    whole, part = program(seed, 60, size), program(seed, 20, size)
    assert whole == program(seed, 60, size)
    assert calls(whole)[:20] == calls(part)[:20]
    last = next(place for place, step in enumerate(part.steps) if calls_of(step) and calls_of(step)[-1].number >= 19)
    assert whole.steps[: last + 1] == part.steps[: last + 1]
    assert len(calls(whole)) >= 60


@given(SEEDS, SIZES)
def test_no_name_is_used_while_it_is_in_flight_and_everything_is_waited_for(seed: int, size: int) -> None:
    made = program(seed, 120, size)
    in_flight: dict[int, Do] = {}
    numbers = []
    for step in made.steps:
        if isinstance(step, Wait):
            for number in step.numbers:
                del in_flight[number]
            continue
        for do in calls_of(step):
            numbers.append(do.number)
            busy = {name for one in in_flight.values() if one.comm == do.comm for name in one.call.names}
            assert not busy.intersection(do.call.names)
            if not all(do.blocks[rank] for rank in made.members[do.comm]):
                in_flight[do.number] = do
        assert len(in_flight) <= MAX_IN_FLIGHT + 20
    assert not in_flight
    assert numbers == list(range(len(numbers)))


def test_every_verb_is_called_with_every_dtype_and_op() -> None:
    verbs, folds, kinds, started = set(), set(), set(), set()
    for seed in range(40):
        made = program(seed, 200, 2)
        for do in calls(made):
            kinds.add(type(do.call).__name__)
            found = [do.call.action(rank) for rank in range(len(made.members[do.comm]))]
            verbs |= {action.verb for action in found if action is not None}
            started |= {action.verb for action in found if action is not None and action.series is not None}
            dtype, op = getattr(do.call, "dtype", None), getattr(do.call, "op", None)
            folds.add((dtype, op))
    public = {name for name in dir(kfcomm.Communicator) if not name.startswith("_") and not name.endswith("_init")}
    assert verbs == public - NOT_CALLED - PROPERTIES | {"put", "get"}
    assert started == {*COLLECTIVES, "monitored_all_reduce"}
    assert {(dtype, op) for dtype in DTYPES for op in OPS[dtype]} <= folds


@given(st.sampled_from([(dtype, op) for dtype in DTYPES for op in OPS[dtype]]), st.integers(0, 1 << 16), st.data())
def test_the_order_in_which_ranks_are_folded_changes_nothing(case: tuple[str, str], start: int, data: Any) -> None:
    dtype, op = case
    size = data.draw(st.integers(1, 6))
    xs = [filled(dtype, (5, 2), start + 7919 * rank, op=op, size=size) for rank in range(size)]
    order = data.draw(st.permutations(range(size)))
    assert not difference(folded(op, [xs[rank] for rank in order]), folded(op, xs))
    assert folded(op, xs).dtype == xs[0].dtype


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max"])
def test_values_survive_a_smaller_wire_dtype(op: str, wire: str) -> None:
    xs = [filled("float32", (99,), 7919 * rank, op=op, size=5, wire=wire) for rank in range(5)]
    parts = [filled("float32", (99,), 0, op=op, size=5, wire=wire), folded("sum" if op == "avg" else op, xs), *xs]
    for part in [*parts, folded(op, xs)]:
        sent = part.astype(filled(wire, (), 0).dtype).astype("float32")
        assert not difference(sent, part)


ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (ARRAY.astype("float64"), ARRAY),
        (ARRAY.reshape(3, 2), ARRAY),
        (ARRAY + (ARRAY == 5), ARRAY),
        (None, ARRAY),
        (ARRAY.tolist(), ARRAY),
        (np.float32(3), np.array(3, np.float32)),
        ([ARRAY, ARRAY], [ARRAY]),
        ([ARRAY, ARRAY + 1], [ARRAY, ARRAY]),
        ({"b": ARRAY, "a": ARRAY}, {"a": ARRAY, "b": ARRAY}),
        ({"a": -ARRAY}, {"a": ARRAY}),
        ((ARRAY, 1), OneOf({0: ARRAY})),
        ((-ARRAY, 0), OneOf({0: ARRAY})),
        (1, True),
        (ARRAY, None),
        ("x", "y"),
    ],
)
def test_differences_are_found(got: Any, expected: Any) -> None:
    assert difference(got, expected)


def test_equal_results_do_not_differ() -> None:
    for value in (ARRAY, None, [ARRAY, 1], {"a": ARRAY}, (ARRAY, 0), np.zeros((0, 3)), True, "x"):
        assert not difference(value, value)
    assert not difference((ARRAY, 3), OneOf({0: -ARRAY, 3: ARRAY}))


class Lying(Awaiting):
    """The result of one call on this rank is another one."""

    def __init__(self, verb: str, lie: Any) -> None:
        self._verb = verb
        self._lie = lie

    async def call(self, verb: Any, *args: Any, **options: Any) -> Any:
        result = await super().call(verb, *args, **options)
        return self._lie(result) if verb.__name__ == self._verb else result


def _spoiled(result: Any) -> Any:
    return result + 1 if isinstance(result, np.ndarray) else result


@pytest.mark.asyncio
@pytest.mark.parametrize(("verb", "lie"), [("all_gather", _spoiled), ("recv", _spoiled), ("consensus", lambda _: None)])
async def test_a_wrong_result_is_reported_by_the_rank_that_got_it(verb: str, lie: Any) -> None:
    async def walk(comm: kfcomm.Communicator, seed: int) -> Report | None:
        interface = Lying(verb, lie) if comm.rank == 1 else Awaiting()
        return await Walker(interface, comm, program(seed, 100, 3)).run()

    async with testing.world(3) as comms:
        found = []
        for seed in range(12):
            found += [one for one in await testing.run_ranks(comms, lambda comm, s=seed: walk(comm, s)) if one]
    assert {one.rank for one in found} == {1}
    assert all(one.kind == "difference" for one in found)
    assert all(verb.removeprefix("re") in one.call.lower() or "Recv" in one.call for one in found)


def test_an_error_ends_the_program_and_names_the_step() -> None:
    with testing.sync_world(1) as comms:

        class Failing(Awaiting):
            async def call(self, verb: Any, *args: Any, **options: Any) -> Any:
                raise kfcomm.CollectiveAborted("not today")

            async def begin(self, target: Any, verb: str, *args: Any, **options: Any) -> Any:
                raise kfcomm.CollectiveAborted("not today")

        report = blocking(Walker(Failing(), comms[0], program(5, 10, 1)).run())
    assert report is not None
    assert (report.seed, report.kind, report.text) == (5, "error", "CollectiveAborted: not today")
    assert "call " in report.call
    assert str(report).startswith("seed 5, step ")


def test_of_many_reports_those_count_that_others_follow_from() -> None:
    first = Report(3, 7, 1, "a", "difference", "wrong")
    same = Report(3, 9, 0, "b", "difference", "wrong")
    follows = Report(3, 2, 2, "c", "error", "PeerLost")
    later = Report(4, 0, 3, "d", "error", "PeerLost")
    assert worst([later, follows, same, first]) == [first, same]
    assert worst([later, follows]) == [follows]
    assert worst([]) == []


def test_a_plan_counts_seeds_from_the_first_on() -> None:
    assert [one.seed for one in Plan(7, 3, 5).programs(2)] == [7, 8, 9]


def test_receives_of_any_rank_have_a_tag_of_their_own() -> None:
    for seed in range(30):
        tags = [do.call for do in calls(program(seed, 200, 3)) if isinstance(do.call, Recv)]
        alone = {call.message.tag for call in tags if call.others}
        assert not alone & {call.message.tag for call in tags if not call.others}

"""Persistent collectives: each start is one call of the verb, with what the arrays hold then."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm import testing
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    SessionClosed,
)
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import (
    assert_kinds,
    everywhere,
    same_bits,
    turns,
    works,
    world,
)

SIZE = 3
ROOT = 1


def filled(rank: int, shape: tuple[int, ...] = (6, 2), step: int = 0) -> Any:
    return (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) * (rank + 1) + step) % 97


class Case:
    """A verb in one of its forms: how a rank's arrays are made, and what it is called with."""

    def __init__(self, verb: str, make: Callable[[int], Any] | None = filled, **options: Any) -> None:
        self.verb = verb
        self.make = make
        self.options = options

    def arrays(self, rank: int) -> list[Any]:
        return [] if self.make is None else [self.make(rank)]

    def plain(self, comm: Communicator, arrays: list[Any], name: str | None, **more: Any) -> Any:
        return getattr(comm, self.verb)(*arrays, **self._named(name), **self.options, **more)

    def prepared(self, comm: Communicator, arrays: list[Any], name: str | None, **more: Any) -> Any:
        return getattr(comm, f"{self.verb}_init")(*arrays, **self._named(name), **self.options, **more)

    def _named(self, name: str | None) -> dict[str, Any]:
        return {} if self.verb == "all_reduce_many" else {"name": name}


CASES = {
    "all_reduce": Case("all_reduce"),
    "all_reduce, max": Case("all_reduce", op="max"),
    "all_reduce, wire": Case("all_reduce", wire_dtype="float16"),
    "all_reduce, urgent": Case("all_reduce", priority=5),
    "all_reduce, timeout": Case("all_reduce", timeout=50),
    "all_reduce, strided": Case("all_reduce", lambda rank: filled(rank).T),
    "all_reduce, shared": Case("all_reduce", shared=True),
    "all_reduce, a list": Case("all_reduce", lambda rank: [1.0, rank]),
    "monitored": Case("monitored_all_reduce"),
    "many": Case("all_reduce_many", lambda rank: {"a": filled(rank), "b": filled(rank, (20000,))}),
    "reduce": Case("reduce", root=ROOT),
    "broadcast": Case("broadcast", root=ROOT),
    "gather": Case("gather", root=ROOT),
    "gather, concat": Case("gather", lambda rank: filled(rank, (rank, 2)), root=ROOT, concat=True),
    "all_gather": Case("all_gather"),
    "all_gather, concat": Case("all_gather", lambda rank: filled(rank, (rank, 2)), concat=True),
    "scatter": Case("scatter", lambda rank: filled(rank) if rank == ROOT else None, root=ROOT),
    "scatter, a list": Case(
        "scatter", lambda rank: [filled(n, (n,)) for n in range(SIZE)] if rank == ROOT else None, root=ROOT
    ),
    "reduce_scatter": Case("reduce_scatter"),
    "all_to_all": Case("all_to_all"),
    "all_to_all, a list": Case("all_to_all", lambda rank: [filled(rank, (n, 2)) for n in range(SIZE)]),
    "barrier": Case("barrier", None),
    "consensus": Case("consensus", lambda rank: filled(0)),
}


def change(arrays: Any) -> None:
    """Other content in the same arrays."""
    if isinstance(arrays, np.ndarray):
        arrays += 1
    elif isinstance(arrays, (list, dict)):
        for one in arrays.values() if isinstance(arrays, dict) else arrays:
            change(one)


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert same_bits(got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        assert_same(list(got.values()), list(wanted.values()))
    elif isinstance(wanted, list):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == wanted


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["x", None])
@pytest.mark.parametrize("case", CASES)
async def test_starts_meet_plain_calls_and_give_what_these_give(case: str, name: str | None) -> None:
    one = CASES[case]
    async with world(SIZE) as comms:
        arrays = [one.arrays(rank) for rank in range(SIZE)]
        prepared = [one.prepared(comm, arrays[comm.rank], name) for comm in comms]
        for number in (7, 7, 7, 0, 1, 2, 3, 4, 5, 6, 7):
            change(arrays)
            wanted = await everywhere(comms, lambda comm: one.plain(comm, arrays[comm.rank], "plain"))
            results = await everywhere(
                comms,
                lambda comm, number=number: (
                    prepared[comm.rank].start()
                    if (number >> comm.rank) & 1
                    else one.plain(comm, arrays[comm.rank], name)
                ),
            )
            assert_same(results, wanted)
            if number == 7:
                assert_same([each.result() for each in prepared], wanted)


OUTS = {
    "all_reduce": Case("all_reduce"),
    "reduce": Case("reduce", root=ROOT),
    "broadcast": Case("broadcast", root=ROOT),
    "gather": Case("gather", root=ROOT),
    "all_gather": Case("all_gather"),
    "all_gather, concat": Case("all_gather", concat=True),
    "scatter": Case("scatter", root=ROOT),
    "reduce_scatter": Case("reduce_scatter"),
    "all_to_all": Case("all_to_all"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [np.empty_like, lambda x: np.empty(x.shape[::-1], x.dtype).T], ids=["new", "strided"])
@pytest.mark.parametrize("case", OUTS)
async def test_a_given_out_takes_the_result_of_every_start(case: str, make: Callable[[Any], Any]) -> None:
    one = OUTS[case]
    async with world(SIZE) as comms:
        arrays = [one.arrays(rank) for rank in range(SIZE)]
        like = await everywhere(comms, lambda comm: one.plain(comm, arrays[comm.rank], "plain"))
        outs = [None if result is None else make(result) for result in like]
        prepared = [one.prepared(comm, arrays[comm.rank], "x", out=outs[comm.rank]) for comm in comms]
        for _ in range(3):
            change(arrays)
            wanted = await everywhere(comms, lambda comm: one.plain(comm, arrays[comm.rank], "plain"))
            results = await everywhere(comms, lambda comm: prepared[comm.rank].start())
            assert all(result is out for result, out in zip(results, outs, strict=True))
            assert_same(results, wanted)


@pytest.mark.asyncio
async def test_without_out_every_start_gives_another_array() -> None:
    async with world(SIZE) as comms:
        prepared = [comm.all_reduce_init(np.ones(2), "x") for comm in comms]
        results = [await everywhere(comms, lambda comm: prepared[comm.rank].start()) for _ in range(3)]
        assert len({id(result) for each in results for result in each}) == 3 * SIZE


@pytest.mark.asyncio
async def test_in_place_each_start_goes_on_from_the_last_result() -> None:
    async with world(SIZE) as comms:
        xs = [np.ones((2, 2)) for _ in comms]
        prepared = [comm.all_reduce_init(xs[comm.rank], "x", out=xs[comm.rank]) for comm in comms]
        for _ in range(3):
            await everywhere(comms, lambda comm: prepared[comm.rank].start())
        assert all((x == SIZE**3).all() for x in xs)


# ---------------------------------------------------------------- the short way


def _never() -> Any:
    raise AssertionError("this start goes the long way")


@pytest.mark.asyncio
@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("case", [*sorted(OUTS.keys() - {"scatter", "all_gather, concat"}), "barrier"])
async def test_from_the_second_start_on_nothing_is_looked_up(case: str, has_out: bool) -> None:
    one = CASES[case]
    async with world(SIZE) as comms:
        arrays = [one.arrays(rank) for rank in range(SIZE)]
        wanted = await everywhere(comms, lambda comm: one.plain(comm, arrays[comm.rank], "plain"))
        outs = [{"out": np.empty_like(result)} if has_out and result is not None else {} for result in wanted]
        prepared = [one.prepared(comm, arrays[comm.rank], "x", **outs[comm.rank]) for comm in comms]
        await everywhere(comms, lambda comm: prepared[comm.rank].start())
        for each in prepared:
            each._call = _never
        for _ in range(3):
            assert_same(await everywhere(comms, lambda comm: prepared[comm.rank].start()), wanted)


@pytest.mark.asyncio
async def test_another_call_under_the_name_does_not_take_its_place() -> None:
    async with world(SIZE) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        for _ in range(3):
            assert_usable(await everywhere(comms, lambda comm: prepared[comm.rank].start()), SIZE)
            for length in (1, 5):
                await everywhere(comms, lambda comm, n=length: comm.all_reduce(np.ones(n, np.int8), "x", op="max"))
            await everywhere(comms, lambda comm: comm.barrier("x"))
            for each in prepared:
                each._call = _never


@pytest.mark.asyncio
async def test_a_plain_call_under_the_name_does_not_take_the_place_of_a_shared_one() -> None:
    async with world(SIZE) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x", shared=True) for comm in comms]
        for _ in range(3):
            await everywhere(comms, lambda comm: comm.all_reduce(np.ones(1), "x"))
            results = await everywhere(comms, lambda comm: prepared[comm.rank].start())
            assert_usable(results, SIZE)
            assert not any(result.flags.writeable for result in results)


# ---------------------------------------------------------------- its life


def assert_usable(results: list[Any], size: int) -> None:
    assert [np.asarray(one).tolist() for one in results] == [[size]] * size


async def started(prepared: list[Any]) -> list[Any]:
    """The results of one start on every rank."""
    return [await one for one in [each.start() for each in prepared]]


@pytest.mark.asyncio
async def test_it_has_no_result_before_it_was_started() -> None:
    async with world(1) as comms:
        prepared = comms[0].all_reduce_init(np.ones(2), "x")
        assert prepared.done()
        assert not prepared.cancel()
        assert prepared.name == "x"
        with pytest.raises(ConfigError, match="all_reduce 'x' was never started"):
            prepared.result()
        with pytest.raises(ConfigError, match="all_reduce 'x' was never started"):
            await prepared
        assert repr(prepared) == "<PersistentCollective all_reduce 'x', not in flight>"
        await prepared.start()
        assert repr(prepared) == "<PersistentCollective all_reduce 'x', not in flight>"
        assert await prepared is await prepared is prepared.result()


@pytest.mark.asyncio
@pytest.mark.parametrize("rounds", [0, 2])
async def test_it_cannot_be_started_while_it_is_in_flight(rounds: int) -> None:
    async with world(SIZE) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        for _ in range(rounds):
            await started(prepared)
        for _ in range(2):
            first = prepared[0].start()
            assert first is prepared[0]
            for _ in range(2):
                with pytest.raises(ConfigError, match="all_reduce 'x' is still in flight"):
                    first.start()
                await turns()
            assert not first.done()
            assert repr(first) == "<PersistentCollective all_reduce 'x', in flight>"
            with pytest.raises(asyncio.InvalidStateError):
                first.result()
            assert_usable([await one for one in (prepared[1].start(), prepared[2].start(), first)], SIZE)
            assert_usable(await started(prepared), SIZE)


@pytest.mark.asyncio
@pytest.mark.parametrize("rounds", [0, 2])
async def test_after_a_cancellation_it_can_be_started_again(rounds: int) -> None:
    async with world(SIZE, aborted=True) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        for _ in range(rounds):
            await started(prepared)
        for canceller in range(SIZE):
            others = [each for each in prepared if each is not prepared[canceller]]
            for each in prepared:
                if each is not others[0]:
                    each.start()
            assert prepared[canceller].cancel()
            assert not prepared[canceller].cancel()
            with pytest.raises(asyncio.CancelledError):
                prepared[canceller].result()
            await turns()
            assert_kinds(await asyncio.gather(others[0].start(), others[1], return_exceptions=True), CollectiveAborted)
            assert_usable(await started(prepared), SIZE)


@pytest.mark.asyncio
async def test_cancelling_the_task_that_awaits_it_cancels_it() -> None:
    async with world(SIZE, aborted=True) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        await started(prepared)

        async def wait() -> Any:
            return await prepared[0].start()

        task = asyncio.ensure_future(wait())
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert prepared[0].done()
        assert_kinds([await one for one in [_error(each.start()) for each in prepared[1:]]], CollectiveAborted)
        assert_usable(await started(prepared), SIZE)


async def _error(prepared: Any) -> Any:
    try:
        return await prepared
    except Exception as error:  # noqa: BLE001  the test looks at it
        return error


@pytest.mark.asyncio
async def test_after_a_timeout_it_can_be_started_again() -> None:
    async with world(SIZE, timeout_s=0.7, aborted=True) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        await started(prepared)
        assert_kinds([await _error(prepared[0].start())], CollectiveTimeout)
        assert_kinds([await _error(each.start()) for each in prepared[1:]], CollectiveTimeout)
        assert_usable(await started(prepared), SIZE)


@pytest.mark.asyncio
async def test_after_a_mismatch_it_can_be_started_again() -> None:
    async with world(SIZE, aborted=True) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        for _ in range(2):
            assert_usable(await started(prepared), SIZE)
            prepared[0].start()
            prepared[1].start()
            wrong = comms[2].all_reduce(np.ones(2), "x")
            outcomes = await asyncio.gather(_error(prepared[0]), _error(prepared[1]), _error(wrong))
            assert_kinds(outcomes, CollectiveMismatch)
        assert_usable(await started(prepared), SIZE)


@pytest.mark.asyncio
async def test_a_start_after_a_swap_takes_the_new_graphs() -> None:
    async with world(SIZE, strategy="star") as comms:
        x = [np.arange(3000, dtype=np.float32) / (rank + 1) for rank in range(SIZE)]
        prepared = [comm.all_reduce_init(x[comm.rank], "x") for comm in comms]
        for strategy in ("ring", "star", "binary_tree", "ring"):
            for _ in range(2):
                await started(prepared)
            before = [each.start() for each in prepared]  # runs on the old graphs
            verdicts = [comm.set_strategy(strategy) for comm in comms]
            for each in before:
                await each
            during = [each.start() for each in prepared]  # waits for the verdict, perhaps
            for each, verdict in zip(during, verdicts, strict=True):
                await verdict
                await each
            for _ in range(3):
                plain = await everywhere(comms, lambda comm: comm.all_reduce(x[comm.rank], "x"))
                assert_same(await started(prepared), plain)
            assert all(each._among is comm._group.compiled for each, comm in zip(prepared, comms, strict=True))


@pytest.mark.asyncio
async def test_a_start_during_a_swap_waits_for_the_verdict() -> None:
    async with world(SIZE, strategy="star") as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        await started(prepared)
        verdicts = [comm.set_strategy("ring") for comm in comms]
        for each in prepared:
            each.start()
            with pytest.raises(ConfigError, match="in flight"):
                each.start()
        assert_usable([await each for each in prepared], SIZE)
        assert all(verdict.done() for verdict in verdicts)


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_during_a_swap_takes_its_number() -> None:
    async with world(SIZE, strategy="star", aborted=True) as comms:
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in comms]
        await started(prepared)
        verdicts = [comm.set_strategy("ring") for comm in comms]
        for each in prepared:
            each.start()
        assert prepared[0].cancel()
        prepared[0].start()
        assert_kinds([await _error(each) for each in prepared[1:]], CollectiveAborted)
        assert_usable([await one for one in (prepared[1].start(), prepared[2].start(), prepared[0])], SIZE)
        for verdict in verdicts:
            await verdict


@pytest.mark.asyncio
async def test_it_cannot_be_started_on_a_closed_communicator() -> None:
    async with world(2, quiet=False) as comms:
        groups = [await one for one in [asyncio.ensure_future(comm.group([0, 1], "pair")) for comm in comms]]
        prepared = [comm.all_reduce_init(np.ones(1), "x") for comm in (*groups, *comms)]
        for _ in range(2):
            for pair in (prepared[:2], prepared[2:]):
                assert_usable(await started(pair), 2)
        await everywhere(groups, Communicator.close)
        with pytest.raises(SessionClosed):
            prepared[0].start()
        assert (prepared[0].result() == 2).all()
        assert_usable(await started(prepared[2:]), 2)
        prepared[2].start()
        await comms[0].close()
        assert type(await _error(prepared[2])) is SessionClosed or isinstance(
            await _error(prepared[2]), CollectiveAborted
        )
        with pytest.raises(SessionClosed):
            prepared[2].start()
        with pytest.raises(SessionClosed):
            comms[0].all_reduce_init(np.ones(1), "y")


# ---------------------------------------------------------------- what is checked when


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("verb", "arguments", "options", "message"),
    [
        ("all_reduce", ["text"], {}, "expected an array of numbers, got str"),
        ("all_reduce", [np.ones(2, object)], {}, "object"),
        ("all_reduce", [np.ones(2)], {"op": "xor"}, "xor"),
        ("all_reduce", [np.ones(2)], {"out": np.ones(3)}, "has shape"),
        ("all_reduce", [np.ones(2, int)], {"wire_dtype": "float16"}, "wire_dtype"),
        ("all_reduce", [np.ones(2)], {"stream": object()}, "stream"),
        ("all_reduce_many", [{"a": np.ones(2), "": 1}], {}, "expected a name"),
        ("monitored_all_reduce", [np.ones(2)], {"op": "xor"}, "xor"),
        ("reduce", [np.ones(2), 5], {}, "not a rank"),
        ("broadcast", [np.ones(2)], {"root": -1}, "not a rank"),
        ("gather", [np.ones(2), 0], {"out": np.ones(7)}, "has shape"),
        ("gather", [np.float32(1), 0], {"concat": True}, "first axis"),
        ("all_gather", [np.ones(2)], {"out": np.ones(2)}, "has shape"),
        ("scatter", [[np.ones(1)]], {}, "expected a list of"),
        ("reduce_scatter", [np.float32(2)], {}, "first axis"),
        ("all_to_all", [np.ones(5)], {}, "shares 5 rows"),
        ("all_to_all", [[1, 2, 3, 4]], {}, "expected a list of"),
        ("consensus", [object()], {}, "expected an array"),
        ("send", [np.ones(2), 0], {}, "this rank itself"),
        ("send", ["text", 1], {}, "expected an array of numbers, got str"),
        ("recv", [9], {}, "not a rank"),
        ("recv", [1], {"tag": 1.5}, "expected a whole number or a string as tag"),
    ],
)
async def test_invalid_arguments_are_refused_at_the_first_start(
    verb: str, arguments: list[Any], options: dict[str, Any], message: str
) -> None:
    """The other ranks get an abort, as from a call: they lose neither step nor number."""
    is_named = verb not in ("all_reduce_many", "send", "recv")
    async with world(SIZE, aborted=True) as comms:  # those of the later step of what the others call in one step
        prepared = getattr(comms[0], f"{verb}_init")(*arguments, **({"name": "x"} if is_named else {}), **options)
        await turns()
        assert not comms[0]._session.engine.router.num_uses(comms[0]._group.view.id, "x")
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                await prepared.start()
            assert prepared.done()
            if is_named:
                others = [_error(comm.all_reduce(np.ones(1), "x")) for comm in comms[1:]]
                assert_kinds(await asyncio.gather(*others), CollectiveAborted)
            elif (verb, message) == ("send", "not supported"):
                assert_kinds([await _error(comms[1].recv(0))], CollectiveAborted)
        await works(comms)
        assert not len(comms[0]._group.turns)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_reduce", "gather", "barrier", "consensus"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "expected a name"),
        ({"name": 7}, "expected a name"),
        ({"timeout": -1}, "a timeout"),
        ({"priority": "high"}, "as priority"),
    ],
)
async def test_a_name_a_timeout_and_a_priority_are_checked_when_it_is_prepared(
    verb: str, options: dict[str, Any], message: str
) -> None:
    """No other rank hears of it."""
    arguments = [] if verb == "barrier" else [np.ones(2)]
    async with world(SIZE) as comms:
        with pytest.raises(ConfigError, match=message):
            getattr(comms[0], f"{verb}_init")(*arguments, **{"name": "x", **options})
        await turns()
        await works(comms, "x")


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", [{"tmeout": 1}, {"x": 1}])
async def test_a_wrong_parameter_is_found_when_it_is_prepared(wrong: dict[str, Any]) -> None:
    async with world(1) as comms:
        with pytest.raises(TypeError):
            comms[0].all_reduce_init(np.ones(1), "x", **wrong)


@pytest.mark.asyncio
async def test_preparing_begins_nothing() -> None:
    async with world(SIZE) as comms:
        for one in CASES.values():
            for comm in comms[:2]:
                one.prepared(comm, one.arrays(comm.rank), "x")
        await turns()
        await works(comms, "x")
        assert not len(comms[0]._group.turns)


@pytest.mark.parametrize("verb", sorted(name for name in dir(Communicator) if name.endswith("_init")))
def test_it_has_the_parameters_and_the_text_of_its_verb(verb: str) -> None:
    prepare, plain = getattr(Communicator, verb), getattr(Communicator, verb.removesuffix("_init"))
    assert inspect.signature(prepare).parameters == inspect.signature(plain).parameters
    assert prepare.__name__ == verb
    assert inspect.getdoc(plain) in inspect.getdoc(prepare)  # type: ignore[operator]


# ---------------------------------------------------------------- without a name, and messages


@pytest.mark.asyncio
async def test_without_a_name_each_start_takes_the_groups_next_number() -> None:
    async with world(SIZE) as comms:
        sums = [comm.all_reduce_init(np.ones(1)) for comm in comms]
        places = [comm.broadcast_init(np.full(1, comm.rank), ROOT) for comm in comms]
        for _ in range(3):
            begun = [
                [
                    sums[comm.rank].start(),
                    places[comm.rank].start(),
                    comm.all_reduce(np.ones(1), op="max"),
                    comm.barrier(),
                ]
                for comm in comms
            ]
            results = [[await each for each in mine] for mine in begun]
            assert results == [[SIZE, ROOT, 1, None]] * SIZE


@pytest.mark.asyncio
@pytest.mark.parametrize("has_out", [False, True])
async def test_messages(has_out: bool) -> None:
    async with world(2) as comms:
        x = np.arange(4.0)
        out = np.empty(4) if has_out else None
        sent, received = comms[0].send_init(x, 1, "tag"), comms[1].recv_init(0, "tag", out=out)
        for number in range(3):
            x += 1
            received.start()
            assert await sent.start() is None
            result = await received
            assert same_bits(result, np.arange(4.0) + 1 + number * 2)
            assert (result is out) == has_out
            x += 1
            sent.start()
            assert same_bits(await comms[1].recv(0, "tag"), x)
            await sent
        received.start()
        with pytest.raises(ConfigError, match="recv is still in flight"):
            received.start()
        assert received.cancel()


# ---------------------------------------------------------------- any order of all that


STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "plain", "swap", "cancel", "other"]), st.integers(0, 7)), max_size=12
)


@pytest.mark.asyncio
@settings(max_examples=25)
@given(steps=STEPS, name=st.sampled_from(["x", None]), has_out=st.booleans())
async def test_any_sequence_of_starts_and_calls(steps: list[tuple[str, int]], name: str | None, has_out: bool) -> None:
    """On every rank the same sequence; which ranks start and which call, or who cancels, differs."""
    async with testing.world(SIZE, strategy="star", timeout=60) as comms:
        xs = [np.zeros((2, 3), np.float32) for _ in comms]
        outs = [np.empty((2, 3), np.float32) if has_out else None for _ in comms]
        prepared = [comm.all_reduce_init(xs[comm.rank], name, out=outs[comm.rank]) for comm in comms]
        for number, (step, salt) in enumerate(steps):
            for rank, x in enumerate(xs):
                x[...] = number + rank
            if step == "swap":
                await everywhere(comms, lambda comm, salt=salt: comm.set_strategy(("ring", "star")[salt % 2]))
            elif step == "other":
                await everywhere(comms, lambda comm, salt=salt: comm.all_gather(np.ones(salt), name))
            elif step == "cancel":
                quitter = salt % SIZE
                begun = [each.start() for each in prepared if each is not prepared[quitter]]
                prepared[quitter].start().cancel()
                for each in begun:
                    assert isinstance(await _error(each), CollectiveAborted)
            else:
                begun = [
                    prepared[comm.rank].start()
                    if step == "start" or (salt >> comm.rank) & 1
                    else comm.all_reduce(xs[comm.rank], name)
                    for comm in comms
                ]
                for one in begun:
                    assert same_bits(await one, np.full((2, 3), 3 * number + 3, np.float32))

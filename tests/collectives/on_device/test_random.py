"""Programs made at random, with and without faults: what comes is right or an error, and all comes to rest."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives.on_device import backed, calls, hierarchy, ordering, slots, staged
from kfcomm.core.launch_order import launch_order
from kfcomm.errors import CollectiveError, KfcommError
from kfcomm.testing import FakeDevice
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance.worlds import HANG_S, everywhere, leftovers, turns

SEEDS = 3
ROUNDS = 6
NAMES = tuple(f"key {number}" for number in range(6))
WITHIN_S = HANG_S
VERBS = ("all_reduce", "many", "reduce", "broadcast", "all_gather", "concat", "gather", "reduce_scatter", "all_to_all")
FAULTS = ("cancel", "refuse", "mismatch", "absent", "memory")
ROUTES: dict[str, dict[str, Any]] = {
    "backend of 2": {"size": 2},
    "backend of 4": {"size": 4},
    "shared": {"size": 3, "shared": True},
    "slots": {"size": 3, "shared": True, "exports": True},
    "hierarchy": {"size": 4, "hosts": 2},
}


@pytest.fixture(autouse=True)
def small_and_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of several segments and blocks; what is waited for after a failure is waited for briefly."""
    monkeypatch.setitem(hierarchy.HierarchicalPath.__init__.__kwdefaults__, "share_nbytes", 64)
    monkeypatch.setitem(staged.StagedPath.__init__.__kwdefaults__, "segment_nbytes", 48)
    monkeypatch.setattr(calls, "SLOTS_NBYTES", 48)  # of some calls
    monkeypatch.setattr(backed, "GRACE_S", 0.05)
    monkeypatch.setattr(ordering, "launch_order", partial(launch_order, patience_s=0.02))


@dataclass
class Use:
    """One collective of a round: its name, what it does, and on which ranks something is wrong with it."""

    name: str
    verb: str
    count: int
    root: int
    faults: dict[int, str] = field(default_factory=dict)

    @property
    def timeout_s(self) -> float | None:
        return 0.2 if "absent" in self.faults.values() else None

    def begin(self, comm: Any, device: FakeDevice, own: FakeDevice, count: int) -> Any:
        x = device.array(values(comm.rank, count))
        given: dict[str, Any] = {"timeout": self.timeout_s}
        if self.name:
            given["name"] = self.name
        match self.verb:
            case "many":
                few = {f"a {self.name}": x, f"b {self.name}": own.array(values(comm.rank, 3))}
                return comm.all_reduce_many(few, timeout=self.timeout_s)
            case "reduce" | "broadcast" | "gather":
                return getattr(comm, self.verb)(x, self.root, **given)
            case "concat":
                return comm.all_gather(x, concat=True, **given)
            case _:
                return getattr(comm, self.verb)(x, **given)

    def expected(self, rank: int, size: int) -> Any:
        every = [values(one, self.count) for one in range(size)]
        total = np.sum(every, 0)
        match self.verb:
            case "all_reduce":
                return total
            case "many":
                return {f"a {self.name}": total, f"b {self.name}": np.sum([values(one, 3) for one in range(size)], 0)}
            case "reduce":
                return total if rank == self.root else None
            case "broadcast":
                return every[self.root]
            case "all_gather":
                return np.stack(every)
            case "concat":
                return np.concatenate(every)
            case "gather":
                return np.stack(every) if rank == self.root else None
            case "reduce_scatter":
                return np.array_split(total, size)[rank]
            case _:
                return np.concatenate([np.split(one, size)[rank] for one in every])


def values(rank: int, count: int) -> Any:
    return (np.arange(count) + 100 * rank).astype(np.float32)


def uses_of(rng: Random, size: int, *, with_faults: bool) -> list[Use]:
    uses = []
    for name in rng.sample(NAMES, rng.randint(1, 6)):
        verb = rng.choice(VERBS)
        count = rng.choice((0, 1, 5, 16, 40, 90))
        if verb == "all_to_all":
            count *= size
        uses.append(Use(name, verb, max(count, 1) if verb == "reduce_scatter" else count, rng.randrange(size)))
    if with_faults:
        for use in rng.sample(uses, rng.randint(1, min(2, len(uses)))):
            use.faults[rng.randrange(size)] = rng.choice(FAULTS)
    return uses


async def program(world: DeviceWorld, comm: Any, rng: Random, uses: list[Use], swap: str | None) -> None:
    """One round of one rank."""
    device = world.devices[comm.rank]
    verdict = None if swap is None else comm.set_strategy(swap)
    handles: dict[str, Any] = {}
    for use in rng.sample(uses, len(uses)):
        if rng.random() < 0.3:
            device.hold(device.default_stream)
        if rng.random() < 0.2:
            device.hold_copies()
        fault = use.faults.get(comm.rank)
        if fault != "absent":
            handles[use.name] = begun(use, comm, device, fault)
        if rng.random() < 0.4:
            await turns(rng.randrange(30))
        if fault == "cancel":
            handles[use.name].cancel()
        if rng.random() < 0.4:
            device.release(device.default_stream)
            device.release_copies()
    device.release(device.default_stream)
    device.release_copies()
    if verdict is not None:
        await verdict
    await asyncio.wait(handles.values()) if handles else None
    for use in uses:  # who was absent takes the number, too
        if use.faults.get(comm.rank) == "absent":
            handles[use.name] = begun(use, comm, device, None)
            await asyncio.wait([handles[use.name]])
    late: BaseException | None = None
    try:
        await comm.synchronize()
    except CollectiveError as error:
        late = error.with_traceback(None)
    look_at(comm, uses, handles, late)


def begun(use: Use, comm: Any, device: FakeDevice, fault: str | None) -> Any:
    """The handle of a call; if it is refused, one that says so."""
    if fault == "memory":
        device.fail_next_allocation()
    where = FakeDevice(7) if fault == "refuse" else device
    try:
        return use.begin(comm, where, device, use.count + comm.size * (fault == "mismatch"))
    except (KfcommError, MemoryError) as error:
        refused = asyncio.get_running_loop().create_future()
        refused.set_exception(error.with_traceback(None))  # what was logged keeps no memory of a device
        return refused
    finally:
        device.fail_next_allocation(0)


def look_at(comm: Any, uses: list[Use], handles: dict[str, Any], late: BaseException | None) -> None:
    """Without faults all is right; else what is there is right, unless an error came late."""
    is_faulty = any(use.faults for use in uses)
    assert late is None or is_faulty, late
    for use in uses:
        done = handles[use.name]
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            assert is_faulty, (use, error)
            assert isinstance(error, (KfcommError, MemoryError, asyncio.CancelledError)), error
        elif late is None and not use.faults:
            check(use, done.result(), comm)


def check(use: Use, result: Any, comm: Any) -> None:
    expected = use.expected(comm.rank, comm.size)
    if expected is None:
        assert result is None
    elif isinstance(expected, dict):
        for name, array in expected.items():
            np.testing.assert_array_equal(result[name].get(), array, f"{use}")
    else:
        np.testing.assert_array_equal(result.get(), expected, f"{use}")


def paths_of(comm: Any) -> Iterator[Any]:
    for path in comm._paths._made.values():
        if isinstance(path, hierarchy.HierarchicalPath):
            yield from (path, path._backend, path._staged)
        else:
            yield path


def under_way(world: DeviceWorld) -> list[str]:
    """Leftover state as text; ranks that went different ways remember that, until the next use."""
    left = leftovers(world.comms, aborted=True)
    for comm in world.comms:
        device = world.devices[comm.rank]
        held: dict[str, Any] = {
            "live": comm._devices._live,
            "latest": comm._devices._latest,
            "waiters": comm._devices._waiters,
            "turns": comm._group.turns._queues,
            "waiting on the device": device.num_waiting,
            "promised": device.num_promised,
        }
        for path in paths_of(comm):
            match path:
                case backed.BackendPath():
                    failures = path._failures
                    held |= {
                        "before": path._before,
                        "ordered": path._order.waiting,
                        "launched": path._launched,
                        "on streams": path.launches._streams,
                        "undecided": failures._undecided,
                        "asked": failures._asked,
                        "said": path._channel._outbox,
                        "moving": path.state not in (backed.BackedState.IDLE, backed.BackedState.READY),
                        "serving": path._channel._mailbox._serving,
                    }
                case staged.StagedPath():
                    held |= {"staged": path._under_way, "staged turns": path.turns._queues}
                case slots.SlotsPath():
                    held |= {"in slots": path._under_way, "waiting": path._waiting, "slot turns": path.turns._queues}
                case hierarchy.HierarchicalPath():
                    held |= {"whole": path._under_way}
        left += [f"rank {comm.rank}: {what}: {one}" for what, one in held.items() if one]
    return left


async def at_rest(world: DeviceWorld) -> None:
    try:
        async with asyncio.timeout(WITHIN_S):
            while under_way(world):  # noqa: ASYNC110  no event tells of all of it
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError("the world does not come to rest:\n  " + "\n  ".join(under_way(world))) from None


async def one_round(world: DeviceWorld, seed: str, uses: list[Use], swap: str | None) -> None:
    try:
        async with asyncio.timeout(WITHIN_S):
            await everywhere(world.comms, lambda comm: program(world, comm, Random(f"{seed} {comm.rank}"), uses, swap))
    except TimeoutError:
        raise AssertionError(f"{uses} hang:\n  " + "\n  ".join(under_way(world))) from None


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("route", ROUTES)
async def test_random_programs(route: str, seed: int) -> None:
    rng = Random(f"{route} {seed}")
    async with device_world(aborted=True, **ROUTES[route]) as world:
        size = len(world.comms)
        for number in range(ROUNDS):
            uses = uses_of(rng, size, with_faults=number % 2 == 1)
            await one_round(world, f"{seed} {number}", uses, rng.choice((None, None, "ring", "star")))
            await at_rest(world)
        await one_round(world, f"{seed} at last", [Use(name, "all_reduce", 90, 0) for name in NAMES], None)
        await at_rest(world)
        gc.collect()
        assert [device.used_nbytes for device in world.devices] == [0] * size

"""A function as a job on Ray: ``run``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from time import monotonic
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kfcomm.common.sizes import seconds_of
from kfcomm.common.version import versions
from kfcomm.errors import ConfigError, PeerLost, RendezvousError
from kfcomm.launch.elastic import Elasticity, Stage, parse
from kfcomm.launch.remote import GRACE_S, Ended, check_versions, checked_number, culprit, is_known, pickled, task_of
from kfcomm.ray.places import STALL_AFTER_S, Place, Places, stalled
from kfcomm.ray.store import ActorStore, StoreActor
from kfcomm.ray.worker import JobPlace, Worker
from kfcomm.rendezvous.authentication import new_token
from kfcomm.rendezvous.keyvalue import GIVEN_UP, RELEASED, REPLACED, Exit
from kfcomm.types import Seconds

T = TypeVar("T")

MAX_RESTARTS = 100
NAMESPACE = "kfcomm"
_KILLED = -9

logger = logging.getLogger("kfcomm")


def run(
    function: Callable[..., Any],
    *args: Any,
    num_workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
    elastic: tuple[int, int] | None = None,
    place_within: Seconds = 60.0,
    **settings: Any,
) -> list[Any]:
    """Run ``function(comm, *args)`` on workers that Ray places; return the results by rank.

    ``comm`` is a ``kfcomm.sync.Communicator``; for an ``async def`` it is a ``kfcomm.Communicator``. Function and
    arguments travel through Ray's object store: large arrays among them once to each node, read-only. What the workers
    print comes to the driver as Ray does it.

    An elastic job survives lost workers and nodes as one of ``kfcomm run --elastic`` does, with ``kfcomm.elastic``: Ray
    places another worker, which joins as a new rank and calls the function from its beginning. ``propose_size`` asks
    Ray for more workers, or returns some. The results are those of the ranks that have come to the end.

    Args:
        function: cloudpickle pickles it.
        *args: further arguments.
        num_workers: number of workers at the start, in one placement group.
        resources_per_worker: Ray's resources for each, as ``{"CPU": 4, "GPU": 1}``; None for one CPU.
        elastic: least and largest number of workers; None for a fixed number.
        place_within: seconds to wait for places, as long as an autoscaler may need.
        **settings: arguments of ``kfcomm.init`` for all ranks, such as ``strategy`` and ``timeout``.

    Raises:
        ConfigError: Ray does not run here or has too few resources; the function cannot be pickled; a worker has
            another version of kfcomm; or an argument is invalid.
        PeerLost: a worker or its node is lost, and the job cannot continue without it.
        Exception: what the first rank that failed has raised, with notes about its traceback and the others.

    Cost: one more actor, which needs no resources, serves the rendezvous on the driver's node.
    """
    count = checked_number("num_workers", num_workers)
    task = task_of(function, args, settings)
    bounds = (count, count) if elastic is None else _checked_bounds(elastic, count)
    within_s = seconds_of(place_within)
    if not ray.is_initialized():
        raise ConfigError("Ray does not run in this process: call ray.init() first, for a cluster with its address")
    sent = pickled(
        f"the function {getattr(function, '__qualname__', function)!r} with its arguments", lambda: ray.put(task)
    )
    places = Places({"CPU": 1.0} if resources_per_worker is None else resources_per_worker, count)
    job = Job(sent, parse(str(count) if elastic is None else f"{bounds[0]}:{bounds[1]}", [count], MAX_RESTARTS), places)
    try:
        return _in_thread(job.run, before=lambda: places.wait(within_s))
    finally:
        job.close()


class Job:
    """A job, as its driver watches it. What happens to its workers follows the stages of `Elasticity`."""

    def __init__(self, task: Any, elastic: Elasticity, places: Places) -> None:
        self.elastic = elastic
        self.size = elastic.size
        self.places = places
        self.is_elastic = elastic.most > elastic.least or elastic.restarts > 0
        self._task = task
        self._token = ray.put(new_token())
        # Not soft: Ray 2.60 placed every other such actor on another node, whose loss would then end the job.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        name = f"store of {secrets.token_hex(4)}"
        self._server = (
            ray.remote(StoreActor)
            .options(name=name, namespace=NAMESPACE, num_cpus=0, scheduling_strategy=here)
            .remote()
        )  # fmt: skip
        bounds = b"%d:%d" % (elastic.least, elastic.most) if self.is_elastic else None
        self._url = self._server.serve.remote(self._token, bounds)
        self.store = ActorStore(self._server)
        self._worker = ray.remote(Worker)
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Ended] = {}  # by uid, in order of arrival
        self._refused: Ended | None = None  # an error that ends the job, whatever the ranks do
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self) -> list[Any]:
        """Start the workers, replace lost ones, and return the results by rank; see `run`."""
        for uid in range(self.size):
            self._start(uid)
        if self.is_elastic:
            for watch in (self._watch_sizes, self._watch_given_up, self._watch_replaced, self._watch_released):
                self._spawn(self._until_lost(watch()))
        try:
            await self._until(self._is_over)
            if not self.elastic.has_failed and self.elastic.is_ending and self._refused is None:
                finished = [self._ends[uid] for uid in self.elastic.in_stage(Stage.FINISHED)]
                return [end.value for end in sorted(finished, key=lambda end: end.rank)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._until(self._is_cause_known)
            raise culprit(self._ends.values() if self._refused is None else [self._refused])
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """End all actors, and return their places."""
        for actor in (*self._actors.values(), self._server):
            ray.kill(actor)
        self.places.close()

    # ---------------------------------------------------------------- workers

    def _start(self, uid: int) -> None:
        place = self.places.take()
        actor = self._actors[uid] = self._worker.options(**self.places.options(place)).remote()
        self._spawn(self._follow(uid, actor, place))

    async def _follow(self, uid: int, actor: Any, place: Place) -> None:
        """Await the end of a worker."""
        about = actor.about.remote()
        ended = actor.run.remote(self._task, JobPlace(uid, self.size, self.is_elastic), self._url, self._token)
        address = ""
        try:
            address = await _greeted(uid, about, self.places.resources if uid >= self.size else None)
            end: Ended = await ended
        except ConfigError as error:
            end = self._refused = Ended(uid, uid, error=error)
        except RayTaskError as error:
            end = Ended(uid, uid, error=_outside(uid, error))
        except RayError as error:
            where = f" on {address}" if address else ""
            text = " ".join(str(error).split())
            end = Ended(uid, uid, error=PeerLost(f"the worker of rank {uid}{where} is lost: {text}", rank=uid))
            with contextlib.suppress(RendezvousError):
                await self.store.report_exit(Exit(uid, _KILLED))
        ray.kill(actor)  # an idle actor would keep its place
        self.places.give_back(place)
        await self._note(end)

    async def _note(self, end: Ended) -> None:
        """Note the end of a worker, and start others that are missing."""
        elastic, uid = self.elastic, end.uid
        with contextlib.suppress(RendezvousError):
            if self.is_elastic and await self.store.find(f"{RELEASED}/{uid}") is not None:
                elastic.released(uid)
        stage = elastic.ended(uid, 0 if end.error is None else 1, monotonic())
        if stage is not Stage.RELEASED:
            self._ends[uid] = end
        num_left, count = len(elastic.running), self._start_owed()
        if end.error is not None and stage is not Stage.RELEASED and self.is_elastic:
            instead = f"; {count} started in its place" if count else ""
            line = str(end.error).partition("\n")[0]
            logger.warning("rank %d ended (%s); %d go on%s", uid, line, num_left, instead)
        self._changed.set()

    def _start_owed(self) -> int:
        """Start missing workers, as far as they may start now; return how many."""
        count = 0
        while (found := self.elastic.start(monotonic())) is not None:
            self._start(found[0])
            count += 1
        if self.elastic.owed and (due_s := self.elastic.next_place_s()) is not None:
            asyncio.get_running_loop().call_later(max(0.0, due_s - monotonic()), self._start_owed)
        return count

    async def _until(self, is_so: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        while True:
            self._changed.clear()  # before the question: it may change while it is answered
            if await is_so():
                return
            await self._changed.wait()

    async def _is_cause_known(self) -> bool:
        """Whether a rank has failed that blames no other, or no other one can."""
        return is_known(self._ends.values()) or not self.elastic.in_stage(Stage.RUNS)

    def _dismiss(self, uids: Iterable[int]) -> None:
        """End workers that are not wanted any more."""
        for uid in uids:
            self.elastic.released(uid)
            ray.kill(self._actors[uid])

    async def _is_over(self) -> bool:
        """Whether the outcome is certain; workers that no rank can admit any more are dismissed."""
        elastic = self.elastic
        if self._refused is not None or elastic.has_failed:
            return True
        waiting = await self._waiting()
        if elastic.is_ending:
            self._dismiss(waiting)
        members = elastic.in_stage(Stage.RUNS, Stage.GIVEN_UP, Stage.LEAVING).difference(waiting)
        return not members

    async def _waiting(self) -> Collection[int]:
        """Uids of workers that were started later, and have not been admitted."""
        later = [uid for uid in sorted(self.elastic.running) if uid >= self.size]
        try:
            return [uid for uid in later if not await self.store.was_let_in(uid)]
        except RendezvousError:
            return later

    # ---------------------------------------------------------------- what the ranks ask for

    async def _until_lost(self, watch: Coroutine[Any, Any, None]) -> None:
        """Fail when the store is gone, which ends its watches: no rank can join any more."""
        await watch
        raise RendezvousError("the actor with the store of the job is gone, perhaps with the node of the driver")

    async def _watch_sizes(self) -> None:
        async for size in self.store.watch_sizes():
            if size != self.elastic.asked and not self.elastic.is_ending:
                self._dismiss(self.elastic.resize(size, await self._waiting()))
                logger.info("%d ranks are wanted; %d started", self.elastic.size, self._start_owed())

    async def _watch_given_up(self) -> None:
        async for uid, _ in self.store.watch(GIVEN_UP):
            self.elastic.given_up(uid)
            # After it could say why it fails; it may be stopped, or cut off.
            asyncio.get_running_loop().call_later(GRACE_S, self._kill, uid)

    def _kill(self, uid: int) -> None:
        if uid not in self._ends:
            ray.kill(self._actors[uid])

    async def _watch_replaced(self) -> None:
        async for uid, _ in self.store.watch(REPLACED):
            if not self.elastic.is_ending and self.elastic.replace(uid):
                logger.info("rank %d is to be replaced; %d started in its place", uid, self._start_owed())

    async def _watch_released(self) -> None:
        async for uid, _ in self.store.watch(RELEASED):
            if self.elastic.released(uid):
                self._start_owed()
            self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._refused = Ended(-1, -1, error=error)
            self._changed.set()


async def _greeted(uid: int, about: Any, resources: Mapping[str, float] | None) -> str:
    """Address of a worker's node, once it has started; a long wait for ``resources`` is reported, if given.

    Raises:
        ConfigError: it cannot start, or has another version.
    """
    loop = asyncio.get_running_loop()
    late = None if resources is None else loop.call_later(STALL_AFTER_S, stalled, uid, resources)
    try:
        theirs, address = await about
    except RayError as error:
        if "creation task" not in str(error):
            raise
        raise ConfigError(
            f"the worker of rank {uid} cannot start: its node needs kfcomm {versions()[0]}, as this one: {error}"
        ) from error
    finally:
        if late is not None:
            late.cancel()
    check_versions(theirs, f"the worker of rank {uid} on {address}")
    return str(address)


def _outside(uid: int, error: RayTaskError) -> ConfigError:
    """Error of a worker outside of the function: before it, or after it."""
    what = (
        "the function or its arguments cannot be loaded"
        if isinstance(error.cause, RaySystemError)
        else "its result cannot be pickled"
    )
    return ConfigError(f"rank {uid}: {what}: {' '.join(str(error.cause).split())}")


def _checked_bounds(elastic: Any, count: int) -> tuple[int, int]:
    try:
        least, most = (checked_number("elastic", one) for one in elastic)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"elastic={elastic!r} must be the least and the largest number of workers, as (2, 8)"
        ) from error
    if not least <= count <= most:
        raise ConfigError(f"num_workers={count} is outside elastic={(least, most)}")
    return least, most


async def _others_ended() -> None:
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


def _in_thread(main: Callable[[], Coroutine[Any, Any, T]], before: Callable[[], None]) -> T:
    """Run a coroutine on an event loop of its own, since the caller's thread may have one, as in a notebook."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kfcomm.ray")
    thread.start()
    try:
        future = asyncio.run_coroutine_threadsafe(main(), loop)
        try:
            before()
            return future.result()
        except BaseException:  # Ctrl-C, or no places
            future.cancel()
            asyncio.run_coroutine_threadsafe(_others_ended(), loop).result()
            raise
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

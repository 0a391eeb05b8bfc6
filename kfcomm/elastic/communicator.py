"""Communicator of an elastic job: the verbs of ``kfcomm.Communicator``, in one epoch after another."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kfcomm.arrays import is_list
from kfcomm.arrays.on_device import is_on_device
from kfcomm.collectives.handle import Handle
from kfcomm.common.arguments import whole_number
from kfcomm.elastic.calls import KINDS
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.reports import EpochReports
from kfcomm.elastic.requests import SizeRequests
from kfcomm.errors import CollectiveTimeout, ConfigError, RendezvousError
from kfcomm.types import Candidate, Seconds
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, EpochPlan, Released

if TYPE_CHECKING:
    from kfcomm.engine.session import Session


_OF_STEP = frozenset(
    {
        "group", "probe", "queue", "recv", "recv_any", "recv_object", "request", "send", "send_object", "set_strategy",
        "split",
    }
)  # fmt: skip


class ElasticCommunicator:
    """A communicator whose ranks may change between the steps of an ``Elastic``. Made by ``kfcomm.init(elastic=True)``.

    It has every method of a ``Communicator``. While an ``Elastic`` is open, collectives of the world survive the death
    of a rank: the remaining ranks finish them, with one result and one list of contributors (``handle.contributors``),
    or one error. ``rank``, ``size`` and ``births`` stay the same until the step is over. Other calls fail as
    they do without ``Elastic``, until the step is over: messages, queues, ``set_strategy``, sub-groups, persistent
    collectives, arrays on devices.

    Attributes:
        current: communicator of the epoch.
        elastic: the open ``Elastic``; None without one.
    """

    def __init__(self, comm: Communicator) -> None:
        self.current = comm
        self.elastic: Any = None
        self._calls: Dispatcher | None = None
        self._reports = EpochReports()
        self._requests = SizeRequests()
        self._timeout: Seconds | None = None
        self._by_uids = {comm.births: comm}

    def __repr__(self) -> str:
        return f"<Elastic{repr(self.current)[1:]}"

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shown if is_of_step(name) else self.current, name)
        # A rank that waits for the boundary may be the one for which this call, the first of its step, will wait.
        if callable(found) and not name.startswith("_") and (calls := self.__dict__.get("_calls")) is not None:
            calls.post_boundary()
        return found

    # ---------------------------------------------------------------- ranks of the step

    @property
    def _shown(self) -> Communicator:
        """Communicator of the ranks of the step."""
        return self.current if self._calls is None else self._by_uids[self._calls.log.shown]

    @property
    def rank(self) -> int:
        """Rank of this process in the step."""
        return self._shown.rank

    @property
    def size(self) -> int:
        """Number of ranks in the step."""
        return self._shown.size

    @property
    def births(self) -> tuple[int, ...]:
        """Uid of each rank of the step: its rank in the first epoch, which it keeps in all epochs."""
        return self._shown.births

    @property
    def epoch(self) -> int:
        """Number of the membership of the step."""
        return self._shown.epoch

    @property
    def layout(self) -> Any:
        """Hosts of the ranks of the step."""
        return self._shown.layout

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of the step on its host."""
        return self._shown.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks of the step on this host."""
        return self._shown.local_size

    @property
    def outlives(self) -> bool:
        """Whether collectives survive the loss of a rank: while an ``Elastic`` is open."""
        return self._calls is not None

    @property
    def _session(self) -> Session:
        return self.current._session

    # ---------------------------------------------------------------- settings and refusals

    def set_timeout(self, timeout: Seconds) -> None:
        """Set the timeout of later calls, also of later epochs, as ``kfcomm.Communicator.set_timeout`` does.

        Raises:
            ConfigError: it is not above 0.
        """
        self.current.set_timeout(timeout)
        self._timeout = timeout

    def refuse(self, name: str | None, error: BaseException, *, steps: int = 1) -> None:
        """Refuse this rank's next call of a name, as ``kfcomm.Communicator.refuse`` does.

        Raises:
            ConfigError: the name is not valid.
        """
        if self._calls is None:
            self.current.refuse(name, error, steps=steps)
        else:
            self._calls.refuse(name, error, steps)

    # ---------------------------------------------------------------- changes of the ranks

    async def shrink(self, *, timeout: Any = None) -> Self:
        """Continue with the surviving ranks, in this communicator, as ``kfcomm.Communicator.shrink`` does in a new one.

        Raises:
            ConfigError: an ``Elastic`` is open, which does it by itself.
        """
        self._check_not_open("shrink")
        former = self.current
        self._move(await former.shrink(timeout=timeout))
        self._reports.begin(self.current, former.births, NO_PLAN)
        return self

    async def agree(self, value: Any, *, timeout: Any = None) -> Any:
        """Agree on a value with the surviving ranks, as ``kfcomm.Communicator.agree`` does.

        Raises:
            ConfigError: an ``Elastic`` is open.
        """
        self._check_not_open("agree")
        return await self.current.agree(value, timeout=timeout)

    async def resize(self, size: int, *, timeout: Any = None) -> bool:
        """Change the number of ranks; all ranks call it. For programs without an ``Elastic``: see ``propose_size``.

        If ranks are missing, the first rank waits for others (``kfcomm run --elastic MIN:MAX`` starts them), whose
        ``kfcomm.init`` returns when they have joined. If there are too many, the last ones leave; if a rank that was to
        stay dies meanwhile, the first rank waits for another. Afterwards this communicator is the one of the next
        epoch, as with ``shrink``, and groups have to be made again.

        Args:
            size: number of ranks.
            timeout: seconds to wait for other ranks, and then for all to agree; None for the communicator's.

        Returns:
            Whether this rank stays; else it has to close.

        Raises:
            ConfigError: an ``Elastic`` is open; or the size is outside the job's range; or the job has no store.
            CollectiveTimeout: too few ranks have come. On all ranks, and nothing has changed.
            PeerLost: a rank died while the first one waited: ``shrink``, and call it again.
            Partitioned: as with ``shrink``.
        """
        self._check_not_open("resize")
        size = _checked_size(size)
        limit_s = self.current._seconds(timeout)
        # If a rank dies meanwhile, the epoch has another size than planned, and there is another round.
        while self.current.size != size:
            comm = self.current
            mine = await _planned(comm, size, limit_s) if comm.rank == 0 else None
            # Longer than the first rank may wait for new ranks, whose answer the others need.
            said = await comm.broadcast_object(mine, 0, "kfcomm/plan", timeout=2 * limit_s)
            if "late" in said:
                raise CollectiveTimeout(said["late"])
            if "wrong" in said:
                raise ConfigError(said["wrong"])
            if not await self._carry_out(EpochPlan.of(said["plan"]), timeout):
                return False
        return True

    async def follow_requests(self, *, timeout: Any = None) -> bool:
        """Carry out what was asked of the job since: ranks join and leave; all ranks call it, without an ``Elastic``.

        Waiting ranks join, as far as the size of ``propose_size`` allows; of too many ranks the last ones leave, as do
        those of ``propose_replacement``. If nothing was asked, nothing happens: ``epoch`` tells. Else this communicator
        is the one of the next epoch, as with ``resize``, and the program sends the joining ranks its state.

        Args:
            timeout: seconds; None for the communicator's.

        Returns:
            Whether this rank stays; else it has to close.

        Raises:
            ConfigError: an ``Elastic`` is open, which does it by itself.
            PeerLost: a rank died: ``shrink``. The others may have continued without it already, if ``epoch`` tells so.
            Partitioned: as with ``shrink``.

        Cost: a broadcast of a small object.
        """
        self._check_not_open("follow_requests")
        comm = self.current
        self._requests.look(comm)
        mine = self._requests.plan(comm) if comm.rank == 0 else NO_PLAN
        plan = EpochPlan.of(await comm.broadcast_object(mine, 0, "kfcomm/plan", timeout=timeout))
        return plan == NO_PLAN or await self._carry_out(plan, timeout)

    async def _carry_out(self, plan: EpochPlan, timeout: Any) -> bool:
        """Change the ranks by a plan, or without those that die meanwhile; False if this rank leaves."""
        former = self.current
        try:
            made, _, is_planned = await former._succeed(b"", plan=plan, timeout=timeout)
        except Released:
            return False
        self._move(made)
        if is_planned:
            self._requests.done(plan)
        self._reports.begin(made, former.births, plan if is_planned else NO_PLAN)
        return True

    async def propose_size(self, size: int) -> None:
        """Propose a number of ranks, from any rank, for the next boundary of an ``Elastic`` or a later one.

        Other ranks join as they come (``kfcomm run --elastic MIN:MAX`` starts them), up to this number; if there are
        too many, the last ones are released. The latest proposal counts.

        Raises:
            ConfigError: the size is outside the job's range; or the job has no store.
            RendezvousError: the store cannot be reached.
        """
        await self.current._session.network.membership.want_size(_checked_size(size))

    async def propose_replacement(self, rank: int) -> None:
        """Propose another process in the place of a rank, such as a slow one; from any rank.

        The rank is released at the next boundary of an ``Elastic``; the others continue. ``kfcomm run --elastic
        MIN:MAX`` starts another process at once, or admits a spare one (``--spares``); it counts for the
        ``--restart-limit``. With ``--elastic MIN`` the rank is not replaced. The last rank that has the state stays.

        Args:
            rank: number of the rank in this step.

        Raises:
            ConfigError: the rank is out of range; or the job has no store.
            RendezvousError: the store cannot be reached.
        """
        number = whole_number(rank)
        if number is None or not 0 <= number < self.size:
            raise ConfigError(f"a rank is a whole number from 0 to {self.size - 1}, not {rank!r}")
        # By uid: its number may be another one when that is carried out.
        await self.current._session.network.membership.want_replaced(self.births[number])

    def _check_not_open(self, verb: str) -> None:
        if self._calls is not None:
            raise ConfigError(f"{verb} is for programs that handle losses themselves: while an Elastic is open it does")

    async def close(self) -> None:
        """End an open ``Elastic``, and close the communicator."""
        if self._calls is not None:
            await self.end()
        await self._reports.close()
        await self.current.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._session.hurry()
        await self.close()

    # ---------------------------------------------------------------- for an Elastic

    def begin(self, *, finishes: bool = True) -> Dispatcher:
        """Let calls survive the loss of ranks from now on; ``finishes``: see `Dispatcher`.

        Raises:
            ConfigError: one is open already.
            SessionClosed: the communicator is closed.
        """
        if self._calls is not None:
            raise ConfigError("an Elastic is open on this communicator already")
        self.current._check_open()
        self._by_uids = {self.current.births: self.current}
        self._calls = Dispatcher(self.current, self._move, self._reports, finishes=finishes)
        return self._calls

    async def end(self) -> None:
        """Return to the calls of the epoch."""
        calls, self._calls, self.elastic = self._calls, None, None
        if calls is not None:
            await calls.close()

    def check_open(self) -> None:
        """Check that calls can be made; during a change of the epoch they wait for it.

        Raises:
            SessionClosed, EpochChanged: as ``Session.check_open``.
        """
        session = self.current._session.latest
        if self._calls is None or session.over is None:
            session.check_open()

    def _move(self, comm: Communicator) -> None:
        self.current = comm
        self._by_uids[comm.births] = comm
        if self._timeout is not None:
            comm.set_timeout(self._timeout)


def is_of_step(name: str) -> bool:
    """Whether a method concerns the ranks of the step and does not survive a loss: it ends with their epoch."""
    # Else a rank that comes to it later would be alone in the next epoch, or reach other ranks than it has named.
    return name in _OF_STEP or name.endswith("_init")


def _checked_size(size: Any) -> int:
    number = whole_number(size)
    if number is None or number < 1:
        raise ConfigError(f"a size is a whole number from 1 on, not {size!r}")
    return number


async def _planned(comm: Communicator, size: int, limit_s: float) -> dict[str, Any]:
    """Return the plan for a size, or the reason against it; msgpack can carry it."""
    membership, needed = comm._session.network.membership, size - comm.size
    found: list[Candidate] = []
    try:
        await membership.want_size(size)
        async with asyncio.timeout(limit_s):
            while len(found) < needed:
                found += await membership.candidates({one.birth for one in found})
    except TimeoutError:
        return {"late": f"resize({size}): {len(found)} of {needed} new ranks have come within {limit_s:g} s"}
    except (ConfigError, RendezvousError) as error:
        return {"wrong": str(error)}
    return {"plan": EpochPlan(tuple(sorted(found)[: max(0, needed)]), comm.births[size:])}


def _outliving(verb: str) -> Callable[..., Handle[Any]]:
    """Return the elastic form of a verb: through the dispatcher, while an ``Elastic`` is open."""
    plain = getattr(Communicator, verb)

    def call(self: ElasticCommunicator, *args: Any, **kwargs: Any) -> Handle[Any]:
        calls = self._calls
        if calls is None or (args and _is_far(args[0])):
            if calls is not None:
                calls.post_boundary()
            begun: Handle[Any] = getattr(self._shown, verb)(*args, **kwargs)
            return begun
        return calls.begin(verb, args, kwargs)

    functools.update_wrapper(call, plain)
    call.__dict__["__signature__"] = inspect.signature(plain)
    return call


def _is_far(x: Any) -> bool:
    """Whether an array, or one of several, is in device memory."""
    return any(map(is_on_device, x)) if is_list(x) else is_on_device(x)


for _verb in KINDS:
    setattr(ElasticCommunicator, _verb, _outliving(_verb))

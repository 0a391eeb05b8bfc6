"""The communicator of a world that changes: the verbs of ``kfcomm.Communicator``, over one epoch after the other."""

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
from kfcomm.elastic.requests import EpochReports
from kfcomm.errors import CollectiveTimeout, ConfigError, RendezvousError
from kfcomm.types import Candidate, Seconds
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, Plan, Released

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

    It has all that a ``Communicator`` has. While an ``Elastic`` is open, the collectives of the world outlive a rank
    that dies: those that live finish them, with one result and one list of contributors (``handle.contributors``), or
    one error. ``rank``, ``size`` and ``births`` stay what they are until the step is over. What is not finished so
    fails as it does without ``Elastic``, until the step is over: messages, queues, ``set_strategy``, sub-groups,
    persistent collectives, arrays on devices.

    Attributes:
        current: the communicator of the epoch.
    """

    def __init__(self, comm: Communicator) -> None:
        self.current = comm
        self._calls: Dispatcher | None = None
        self._reports = EpochReports()
        self._timeout: Seconds | None = None
        self._by_births = {comm.births: comm}

    def __repr__(self) -> str:
        return f"<Elastic{repr(self.current)[1:]}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown if is_of_step(name) else self.current, name)

    # ---------------------------------------------------------------- who and where

    @property
    def _shown(self) -> Communicator:
        """Of the ranks of the step."""
        return self.current if self._calls is None else self._by_births[self._calls.log.shown]

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
        """The rank that each rank of the step had in the first epoch: who it is, whatever its number is now."""
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
        """Whether collectives outlive a rank that is lost: while an ``Elastic`` is open."""
        return self._calls is not None

    @property
    def _session(self) -> Session:
        return self.current._session

    # ---------------------------------------------------------------- what holds for the epochs that follow, too

    def set_timeout(self, timeout: Seconds) -> None:
        """See ``kfcomm.Communicator.set_timeout``; also of the epochs that follow.

        Raises:
            ConfigError: it is not above 0.
        """
        self.current.set_timeout(timeout)
        self._timeout = timeout

    def refuse(self, name: str | None, error: BaseException, *, steps: int = 1) -> None:
        """See ``kfcomm.Communicator.refuse``.

        Raises:
            ConfigError: it cannot be a name.
        """
        if self._calls is None:
            self.current.refuse(name, error, steps=steps)
        else:
            self._calls.refuse(name, error, steps)

    # ---------------------------------------------------------------- the ends

    async def shrink(self, *, timeout: Any = None) -> Self:
        """Go on with the ranks that live; this communicator is theirs then. See ``kfcomm.Communicator.shrink``.

        Raises:
            ConfigError: an ``Elastic`` is open, which does it by itself.
        """
        self._check_not_open("shrink")
        former = self.current
        self._move(await former.shrink(timeout=timeout))
        self._reports.begin(self.current, former.births, NO_PLAN)
        return self

    async def agree(self, value: Any, *, timeout: Any = None) -> Any:
        """See ``kfcomm.Communicator.agree``.

        Raises:
            ConfigError: an ``Elastic`` is open.
        """
        self._check_not_open("agree")
        return await self.current.agree(value, timeout=timeout)

    async def resize(self, size: int, *, timeout: Any = None) -> bool:
        """Go on with so many ranks; all call it. For programs without an ``Elastic``, which has ``propose_size``.

        If there are too few, the first rank waits for others (``kfcomm run --elastic MIN:MAX`` starts them), whose
        ``kfcomm.init`` returns when they are let in. Of too many the last ones go; if one that was to stay dies
        meanwhile, another is waited for. As with ``shrink`` this communicator is that of the next epoch then, and
        groups are made anew.

        Args:
            size: number of ranks.
            timeout: seconds to wait for others, and then for all to agree; None for the communicator's.

        Returns:
            Whether this rank goes on; else it is to close.

        Raises:
            ConfigError: an ``Elastic`` is open; or the job does not have so many, or so few; or there is no store.
            CollectiveTimeout: nobody has come, or not enough. All ranks hear it, and stay as they are.
            PeerLost: a rank died while the first one waited: ``shrink``, and call it again.
            Partitioned: see ``shrink``.
        """
        self._check_not_open("resize")
        size = _checked_size(size)
        limit_s = self.current._seconds(timeout)
        while self.current.size != size:
            comm = self.current
            mine = await _planned(comm, size, limit_s) if comm.rank == 0 else None
            said = await comm.broadcast_object(mine, 0, "kfcomm/plan", timeout=2 * limit_s)
            if "late" in said:
                raise CollectiveTimeout(said["late"])
            if "wrong" in said:
                raise ConfigError(said["wrong"])
            plan = Plan.of(said["plan"])
            try:
                made, _, is_planned = await comm._succeed(b"resize", plan=plan, timeout=timeout)
            except Released:
                return False
            self._move(made)
            self._reports.begin(made, comm.births, plan if is_planned else NO_PLAN)
        return True

    async def propose_size(self, size: int) -> None:
        """Ask for so many ranks, from any rank; it comes about at the next boundary of an ``Elastic``, or later.

        Others are let in as they are there (``kfcomm run --elastic MIN:MAX`` starts them), up to this number; of too
        many the last ones are released. The latest that was asked counts.

        Raises:
            ConfigError: the job does not have so many, or so few; or there is no store.
            RendezvousError: the store cannot be reached.
        """
        await self.current._session.network.want_size(_checked_size(size))

    async def propose_replacement(self, rank: int) -> None:
        """Ask that another process come in the place of a rank, from any rank: of one that is slow, say.

        It goes at the next boundary of an ``Elastic``, as one that is released; the others go on. ``kfcomm run
        --elastic MIN:MAX`` starts another at once, or lets in one that waits (``--spares``); it counts for the
        ``--restart-limit``. With ``--elastic MIN`` nobody comes. The last rank that has the state stays.

        Args:
            rank: of this step.

        Raises:
            ConfigError: there is no such rank; or there is no store.
            RendezvousError: the store cannot be reached.
        """
        number = whole_number(rank)
        if number is None or not 0 <= number < self.size:
            raise ConfigError(f"a rank is a whole number from 0 to {self.size - 1}, not {rank!r}")
        await self.current._session.network.want_replaced(self.births[number])

    def _check_not_open(self, verb: str) -> None:
        if self._calls is not None:
            raise ConfigError(f"{verb} is for programs that handle losses themselves: while an Elastic is open it does")

    async def close(self) -> None:
        """See ``kfcomm.Communicator.close``."""
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

    # ---------------------------------------------------------------- what an Elastic does

    def begin(self, *, finishes: bool = True) -> Dispatcher:
        """From now on calls outlive a rank; ``finishes``: see `Dispatcher`.

        Raises:
            ConfigError: one is open already.
            SessionClosed: the communicator is closed.
        """
        if self._calls is not None:
            raise ConfigError("an Elastic is open on this communicator already")
        self.current._check_open()
        self._by_births = {self.current.births: self.current}
        self._calls = Dispatcher(self.current, self._move, self._reports, finishes=finishes)
        return self._calls

    async def end(self) -> None:
        """Calls are those of the epoch again."""
        calls, self._calls = self._calls, None
        if calls is not None:
            await calls.close()

    def check_open(self) -> None:
        """Refuse to work when closed; not in the midst of a change, which calls wait for.

        Raises:
            SessionClosed, EpochChanged: see ``Session.check_open``.
        """
        session = self.current._session.latest
        if self._calls is None or not session.is_changing:
            session.check_open()

    def _move(self, comm: Communicator) -> None:
        self.current = comm
        self._by_births[comm.births] = comm
        if self._timeout is not None:
            comm.set_timeout(self._timeout)


def is_of_step(name: str) -> bool:
    """Whether a method is about the ranks of the step, and does not outlive one: over with the epoch of these.

    Else a rank that comes to it later would do it alone in the next epoch, or with other ranks than it has named.
    """
    return name in _OF_STEP or name.endswith("_init")


def _checked_size(size: Any) -> int:
    number = whole_number(size)
    if number is None or number < 1:
        raise ConfigError(f"a size is a whole number from 1 on, not {size!r}")
    return number


async def _planned(comm: Communicator, size: int, limit_s: float) -> dict[str, Any]:
    """Who comes and who goes, so that there are ``size`` ranks, or why nobody does; msgpack can carry it."""
    network, needed = comm._session.network, size - comm.size
    found: list[Candidate] = []
    try:
        await network.want_size(size)
        async with asyncio.timeout(limit_s):
            while len(found) < needed:
                found += await network.candidates({one.birth for one in found})
    except TimeoutError:
        return {"late": f"resize({size}): {len(found)} of {needed} new ranks have come within {limit_s:g} s"}
    except (ConfigError, RendezvousError) as error:
        return {"wrong": str(error)}
    return {"plan": Plan(tuple(sorted(found)[: max(0, needed)]), comm.births[size:])}


def _outliving(verb: str) -> Callable[..., Handle[Any]]:
    """The verb, by way of the calls if there is one."""
    plain = getattr(Communicator, verb)

    def call(self: ElasticCommunicator, *args: Any, **kwargs: Any) -> Handle[Any]:
        calls = self._calls
        if calls is None or (args and _is_far(args[0])):
            begun: Handle[Any] = getattr(self._shown, verb)(*args, **kwargs)
            return begun
        return calls.begin(verb, args, kwargs)

    functools.update_wrapper(call, plain)
    call.__dict__["__signature__"] = inspect.signature(plain)
    return call


def _is_far(x: Any) -> bool:
    """Whether an array is, or arrays are, in the memory of a device."""
    return any(map(is_on_device, x)) if is_list(x) else is_on_device(x)


for _verb in KINDS:
    setattr(ElasticCommunicator, _verb, _outliving(_verb))

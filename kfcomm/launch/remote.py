"""Functions as ranks in the workers of another library, Ray or Dask: their arguments, their ends, and the culprit.

The caller packs a `Task`; each worker passes it to `run_rank`, and returns an `Ended`, also for an error: the caller
chooses which of several errors is raised, and a worker's own library would wrap each of them.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kfcomm.common.arguments import whole_number
from kfcomm.common.version import HOW_TO_AGREE, versions
from kfcomm.errors import ConfigError
from kfcomm.joining import Init, prepare
from kfcomm.rendezvous.exit_report import is_elsewhere
from kfcomm.rendezvous.host import hostname
from kfcomm.rendezvous.settings import Arguments, Settings, detect
from kfcomm.sync.communicator import join

if TYPE_CHECKING:
    from kfcomm.engine.entrance import Exchange

T = TypeVar("T")

OWN = frozenset(("rank", "size", "local_rank", "local_size", "store", "serve", "token", "elastic", "join"))
"""Settings that the job chooses itself."""
GRACE_S = 5.0
"""Time for the culprit to end, after a rank that blames another one has."""
_MAX_TEXT = 200


class Task(NamedTuple):
    """Program of all ranks of a job: ``function(comm, *args)``, with a blocking or an asynchronous communicator."""

    versions: tuple[str, int]  # of the caller
    function: Callable[..., Any]
    args: tuple[Any, ...]
    settings: Mapping[str, Any]  # arguments of ``init`` that all ranks share


class Ended(NamedTuple):
    """End of a rank: its last rank, and its result or its error."""

    uid: int
    rank: int
    value: Any = None
    error: BaseException | None = None
    is_elsewhere: bool = False  # the error follows from the failure of another rank


def task_of(function: Callable[..., Any], args: tuple[Any, ...], settings: Mapping[str, Any]) -> Task:
    """Check what the caller has given.

    Raises:
        ConfigError: the function cannot be called; or a setting is unknown, invalid, or chosen by the job.
    """
    if not callable(function):
        raise ConfigError(f"expected a function that takes a communicator, got {type(function).__name__}")
    if taken := sorted(OWN.intersection(settings)):
        raise ConfigError(f"{', '.join(taken)}: chosen by run for each rank; leave out")
    detect({}, size=1, **Arguments(**settings))  # type: ignore[typeddict-item]  # checked there
    return Task(versions(), function, args, dict(settings))


def pickled(what: str, pickle: Callable[[], T]) -> T:
    """Result of ``pickle``.

    Raises:
        ConfigError: cloudpickle cannot pickle it; names the first cause.
    """
    try:
        return pickle()
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be pickled for the workers ({_line(error.__cause__ or error)}): create locks, files, "
            "connections and clients inside the function"
        ) from error


def checked_number(name: str, value: Any) -> int:
    """A number of workers. Raises `ConfigError`: it is not a whole number from 1 on."""
    number = whole_number(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number from 1 on")
    return number


def check_versions(theirs: tuple[str, int], where: str) -> None:
    """Check that a worker has the caller's version. Raises `ConfigError`: it has another; shows both."""
    mine = versions()
    if theirs != mine:
        raise ConfigError(
            f"{where} has kfcomm {theirs[0]} (protocol {theirs[1]}), the caller {mine[0]} (protocol {mine[1]}). "
            f"{HOW_TO_AGREE}"
        )


def place_of(rank: int, size: int, url: str, token: str) -> Arguments:
    """Arguments of ``init`` for a rank, whose store is at ``url``."""
    # The engine shows each worker only its own devices, counted from 0.
    return Arguments(rank=rank, size=size, local_rank=0, local_size=1, store=url, serve=False, token=token)


def run_rank(task: Task, uid: int, place: Arguments, exchange: Exchange | None = None) -> Ended:
    """Run the function as one rank, on this thread; ``place``: further arguments of ``init``."""
    try:
        settings = prepare(**Arguments(**task.settings, **place))  # type: ignore[typeddict-item]
        if _is_async(task.function):
            rank, value = asyncio.run(_awaited(task, settings, exchange))
        else:
            rank, value = _blocking(task, settings, exchange)
    except SystemExit as error:
        if not error.code:
            return Ended(uid, uid)
        return failed(uid, RuntimeError(f"sys.exit({error.code!r}) in the function"))
    except Exception as error:  # noqa: BLE001  the caller raises it
        return failed(uid, error)
    return Ended(uid, rank, value)


def failed(uid: int, error: BaseException) -> Ended:
    """End of a rank by an error that is raised here, made fit for another process."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        # As pickle takes it apart and makes it again, which fails for some classes.
        sent = copy.deepcopy(error).with_traceback(None)
    except Exception:  # noqa: BLE001
        sent = RuntimeError(_line(error))
    sent.add_note(f"on rank {uid} ({hostname()}, process {os.getpid()}):\n{text}")
    return Ended(uid, uid, error=sent, is_elsewhere=is_elsewhere(error))


def culprit(ends: Iterable[Ended]) -> BaseException:
    """Error of the first end that blames no other rank, else of the first; a note has a line for each other one."""
    first, *others = sorted((end for end in ends if end.error is not None), key=lambda end: end.is_elsewhere)
    if first.error is None:
        raise AssertionError("unreachable")
    for end in others:
        if end.error is not None:
            first.error.add_note(f"rank {end.uid} failed too: {_line(end.error)}")
    return first.error


def is_known(ends: Iterable[Ended]) -> bool:
    """Whether a rank has failed that blames no other."""
    return any(end.error is not None and not end.is_elsewhere for end in ends)


def _blocking(task: Task, settings: Settings, exchange: Exchange | None) -> tuple[int, Any]:
    with join(settings, exchange) as comm:
        value = task.function(comm, *task.args)
        return comm.rank, value


async def _awaited(task: Task, settings: Settings, exchange: Exchange | None) -> tuple[int, Any]:
    async with Init(settings, exchange=exchange) as comm:
        value = await task.function(comm, *task.args)
        return comm.rank, value


def _is_async(function: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:_MAX_TEXT]}" if text else type(error).__name__

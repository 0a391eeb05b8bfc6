"""Choice of a rank's device, and of the route of device memory in a group.

Invariants: the same reports, layout and transport give the same choice of a route, with the same words, so that all
ranks choose alike without communication. CuPy, and modules that use it, are imported only where there may be a
device.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kfcomm.arrays.devices import Device, DeviceReport
from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import ConfigError, TransportError
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.arrays.devices.cuda import CudaDevice


def driver_version(number: int) -> str:
    """A version as CUDA counts: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def backend_in_words(backend: str, number: int) -> str:
    """A backend and its version, as it counts: of ``nccl`` 22803 is NCCL 2.28.3, and 2804 is NCCL 2.8.4."""
    if backend != "nccl":
        return f"{backend} {number}"
    # before 2.9 the first part had two digits less behind it
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1000)
    return f"NCCL {major}.{rest // 100}.{rest % 100}"


DRIVER_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""With a driver, one of these exists; the last is that of WSL."""


def find(choice: str, local_rank: int) -> tuple[Device | None, DeviceReport]:
    """The device of a rank, and the report for the other ranks.

    Args:
        choice: ``auto`` for a device if there is one, ``none``, ``cuda`` for a required one, ``cuda:N`` for that one.
        local_rank: among the ranks of its host, which are distributed over the devices that the process sees.

    Raises:
        ConfigError: ``choice`` is not one of these, or the device is missing; says what would help. For ``auto`` the
            report says it instead.

    Cost: without a driver about 15 µs, and no imports.
    """
    if choice == "none":
        return None, DeviceReport(lack="switched off by device=none")
    kind, colon, number = choice.partition(":")
    if choice != "auto" and (kind != "cuda" or bool(colon) != number.isdecimal()):
        raise ConfigError(f"device is {choice!r}: expected auto, none, cuda, or cuda:N, with N as CUDA counts devices")
    try:
        # Files first: a host without a driver need not import CuPy, which is slow.
        if choice == "auto" and not any(map(os.path.exists, DRIVER_NODES)):
            raise ConfigError("this host has no NVIDIA GPU, or no driver for it")
        device = _open(int(number) if colon else None, local_rank)
    except (ConfigError, TransportError) as error:
        if choice == "auto":
            return None, DeviceReport(lack=str(error))
        raise ConfigError(f"device is {choice}, but {error}") from error
    return device, device.report


def _open(ordinal: int | None, local_rank: int) -> CudaDevice:
    from kfcomm.arrays.devices.cuda import INSTALL, CudaDevice, load_cupy

    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(f"CuPy is not installed: {INSTALL}")
    runtime = load_cupy().cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ConfigError(f"CUDA finds no device: {error}") from error
    if ordinal is None:
        # More ranks than devices share them, which the choice of a route takes into account.
        ordinal = local_rank % count
    elif ordinal >= count:
        names = ", ".join(f"cuda:{n} ({runtime.getDeviceProperties(n)['name'].decode()})" for n in range(count))
        raise ConfigError(f"this process sees only {names}; CUDA_VISIBLE_DEVICES may hide others")
    return CudaDevice(ordinal)


MAX_SHARING: Final = 16
"""Ranks that fold each other's device memory: one kernel takes the addresses of all."""
MAX_SHOWN = 4
"""Maximal number of different values in one sentence."""


class Route(StrEnum):
    """Ways to carry out collectives of device memory."""

    BACKEND = "backend"
    """The backend runs them whole, among all ranks."""
    SLOTS = "device slots"
    """Ranks of one host map each other's device memory, and fold it by kernels."""
    HIERARCHY = "hierarchy"
    """The backend works inside each host, and graphs over links join the hosts."""
    STAGED = "staged"
    """Through memory of the hosts, along graphs over links."""


class Choice(NamedTuple):
    """The route of a group.

    Attributes:
        route: the chosen one.
        mixed: whether some ranks have a device and others have none.
        because: the reason, naming ranks; a clause without a full stop.
    """

    route: Route
    mixed: bool
    because: str

    def __str__(self) -> str:
        return f"{self.route}: {self.because}"


def agree(transports: Sequence[str]) -> str:
    """The transport of device memory in a world, from the setting of each rank.

    ========================================  =====================================
    settings                                  agreed
    ========================================  =====================================
    ``auto`` on all                           ``auto``
    ``nccl`` on some, ``auto`` on others      ``nccl``
    ``ipc`` on some, ``auto`` on others       ``ipc``
    a kind of links on some, neither of both  that of the first rank that names one
    ``nccl`` and ``ipc``, or links            none
    ========================================  =====================================

    Args:
        transports: by rank.

    Raises:
        ConfigError: some ranks ask for NCCL or IPC, and others for something else; names both.
    """
    named = [(rank, transport) for rank, transport in enumerate(transports) if transport != "auto"]
    if not named:
        return "auto"
    rank, first = named[0]
    for other, transport in named:
        if transport != first and not {transport, first}.isdisjoint({"nccl", "ipc"}):
            raise ConfigError(
                f"transport {first!r} of rank {rank} contradicts transport {transport!r} of rank {other}: "
                "device memory cannot go both ways; set the same transport on all ranks"
            )
    return first


def choose(reports: Sequence[DeviceReport], layout: Layout, transport: str, members: Sequence[int] = ()) -> Choice:
    """The route of a group. The first line that applies is taken:

    ======================================================  =========  ===========  ============
    the ranks                                               ``auto``   ``nccl``     ``ipc``
    ======================================================  =========  ===========  ============
    none has a device                                       staged     ConfigError  ConfigError
    some have no device                                     mixed      ConfigError  ConfigError
    two share a device, and all are on one host             slots      see below    slots
    two share a device, on several hosts                    staged     see below    ConfigError
    some have no backend                                    staged     ConfigError  as above
    they have different backends                            staged     ConfigError  as above
    the backend's versions differ, in whatever digit        staged     ConfigError  as above
    all are on one host, one rank alone included            backend    backend      slots
    they are on several hosts, one on each                  staged     backend      ConfigError
    they are on several hosts, as many on each              hierarchy  backend      ConfigError
    they are on several hosts, more on some                 staged     backend      ConfigError
    ======================================================  =========  ===========  ============

    ``mixed`` is staged, where some have no device. Slots are for devices that export their memory, and at most
    `MAX_SHARING` ranks; else it is as on several hosts. With ``ipc`` a group of one rank is staged. NCCL refuses two
    ranks on one device (ConfigError), unless all ranks report that it ``shares`` theirs. Drivers may differ. With the
    transport of links (``tcp``, ``unix``, ``shm``) the route is staged, and mixed if some ranks have no device.

    Args:
        reports: of the members, by rank in the group.
        layout: hosts of the members.
        transport: the result of `agree`.
        members: their ranks in the world, by which they are named; as in the group if left out.

    Raises:
        ConfigError: the transport is ``nccl`` or ``ipc``, and that cannot work among these ranks; says why.
    """  # noqa: D415  the table completes the sentence
    ranks = tuple(zip(members or range(len(reports)), reports, strict=True))
    having = [report for report in reports if report.kind]
    mixed = 0 < len(having) < len(reports)
    obstacle = _obstacle(ranks, transport)
    if transport == "nccl":
        if obstacle is not None:
            raise ConfigError(f"transport 'nccl' cannot work: {obstacle}; use 'auto'")
        return Choice(Route.BACKEND, False, "transport 'nccl' was asked for")
    apart = _apart(ranks, layout)
    if transport == "ipc" and len(ranks) > 1:
        if apart is not None:
            raise ConfigError(f"transport 'ipc' cannot work: {apart}; use 'auto'")
        return Choice(Route.SLOTS, False, "transport 'ipc' was asked for")
    if transport != "auto" and having:
        return Choice(Route.STAGED, mixed, f"transport {transport!r} was asked for")
    sharing = _sharing(ranks)
    if sharing is not None and apart is None:
        return Choice(Route.SLOTS, False, f"{sharing}, on one host")
    if obstacle is not None:
        return Choice(Route.STAGED, mixed, obstacle)
    return _by_hosts(layout)


def cautions(
    reports: Sequence[DeviceReport], transport: str, *, is_device_named: bool, route: Route | None = None
) -> Iterator[str]:
    """Yield warnings about a set-up that works and could be improved; clauses without full stops.

    Args:
        reports: of all ranks of the world, by rank.
        transport: the result of `agree`.
        is_device_named: whether the device was chosen explicitly; if not, a shared one is expected.
        route: of the world.
    """
    having = [(rank, report) for rank, report in enumerate(reports) if report.kind]
    if transport not in ("auto", "nccl") or not having:
        return
    for costly in (_unlike_backends(having), _shared(having, transport) if is_device_named else None):
        if route is Route.SLOTS:
            break
        if costly is not None:
            yield f"device memory goes through memory of the hosts, which is slower: {costly}"
    drivers = _by(having, lambda report: driver_version(report.driver))
    if len(drivers) > 1:
        yield f"the drivers of the devices are not the same: {_told(drivers)}"


_Ranks: TypeAlias = Sequence[tuple[int, DeviceReport]]
"""Reports, each with the rank under which it is named."""


def _obstacle(ranks: _Ranks, transport: str) -> str | None:
    """The reason why no backend is to connect these ranks; None if one can."""
    without = [(rank, report) for rank, report in ranks if not report.kind]
    if len(without) == len(ranks):
        return f"no rank has a device ({_lacks(without)})"
    if without:
        return f"some ranks have no device ({_lacks(without)})"
    return _shared(ranks, transport) or _unlike_backends(ranks)


def _shared(ranks: _Ranks, transport: str) -> str | None:
    """The ranks that share a device, and why their backend cannot connect them, as a clause; None if it can."""
    if not all(report.shares for _, report in ranks):
        why = "NCCL refuses two ranks on one"
    elif transport != "nccl":
        why = "NCCL takes two ranks on one with transport 'nccl' only"
    else:
        return None
    sharing = _sharing(ranks)
    return None if sharing is None else f"{sharing}, and {why}"


def _sharing(ranks: _Ranks) -> str | None:
    """The ranks that share a device, as a clause; None without any."""
    for uuid, sharing in _by(ranks, lambda report: report.uuid).items():
        if uuid and len(sharing) > 1:
            return f"{ranks_in_words(sharing)} share one device ({uuid})"
    return None


def _apart(ranks: _Ranks, layout: Layout) -> str | None:
    """The reason why these ranks cannot map each other's device memory; None if they can, as far as is known."""
    without = [(rank, report) for rank, report in ranks if not report.kind]
    if without:
        return f"some ranks have no device ({_lacks(without)})"
    if layout.num_hosts > 1:
        return "the ranks are on several hosts"
    if len(ranks) > MAX_SHARING:
        return f"{len(ranks)} ranks are more than {MAX_SHARING}"
    closed = [rank for rank, report in ranks if not report.exports]
    return f"{ranks_in_words(closed)} cannot export memory of the device" if closed else None


def _unlike_backends(ranks: _Ranks) -> str | None:
    """The difference between the ranks' backends, as a clause; None if all have the same."""
    without = [(rank, report) for rank, report in ranks if not report.backend]
    if without:
        return f"nothing runs collectives on the devices of some ranks ({_lacks(without)})"
    found = _by(ranks, lambda report: backend_in_words(report.backend, report.backend_version))
    if len(found) == 1:
        return None
    if len({report.backend for _, report in ranks}) > 1:
        return f"the ranks have different backends: {_told(found)}"
    return f"{_told(found)}; the version must be the same everywhere"


def _by_hosts(layout: Layout) -> Choice:
    """The route of ranks that have each a device of their own, and all the same backend."""
    local_sizes = Counter(layout.hosts).values()
    fewest, most = min(local_sizes), max(local_sizes)
    if layout.num_hosts == 1:
        return Choice(Route.BACKEND, False, "every rank has a device of its own, on one host")
    if most == 1:
        return Choice(Route.STAGED, False, "every host has one rank, so that there is nothing to do inside a host")
    if fewest < most:
        return Choice(Route.STAGED, False, f"the hosts have unequal numbers of ranks, from {fewest} to {most}")
    return Choice(Route.HIERARCHY, False, f"every rank has a device of its own, {most} on every one of several hosts")


def _by(ranks: _Ranks, key: Callable[[DeviceReport], str]) -> dict[str, list[int]]:
    """The ranks for which ``key`` has the same value, by that value, in the order of the ranks."""
    found: dict[str, list[int]] = {}
    for rank, report in ranks:
        found.setdefault(key(report), []).append(rank)
    return found


def _lacks(ranks: _Ranks) -> str:
    """The lacks of ranks as text: ``rank 1: no CuPy; ranks 2-3: device 'none' was asked for``."""
    found = _by(ranks, lambda report: report.lack or "it does not say why")
    return _abridged((f"{ranks_in_words(of)}: {lack}" for lack, of in found.items()), len(found), "; ")


def _told(found: Mapping[str, Sequence[int]]) -> str:
    """Values with their ranks as text: ``NCCL 2.28.3 on rank 0, NCCL 2.27.5 on ranks 1-2``."""
    return _abridged((f"{what} on {ranks_in_words(of)}" for what, of in found.items()), len(found), ", ")


def _abridged(parts: Iterator[str], count: int, between: str) -> str:
    shown = [*islice(parts, MAX_SHOWN), *([f"and {count - MAX_SHOWN} more"] if count > MAX_SHOWN else [])]
    return between.join(shown)

"""Fake collective backend in host memory, in place of NCCL.

The ranks of one test share a `FakeFabric`. Work that a rank launches runs when every rank of the group has launched its
own at the same place, and the streams of all have reached it. Until then each stream is stuck there, and its target
memory is poisoned. If ranks launch different work at one place, which NCCL would answer with wrong numbers or a hang,
the ranks and the test get an error.

Invariants: as `kfcomm.testing.streams` says, nothing happens on a thread of its own. Only ``connect`` waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kfcomm.arrays.devices import Array, Device
from kfcomm.errors import TransportError
from kfcomm.testing.backend_results import ROOTED, FakeLaunch, Impossible, num_elements, results, supports
from kfcomm.testing.device_arrays import FakeArray, Uses
from kfcomm.testing.devices import FakeDevice
from kfcomm.testing.streams import SCHEDULER, FakeStream, poison
from kfcomm.transports.base import Launch, Part
from kfcomm.types import Op, Verb


class FakeFabric:
    """Fabric between the fake devices of one test; a `kfcomm.transports.base.BackendMaker` for all its ranks.

    Attributes:
        violations: launches that a real backend would answer with wrong numbers or a hang; empty in a correct test.
        launched: all launches, in order: the identity of the group, the rank, and the launch.
    """

    name = "fake"

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.launched: list[tuple[bytes, int, FakeLaunch]] = []
        self._meeting = threading.Condition()
        self._refusal: str | None = None
        self._groups: dict[bytes, _Group] = {}
        self._stopped: set[int | FakeDevice] = set()
        self._breakage: str | None = None

    def supports(self, verb: Verb, dtype: np.dtype[Any], op: Op | None) -> bool:
        """Whether a verb can be launched: bool and complex numbers are not reduced, nor anything by and, or, xor."""
        return supports(verb, dtype, op)

    def identity(self) -> bytes:
        """Name a new group."""
        with self._meeting:
            self._check_not_refused(None)
            identity = f"group {len(self._groups)}".encode()
            self._groups[identity] = _Group(self, identity)
        return identity

    def connect(self, identity: bytes, rank: int, size: int, device: Device) -> FakeBackend:
        """Join a group and wait for its other ranks; fails for all of them if one cannot belong to the group."""
        with self._meeting:
            group = self._groups.get(identity)
            self._check_not_refused(group)
            if group is None or not isinstance(device, FakeDevice):
                raise TransportError(f"no fake group {identity!r} for {device!r}")
            try:
                group.join(rank, size, device)
            finally:
                # Also if it was refused: the others are waiting for it.
                self._meeting.notify_all()
            self._meeting.wait_for(lambda: group.is_full or group.refusal or self._refusal)
            if not group.is_full:
                self._check_not_refused(group)
            return group.backends[rank]

    # ---------------------------------------------------------------- faults

    def refuse(self, message: str) -> None:
        """Refuse all connections from now on, also those that wait for other ranks."""
        with self._meeting:
            self._refusal = message
            self._meeting.notify_all()

    def stop(self, who: int | FakeDevice) -> None:
        """Run no launch of this rank or device from now on: the others hang, until they abort."""
        with SCHEDULER.lock:
            self._stopped.add(who)

    def break_down(self, message: str) -> None:
        """Stop all work, with ``failure`` as the reason, as when a cable breaks."""
        with SCHEDULER.lock:
            self._breakage = message

    # ---------------------------------------------------------------- what tests ask

    @property
    def num_open(self) -> int:
        """Backends that have neither been closed nor aborted."""
        with SCHEDULER.lock:
            met = [group for group in self._groups.values() if group.is_full]
            return sum(backend.is_open for group in met for backend in group.backends.values())

    @property
    def breakage(self) -> str | None:
        """Reason why nothing runs any more."""
        return self._breakage

    def is_stuck(self, rank: int, device: FakeDevice) -> bool:
        """Whether launches there are stopped."""
        return self._breakage is not None or not self._stopped.isdisjoint((rank, device))

    def _check_not_refused(self, group: _Group | None) -> None:
        refusal = self._refusal or (group and group.refusal)
        if refusal:
            raise TransportError(refusal)


class _Group:
    """The ranks that met under one identity, and what they launched, by place."""

    def __init__(self, fabric: FakeFabric, identity: bytes) -> None:
        self.fabric = fabric
        self.identity = identity
        self.size = 0
        self.backends: dict[int, FakeBackend] = {}
        self.refusal: str | None = None
        self.wrong: str | None = None
        self._places: dict[int, dict[int, _Launch]] = {}

    @property
    def is_full(self) -> bool:
        return len(self.backends) == self.size

    def join(self, rank: int, size: int, device: FakeDevice) -> None:
        """Add a rank.

        Raises:
            TransportError: it cannot be of this group; those who wait for the others hear it, too.
        """
        self.size = self.size or size
        uuid = device.report.uuid
        if size != self.size or not 0 <= rank < size or rank in self.backends:
            self.refusal = f"rank {rank} of {size} came to a group of {self.size} that has {sorted(self.backends)}"
        elif any(one.device.report.uuid == uuid for one in self.backends.values()):
            self.refusal = f"rank {rank} came with the device of another: {uuid}"
        if self.refusal:
            raise TransportError(self.refusal)
        self.backends[rank] = FakeBackend(self, rank, device)

    def violation(self, said: str) -> TransportError:
        """Record a violation of the ranks, after which the group cannot be used any more."""
        self.wrong = f"{self.identity.decode()}: {said}"
        self.fabric.violations.append(self.wrong)
        return TransportError(self.wrong)

    def add(self, place: int, launch: _Launch) -> None:
        """Add a launch of a rank at a place; under the lock of the scheduler.

        Raises:
            TransportError: another rank has launched something else there.
        """
        self.fabric.launched.append((self.identity, launch.rank, launch.launched))
        here = self._places.setdefault(place, {})
        for other in here.values():
            if other.launched != launch.launched:
                raise self.violation(
                    f"at place {place} rank {other.rank} launched {other.launched}, "
                    f"rank {launch.rank} launched {launch.launched}"
                )
        here[launch.rank] = launch

    def meet(self, place: int) -> None:
        """Carry out the work at a place, if all have come to it; under the lock of the scheduler."""
        here = [launch for _, launch in sorted(self._places[place].items())]
        if self.wrong is not None or len(here) < self.size or not all(launch.can_run for launch in here):
            return
        for index in range(len(here[0].launched.sizes)):
            given = results(here[0].launched, [launch.inputs[index] for launch in here])
            for launch, result in zip(here, given, strict=True):
                launch.write(index, result)
        del self._places[place]
        for launch in here:
            launch.end()


class _Launch:
    """One collective of one rank, on its stream; an item of `kfcomm.testing.streams`."""

    def __init__(
        self, backend: FakeBackend, place: int, launched: FakeLaunch, parts: Sequence[Part], stream: FakeStream
    ) -> None:
        self.rank = backend.rank
        self.launched = launched
        self.inputs: list[Array] = []
        self.is_over = False
        self._backend = backend
        self._place = place
        self._stream = stream
        self._has_come = False
        # Not the arrays: it is for the caller to keep them.
        is_read = launched.verb is not Verb.BROADCAST or backend.rank == launched.root
        self._sources = [part.source.memory for part in parts] if is_read else []
        self._targets: list[Array] = [part.target.memory for part in parts if part.target is not None]
        self._uses = Uses(
            [part.source for part in parts if is_read], [part.target for part in parts if part.target is not None]
        )

    @property
    def can_run(self) -> bool:
        """Whether its stream has come to it, and it was not stopped since."""
        return self._has_come and not self.is_over and not self._is_stuck

    def attempt(self, stream: FakeStream) -> bool:
        """Carry out the collective, if all ranks have come to it."""
        if not (self.is_over or self._is_stuck or stream.error):
            if not self._has_come:
                self._come(stream)
            self._backend.group.meet(self._place)
        return self.is_over or stream.error is not None

    def write(self, index: int, result: Array | None) -> None:
        """The result of one part."""
        if result is not None:
            self._targets[index][:] = result

    def end(self) -> None:
        """Let its stream continue; under the lock."""
        self.is_over = True
        self.inputs, self._sources, self._targets = [], [], []
        self._backend.ended(self._place)
        self._stream.wake()

    @property
    def _is_stuck(self) -> bool:
        return self._backend.group.fabric.is_stuck(self.rank, self._backend.device)

    def _come(self, stream: FakeStream) -> None:
        """Enter the stream: copy the inputs, and poison the results until they are made."""
        self._has_come = True
        self._uses.happen(stream)
        nothing = np.empty(0, self.launched.dtype)
        self.inputs = [source.copy() for source in self._sources] or [nothing for _ in self.launched.sizes]
        for target in self._targets:
            poison(target)


class FakeBackend:
    """One rank's end of a group; implements `kfcomm.transports.base.CollectiveBackend`.

    Attributes:
        group: of all ranks.
        rank: in the group.
        device: of this rank.
        is_open: neither closed nor aborted.
        note: as tests set it.
    """

    def __init__(self, group: _Group, rank: int, device: FakeDevice) -> None:
        self.note = ""
        self.group = group
        self.rank = rank
        self.device = device
        self.is_open = True
        self._num_launched = 0
        self._under_way: dict[int, _Launch] = {}

    def launch(self, verb: Verb, parts: Sequence[Part], op: Op | None, root: int, stream: FakeStream) -> None:
        """Launch work on a stream, in the place after the latest one.

        Raises:
            TransportError: as there; a launch that breaks the rules is a violation, too.
        """
        with SCHEDULER.entered():
            self._check_usable()
            try:
                launched = self._checked(verb, parts, op, root)
                self._check_here(parts, stream)
            except Impossible as error:
                raise self.group.violation(f"rank {self.rank} launched {error}") from error
            place = self._num_launched
            launch = _Launch(self, place, launched, parts, stream)
            self.group.add(place, launch)
            self._num_launched += 1
            self._under_way[place] = launch
            stream.add(launch.attempt)

    def prepared(
        self, verb: Verb, sizes: tuple[int, int], dtype: np.dtype[Any], op: Op | None, root: int
    ) -> Launch | None:
        """Prepare a launch of one part; None for verbs that NCCL makes of several sends, as for its backend."""
        if not sizes[0] or verb in (Verb.GATHER, Verb.ALL_TO_ALL):
            return None

        def launch(source: FakeArray, target: FakeArray | None, stream: FakeStream) -> None:
            self.launch(verb, [Part(source, target)], op, root, stream)

        return launch

    def prepared_group(self, verb: Verb, sizes: Sequence[int], dtype: np.dtype[Any], op: Op | None) -> Launch | None:
        """Prepare a launch of several parts; None with parts without elements, as for NCCL."""
        if not all(sizes):
            return None

        def launch(sources: list[FakeArray], targets: list[FakeArray], stream: FakeStream) -> None:
            self.launch(verb, [Part(*part) for part in zip(sources, targets, strict=True)], op, -1, stream)

        return launch

    def ended(self, place: int) -> None:
        """Forget the n-th launch, which has ended or failed."""
        del self._under_way[place]

    def failure(self) -> str | None:
        """Reason why the group cannot be used any more; None while it can."""
        return self.group.fabric.breakage or self.group.wrong

    def abort(self) -> None:
        """End this rank's launches; those of the other ranks block until these abort, too."""
        with SCHEDULER.entered():
            self.is_open = False
            for launch in list(self._under_way.values()):
                launch.end()

    def close(self) -> None:
        """End this rank's part; a violation while launches of it are under way."""
        with SCHEDULER.lock:
            if self.is_open and self._under_way:
                left = [str(launch.launched) for launch in self._under_way.values()]
                self.group.violation(f"rank {self.rank} closed while it was at {', '.join(left)}")
            self.is_open = False

    def _check_usable(self) -> None:
        said = self.failure() or (None if self.is_open else f"rank {self.rank} has aborted or closed")
        if said is not None:
            raise TransportError(said)

    def _checked(self, verb: Verb, parts: Sequence[Part], op: Op | None, root: int) -> FakeLaunch:
        """Describe a launch that obeys the rules of `kfcomm.transports.base`; else raise `Impossible`."""
        size = self.group.size
        if not parts:
            raise Impossible(f"{verb} of no part")
        if (0 <= root < size) != (verb in ROOTED) or (root != -1 and verb not in ROOTED):
            raise Impossible(f"{verb} with root {root} in a group of {size}")
        dtype: np.dtype[Any] = parts[0].source.dtype
        if not supports(verb, dtype, op):
            raise Impossible(f"{verb} of {dtype} with op {op}, which is not supported")
        sizes = [num_elements(verb, part, dtype, self.rank == root, size) for part in parts]
        return FakeLaunch(verb, op, root, dtype, tuple(sizes))

    def _check_here(self, parts: Sequence[Part], stream: Any) -> None:
        if not isinstance(stream, FakeStream) or stream.device is not self.device:
            raise Impossible(f"on {stream!r}: expected a stream of {self.device}")
        for x in (x for part in parts for x in part if isinstance(x, FakeArray)):
            if x.device is not self.device:
                raise Impossible(f"with {x!r}, which is not on {self.device}")

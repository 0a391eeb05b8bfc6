"""Cached plans of names whose next use is launched where it is called; see ``launches`` for what becomes of a use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from types import NoneType
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

from kfcomm.arrays import overwritten
from kfcomm.arrays.kinds import kind_of
from kfcomm.collectives.compiled import NO_ARRAY, CompiledCall, CompiledUse
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.on_device import launches as in_flight
from kfcomm.collectives.on_device.calls import DeviceBuffers
from kfcomm.collectives.on_device.ordering import order_key
from kfcomm.collectives.slot_use import Over
from kfcomm.collectives.specs import SPECS, Arguments, Shape
from kfcomm.core.collective import Collective
from kfcomm.errors import TransportError
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.arrays.kinds import Repeat
    from kfcomm.collectives.compiled import Begun
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.on_device.calls import CallPlan, DeviceCall
    from kfcomm.collectives.on_device.launches import LaunchPath
    from kfcomm.collectives.on_device.verbs import DeviceVerbs
    from kfcomm.engine.operation import Operation
    from kfcomm.transports.base import Launch


class Launched:
    """A use that was launched, or whose launch was refused, in the place of an operation: over for its caller."""

    __slots__ = ("_error", "_value", "seq")

    is_over = True

    def __init__(self, seq: int, value: Any, error: BaseException | None = None) -> None:
        self.seq = seq
        self._value = value
        self._error = error

    def done(self) -> bool:
        """Whether its caller has the result."""
        return True

    def result(self) -> Any:
        """The caller's result.

        Raises:
            CollectiveError: its launch was refused.
        """
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> bool:
        """Return False: a launch cannot be taken back."""
        return False

    def give_up(self) -> None:
        """Do nothing: a launch cannot be taken back."""


class CompiledLaunch(CompiledCall):
    """Cached plan of a name with arrays on a device, on a path that launches whole collectives.

    Attributes:
        order_key: in the launch order.
        num_launched: uses that the device may not have passed, and that are no calls.
    """

    __slots__ = ("_backend", "_launch", "_path", "_repeat", "num_launched", "order_key")

    def __init__(
        self, group: Group, arguments: Arguments, plan: CallPlan, devices: DeviceVerbs, gets: Shape | None
    ) -> None:
        super().__init__(group, arguments, plan, devices, gets)
        self._path = cast("LaunchPath", plan.path)
        self._path.launches.settled = devices.settled
        self.order_key = order_key(plan.order.key, plan.plan.signature, plan.memo)
        self._repeat: Repeat
        self._launch: Launch
        self._backend: Any = NO_ARRAY  # of that launch; at first no backend is the same
        self.num_launched = 0
        kind = plan.order.kind
        self.nbytes = kind.dtype.itemsize * max(_size(kind.shape), _size(gets))  # of a batch ``gets`` is of one array

    @override
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Begun | None:
        if arguments != self._arguments:
            return None
        path = self._path
        try:
            if self._backend is not path.backend:
                self._prepare(x, path.backend)
            repeat = self._repeat
            stream, found = repeat.stream(), repeat.read(x, out)
        except Exception:  # noqa: BLE001  all checks find the same again, and tell the other ranks
            return None
        if found is None or stream is None or not path.takes(self):
            if found is None:  # the arrays of this name may be of another library now
                self._backend = NO_ARRAY
            return None
        key, engine = self.series.key, self.engine
        seq = key.next_seq
        key.next_seq = seq + 1
        posted_s = monotonic()
        try:
            self._launch(found[0], found[1], stream)
        except Exception as error:  # noqa: BLE001  of the device's libraries: it belongs to the call
            return self._refused(seq, posted_s, error, handle)
        launches = path.launches
        current = launches.current
        if current.stream != stream:
            current = launches.on(stream, repeat.owner)
        uses = current.uses
        is_first = not uses
        uses.append((self, seq, posted_s))
        if is_first:
            launches.begin()
        self.num_launched += 1
        key.begun = self
        value = found[2]
        if handle is None:
            # ``Over`` says that nothing of the engine has moved; a timer has, at first.
            return Launched(seq, value) if is_first else Over((value,))
        if len(uses) < in_flight.MAX_USES:
            handle.set_result(value)
        else:
            if current.asked == current.first:
                launches.watch()
            engine.reactor.call_soon(_resolve, handle, value)
        return Launched(seq, value)

    @override
    def use(self, x: Any, arguments: Arguments, out: Any) -> CompiledUse | None:
        return cast("CompiledUse", LaunchUse(self, x, arguments, out))

    def enter(self) -> None:
        """Make calls of its uses, which the router is asked about."""
        self._path.launches.enter_name(self)

    def entered(self, seq: int, posted_s: float) -> DeviceCall:
        """Make a call of a use."""
        done: Handle[Any] = Handle(loop=self.engine.loop)
        done.set_result(None)
        call = self._call(done)
        self.ended()
        call.enter(self.as_operation(seq, posted_s), is_enqueued=True)
        self._path.entered(call)
        return call

    def as_operation(self, seq: int, posted_s: float) -> Operation:
        """A view of a use as an operation."""
        operation: Operation = self.operation(self, None, NO_ARRAY, NO_ARRAY, None)
        stamp = self.group.plans.stamp
        operation.collective = collective = Collective(self.series, seq, stamp, operation)
        operation.posted_s = collective.heard_s = posted_s
        operation.due_s = posted_s + self.first_s
        return operation

    def _call(self, handle: Handle[Any]) -> DeviceCall:
        """A call without memory, which the caller's stream has."""
        device = self.devices.arrays.own_device()
        return self.devices.known(self._plan, DeviceBuffers(device, None, None, (), NoneType), handle)

    def ended(self) -> None:
        """Forget a use: the device has passed it, or it is a call."""
        self.num_launched -= 1
        if not self.num_launched and self.series.key.begun is self:
            self.series.key.begun = None

    def _refused(self, seq: int, posted_s: float, error: Exception, handle: Handle[Any] | None) -> Launched:
        """Fail a use on all ranks: its launch was refused."""
        made: Handle[Any] = Handle(loop=self.engine.loop) if handle is None else handle
        call = self._call(made)
        call.enter(self.as_operation(seq, posted_s), is_enqueued=False)
        self._path.launch_failed(call, error if isinstance(error, TransportError) else TransportError(str(error)))
        if handle is not None:
            return Launched(seq, None)
        looked_at(made)
        return Launched(seq, None, made.exception())

    def _prepare(self, x: Any, backend: Any) -> None:
        """Prepare for arrays like this one, with a launch of the present backend.

        Raises:
            Exception: that is not possible.
        """
        kind, devices = self._plan.order.kind, self.devices
        array = devices.arrays.read(x, None)
        if array.dtype != kind.dtype or array.shape != kind.shape:
            raise ValueError(x)
        make: Callable[..., Repeat | None] = cast("Any", kind_of(x)).repeat  # if its kind has it
        repeat = make(x, self._gets, devices.arrays.own_device(), in_place=SPECS[kind.verb].in_place)
        sizes = (_size(array.shape), _size(self._gets))
        launch = backend.prepared(kind.verb, sizes, array.dtype, kind.op, kind.root)
        if repeat is None or launch is None:
            raise ValueError(x)
        self._repeat, self._launch, self._backend = repeat, launch, backend


class BatchRepeat:
    """Mappings of arrays in repeated calls; implements `Repeat` with lists of places, in the order of the names."""

    def __init__(self, repeats: dict[str, Repeat]) -> None:
        self._repeats = list(repeats.items())
        self._one = self._repeats[0][1]
        self.stream, self.owner = self._one.stream, self._one.owner
        self._latest: tuple[Any, ...] = ((), (), (), (), ())

    def read(self, arrays: Any, out: Any) -> tuple[list[Any], list[Any], Any] | None:
        """Places of the inputs and of the results, and the results by name, as the arrays are ordered."""
        if out is not None:
            # The same arrays are mostly given again: then nothing but their places can have changed.
            names, given, outs, sources, targets = self._latest
            if self._are(names, arrays, given) and self._are(names, out, outs):
                one, inputs, results = self._one, [arrays[name] for name in names], [out[name] for name in names]
                if one.are_at(inputs, sources, written=False) and one.are_at(results, targets, written=True):
                    return sources, targets, out
        if len(arrays) != len(self._repeats) or (out is not None and len(out) != len(self._repeats)):
            return None
        sources, targets, values = [], [], {}
        for name, repeat in self._repeats:
            found = repeat.read(arrays[name], None if out is None else out[name])
            if found is None:
                return None
            source, target, values[name] = found
            sources.append(source)
            targets.append(target)
        if out is None:
            return sources, targets, {name: values[name] for name in arrays}
        repeats = [repeat for _, repeat in self._repeats]
        spans = [one.spans(source, target) for one, source, target in zip(repeats, sources, targets, strict=True)]
        if overwritten(*zip(*spans, strict=True)):
            return None
        names = [name for name, _ in self._repeats]
        given, outs = ([ref(some[name]) for name in names] for some in (arrays, out))
        self._latest = (names, given, outs, sources, targets)
        return sources, targets, out

    @staticmethod
    def _are(names: Sequence[str], arrays: Any, latest: Sequence[Any]) -> bool:
        """Whether a mapping holds the arrays that it held then."""
        if len(arrays) != len(latest) or not latest:
            return False
        return all(arrays[name] is one() for name, one in zip(names, latest, strict=True))


class CompiledBatch(CompiledLaunch):
    """Cached plan of a name of ``all_reduce_many`` whose arrays are all of one dtype: one launch."""

    __slots__ = ()

    @override
    def _prepare(self, x: Any, backend: Any) -> None:
        from kfcomm.collectives.units import digest_of

        order, devices = self._plan.order, self.devices
        names = sorted(x)
        arrays = [devices.arrays.read(x[name], None) for name in names]
        if digest_of(names, arrays) != order.counts:
            raise ValueError(x)
        device = devices.arrays.own_device()
        repeats: dict[str, Repeat | None] = {
            name: cast("Any", kind_of(x[name])).repeat(x[name], array.shape, device, in_place=True)
            for name, array in zip(names, arrays, strict=True)
        }
        kind = order.kind
        launch = backend.prepared_group(kind.verb, [_size(array.shape) for array in arrays], kind.dtype, kind.op)
        if launch is None or None in repeats.values():
            raise ValueError(x)
        self._repeat, self._launch, self._backend = cast("Repeat", BatchRepeat(cast("Any", repeats))), launch, backend


class LaunchUse:
    """Cached plan together with arrays, for the starts of a persistent collective."""

    __slots__ = ("_given", "_name")

    def __init__(self, name: CompiledLaunch, x: Any, arguments: Arguments, out: Any) -> None:
        self._name = name
        self._given = x, arguments, out

    def start(self, handle: Handle[Any] | None) -> Begun | None:
        """Begin a use; return None, with nothing begun, if anything is unusual."""
        return self._name.start(*self._given, handle)


def _size(shape: Shape | None) -> int:
    size = 1
    for length in shape or ():
        size *= length
    return 0 if shape is None else size


def _resolve(handle: Handle[Any], value: Any) -> None:
    if not handle.done():
        handle.set_result(value)

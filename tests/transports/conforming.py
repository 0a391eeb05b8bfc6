"""One suite for every `BackendMaker`: all verbs, on memory of whatever devices, beside plain NumPy.

Written against `Device` and `BackendMaker` alone, so that it runs over the fake with several ranks in one thread, and
over a real backend with those ranks that this process has devices for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from kfcomm.arrays.devices import Device, Flat, Stream
from kfcomm.transports.base import BackendMaker, CollectiveBackend, Part
from kfcomm.types import Op, Verb
from tests.conformance.oracle import ALLOWED, DTYPES, data, dtype_called

Array = np.ndarray[Any, np.dtype[Any]]

REDUCING = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.REDUCE_SCATTER)
MOVING = (Verb.BROADCAST, Verb.ALL_GATHER, Verb.GATHER, Verb.ALL_TO_ALL)
ROOTED = (Verb.REDUCE, Verb.BROADCAST, Verb.GATHER)
IN_PLACE = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.BROADCAST)
SIZES = ((0,), (1,), (7,), (1000,), (5, 0, 3))
"""Elements of the parts of a launch."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a group."""

    device: Device
    backend: CollectiveBackend
    stream: Stream

    def put(self, x: Array) -> Flat:
        """A copy on the device."""
        flat = self.device.empty(x.size, x.dtype, self.stream)
        self.device.put(x, flat, self.stream)
        return flat

    def get(self, flat: Flat) -> Array:
        """A copy on the host."""
        x = np.empty(flat.size, flat.dtype)
        self.device.fetch(flat, x, self.stream)
        self.finish()
        return x

    def finish(self) -> None:
        """Wait for the stream."""
        done, errors = threading.Event(), list[BaseException | None]()

        def told(error: BaseException | None) -> None:
            errors.append(error)
            done.set()

        self.device.notify(self.stream, told)
        done.wait()
        assert errors == [None]


@contextmanager
def group(maker: BackendMaker, devices: Sequence[Device]) -> Iterator[list[Rank]]:
    """A rank for each device; closed at the end."""
    ranks = connected(maker, devices)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.backend.close()


def connected(maker: BackendMaker, devices: Sequence[Device]) -> list[Rank]:
    """A rank for each device."""
    identity = maker.identity()
    with ThreadPoolExecutor(len(devices)) as pool:
        backends = [
            pool.submit(maker.connect, identity, rank, len(devices), device) for rank, device in enumerate(devices)
        ]
    return [Rank(device, one.result(), device.stream()) for device, one in zip(devices, backends, strict=True)]


def supported(maker: BackendMaker, verb: Verb) -> list[tuple[str, Op | None]]:
    """The dtypes and ops with which a maker says that it can do this, of those that the library lets through."""
    if verb in MOVING:
        return [(name, None) for name in DTYPES if maker.supports(verb, dtype_called(name), None)]
    cases = [(name, Op(op)) for name in DTYPES for op in ALLOWED[name]]
    return [(name, op) for name, op in cases if maker.supports(verb, dtype_called(name), op)]


def check(
    ranks: Sequence[Rank], verb: Verb, name: str, op: Op | None, all_sizes: Sequence[Sequence[int]] = SIZES
) -> None:
    """One verb with one dtype and one op: all sizes, the first and last as root, in place where that is allowed."""
    roots = {0, len(ranks) - 1} if verb in ROOTED else {-1}
    for sizes in all_sizes:
        for root in roots:
            for in_place in (False, True) if verb in IN_PLACE else (False,):
                _check_one(ranks, verb, name, op, root, sizes, in_place=in_place)


def _check_one(
    ranks: Sequence[Rank], verb: Verb, name: str, op: Op | None, root: int, sizes: Sequence[int], *, in_place: bool
) -> None:
    num = len(ranks)
    many = num if verb in (Verb.REDUCE_SCATTER, Verb.ALL_TO_ALL) else 1
    inputs = [[data(name, count * many, 100 * at + rank) for at, count in enumerate(sizes)] for rank in range(num)]
    launches = [_parts(rank, verb, index, root, num, inputs[index], in_place) for index, rank in enumerate(ranks)]
    for rank, parts in zip(ranks, launches, strict=True):
        if len(parts) > 1 or not _launch_prepared(rank, verb, parts[0], op, root):
            rank.backend.launch(verb, parts, op, root, rank.stream)
    for at in range(len(sizes)):
        wanted = expected(verb, op, root, [one[at] for one in inputs])
        for index, rank in enumerate(ranks):
            part = launches[index][at]
            where = f"{verb} {op} of {name}, sizes {sizes}, root {root}, in place: {in_place}, on rank {index}"
            if part.target is not None:
                compare(rank.get(part.target), wanted[index], op, where)
            if part.target is not part.source:
                assert rank.get(part.source).tobytes() == inputs[index][at].tobytes(), where
        assert [rank.backend.failure() for rank in ranks] == [None] * num


def _launch_prepared(rank: Rank, verb: Verb, part: Part, op: Op | None, root: int) -> bool:
    """Launch one part as repeated calls do; False if the backend cannot prepare it."""
    source, target = part
    sizes = source.size, 0 if target is None else target.size
    launch = rank.backend.prepared(verb, sizes, source.dtype, op, root)
    if launch is None:
        return False
    launch(_place(source), _place(target), getattr(rank.stream, "ptr", rank.stream))
    return True


def _place(flat: Flat | None) -> Any:
    """Flat memory as prepared launches take it: an address, or a fake array itself."""
    if flat is None or not hasattr(flat, "data"):
        return flat
    return flat.data.ptr


def _parts(
    rank: Rank, verb: Verb, index: int, root: int, num: int, inputs: Sequence[Array], in_place: bool
) -> list[Part]:
    parts = []
    for x in inputs:
        source = rank.put(x)
        target: Flat | None = None
        if in_place and (verb is not Verb.REDUCE or index == root):
            target = source
        elif verb not in (Verb.REDUCE, Verb.GATHER) or index == root:
            count = x.size // num if verb is Verb.REDUCE_SCATTER else x.size
            count *= num if verb in (Verb.ALL_GATHER, Verb.GATHER) else 1
            target = rank.device.empty(count, x.dtype, rank.stream)
        parts.append(Part(source, target))
    return parts


def expected(verb: Verb, op: Op | None, root: int, inputs: Sequence[Array]) -> list[Array]:
    """The results of all ranks, flat."""
    num = len(inputs)
    match verb:
        case Verb.BROADCAST:
            return [inputs[root]] * num
        case Verb.ALL_GATHER | Verb.GATHER:
            return [np.concatenate(inputs)] * num
        case Verb.ALL_TO_ALL:
            return [np.concatenate([np.split(x, num)[rank] for x in inputs]) for rank in range(num)]
        case Verb.REDUCE_SCATTER:
            return np.split(_folded(op, inputs), num)
    return [_folded(op, inputs)] * num


def _folded(op: Op | None, inputs: Sequence[Array]) -> Array:
    """In the widest type there is: no order of folding is prescribed."""
    kind = inputs[0].dtype.kind
    wide: Any = inputs[0].dtype if kind in "biu" else np.complex128 if kind == "c" else np.float64
    folds: dict[Op | None, Any] = {
        Op.PROD: np.multiply, Op.MIN: np.minimum, Op.MAX: np.maximum,
        Op.AND: np.bitwise_and, Op.OR: np.bitwise_or, Op.XOR: np.bitwise_xor,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        total = reduce(folds.get(op, np.add), [x.astype(wide) for x in inputs])
        return total / len(inputs) if op is Op.AVG else total


def compare(got: Array, wanted: Array, op: Op | None, where: str) -> None:
    """Fail if a result is wrong, in as many digits as its dtype has."""
    if op is None:
        assert got.tobytes() == wanted.tobytes(), where
    elif got.dtype.kind in "biu":
        assert np.array_equal(got, wanted), where
    else:
        digits = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-5, "complex64": 1e-5}.get(got.dtype.name, 1e-12)
        precise: Any = np.complex128 if got.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(got.astype(precise), wanted, rtol=digits, atol=digits, err_msg=where)

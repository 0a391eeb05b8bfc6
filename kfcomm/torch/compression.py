"""Compression of gradients: kinds by name, for all parameters or by patterns of names; and buckets that compress."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from kfcomm.common.arguments import hint
from kfcomm.compression import Averaging, PowerSGD, TopK
from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import Bucket, share_out
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.sync import Communicator

WIRE_DTYPES = ("float16", "bfloat16")
MAKERS: dict[str, Any] = {"powersgd": PowerSGD, "topk": TopK}
KINDS = (*WIRE_DTYPES, *MAKERS)


class Compressor(Protocol):
    """Averages gradients in fewer bytes: ``PowerSGD``, ``TopK``, or a class of the program."""

    def average(self, comm: Averaging, gradients: Mapping[str, Any], *, name: str) -> dict[str, Any]:
        """Return an approximation of the mean of all ranks' gradients; see ``kfcomm.compression``."""


@dataclass(frozen=True)
class Compression:
    """How gradients travel in fewer bytes.

    ======== =========================================================== ==============================================
    kind     what travels, of a gradient g of n × m numbers              source
    ======== =========================================================== ==============================================
    float16  every number as float16; sums are made in float32           ``wire_dtype``; torch's fp16_compress_hook
    bfloat16 every number as bfloat16; sums are made in float32          ``wire_dtype``; torch's bf16_compress_hook
    topk     of g + e the ``share`` of largest numbers, and their places Lin et al., ICLR 2018, arXiv:1712.01887
    powersgd P = M·orth(Q) and Q = Mᵀ·orth(P) of M = g + e: (n + m)·rank Vogels et al., NeurIPS 2019, arXiv:1905.13727
    ======== =========================================================== ==============================================

    e is the error of the step before (error feedback): e' = g + e − its compressed form.

    Args:
        kind: one of these.
        begin_after: number of first steps, in which gradients change most, that exchange them uncompressed.
        options: of ``kfcomm.compression.PowerSGD`` (``rank``, ``min_rate``) or ``TopK`` (``share``).

    Raises:
        ConfigError: the kind is unknown, or has no such option.
    """

    kind: str
    begin_after: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, kind: str, *, begin_after: int = 0, **options: Any) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "begin_after", begin_after)
        object.__setattr__(self, "options", options)
        if kind not in KINDS:
            raise ConfigError(f"compression {kind!r} is not known; known are {', '.join(KINDS)}{hint(kind, KINDS)}")
        self.made("")

    @property
    def wire_dtype(self) -> str | None:
        """The wire dtype of kinds that only round; None for others."""
        return self.kind if self.kind in WIRE_DTYPES else None

    def made(self, name: str) -> Compressor | None:
        """A compressor with its own state for gradients of this name, the same on all ranks; None if only rounded.

        Raises:
            ConfigError: it has no such option.
        """
        maker = MAKERS.get(self.kind)
        if maker is None and not self.options:
            return None
        seed = {"seed": zlib.crc32(name.encode())} if maker is PowerSGD else {}
        try:
            if maker is None:
                raise TypeError(f"it takes no options, got {', '.join(self.options)}")
            found: Compressor = maker(**seed | self.options)
        except TypeError as error:
            raise ConfigError(f"compression {self.kind!r}: {error}") from None
        return found


Given: TypeAlias = "str | Compression | Mapping[str, str | Compression | None] | None"
"""One kind for all parameters, or kinds by patterns of names (``fnmatch``), where the first match holds."""


def of(given: str | Compression | None) -> Compression | None:
    """The compression of this name, or the given one."""
    return Compression(given) if isinstance(given, str) else given


def by_parameter(given: Given, names: Iterable[str]) -> dict[str, Compression | None]:
    """The compression of each parameter's gradient.

    Raises:
        ConfigError: a kind is unknown, or a pattern matches no name.
    """
    if not isinstance(given, Mapping):
        one = of(given)
        return dict.fromkeys(names, one)
    patterns = {pattern: of(value) for pattern, value in given.items()}
    found = {name: next((one for one in patterns if fnmatchcase(name, one)), None) for name in names}
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in found)]
    if unused:
        near = hint(unused[0], found)
        raise ConfigError(
            f"compression for {unused[0]!r}: no parameter has such a name; there are {list(found)[:8]}{near}"
        )
    return {name: None if pattern is None else patterns[pattern] for name, pattern in found.items()}


Named = tuple[str, torch.Tensor]
COMPRESSED = (torch.float16, torch.float32, torch.float64)


class CompressedBucket(Bucket):
    """Some gradients of one dtype, averaged by a compressor of their own on a thread of their own.

    So buckets may begin in another order on each rank, as all buckets may.

    Args:
        comm: averages them.
        parameters: with their names.
        name: of the collectives.
        compressor: with a state for these gradients.
        begin_after: number of first steps that average them uncompressed.

    Raises:
        ConfigError: NumPy cannot calculate with this dtype.
    """

    def __init__(
        self, comm: Communicator, parameters: Sequence[Named], name: str, compressor: Compressor, begin_after: int
    ) -> None:
        dtype = parameters[0][1].dtype
        if dtype not in COMPRESSED:
            raise ConfigError(f"{parameters[0][0]} is of {dtype}: float16, float32 and float64 can be compressed")
        super().__init__(comm, parameters, name)
        self._compressor = compressor
        self._left = begin_after
        self._averaging: AverageThread | None = None

    @override
    def begin(self, urgency: int) -> None:
        if self._left > 0:
            self._left -= 1
            super().begin(urgency)
            return
        for place in self.places:
            place.collect()
        # A compressor makes several blocking calls, which the backward pass must not wait for.
        self._averaging = AverageThread(self)
        self._averaging.start()
        self.is_begun = True

    @override
    def done(self) -> bool:
        return super().done() if self._averaging is None else not self._averaging.is_alive()

    @override
    def wait(self) -> None:
        if self._averaging is None:
            super().wait()
            return
        self._averaging.join()
        if self._averaging.error is not None:
            raise self._averaging.error

    @override
    def reset(self) -> None:
        super().reset()
        self._averaging = None

    def average(self) -> None:
        """Replace the gradients by the approximation of their mean."""
        views = {place.name: place.view.numpy() for place in self.places}  # torch does not count writes to these
        for name, found in self._compressor.average(self._comm, views, name=self.name).items():
            views[name][...] = found


class AverageThread(threading.Thread):
    """Thread that averages one bucket.

    Attributes:
        error: why it failed.
    """

    def __init__(self, bucket: CompressedBucket) -> None:
        super().__init__(name=f"kfcomm {bucket.name}", daemon=True)
        self._bucket = bucket
        self.error: BaseException | None = None

    @override
    def run(self) -> None:
        try:
            self._bucket.average()
        except BaseException as error:  # noqa: BLE001  ``CompressedBucket.wait`` raises it
            self.error = error


def share_out_by(
    compression: Mapping[str, Compression | None], parameters: Sequence[Named], nbytes: int
) -> list[list[Named]]:
    """Groups of ``share_out`` within each compression, ordered by the first gradient of each."""
    # A list, since a compression with options in a dict cannot be hashed.
    kinds: list[Compression | None] = []
    for name, _ in parameters:
        if compression[name] not in kinds:
            kinds.append(compression[name])
    parts = [share_out([one for one in parameters if compression[one[0]] == kind], nbytes) for kind in kinds]
    places = {name: place for place, (name, _) in enumerate(parameters)}
    return sorted((part for group in parts for part in group), key=lambda part: places[part[0][0]])


def bucket_of(
    comm: Communicator, parameters: Sequence[Named], name: str, compression: Compression | None, wire_dtype: Any
) -> Bucket:
    """The bucket of gradients that are compressed alike."""
    compressor = None if compression is None else compression.made(name)
    if compression is None or compressor is None:
        wire = wire_dtype if compression is None else compression.wire_dtype
        return Bucket(comm, parameters, name, wire_dtype=wire)
    return CompressedBucket(comm, parameters, name, compressor, compression.begin_after)

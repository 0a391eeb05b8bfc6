"""Which gradients travel in fewer bytes, and how: by a name, for a model or for parameters whose names match."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from kfcomm.common.spelling import hint
from kfcomm.compression import PowerSGD, TopK
from kfcomm.compression.feedback import Averaging
from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import Bucket, share_out

if TYPE_CHECKING:
    from kfcomm.sync import Communicator

WIRE_DTYPES = ("float16", "bfloat16")
MAKERS: dict[str, Any] = {"powersgd": PowerSGD, "topk": TopK}
KINDS = (*WIRE_DTYPES, *MAKERS)


class Compressor(Protocol):
    """Averages gradients in fewer bytes than they have: ``PowerSGD``, ``TopK``, or one of the program's own."""

    def average(self, comm: Averaging, gradients: Mapping[str, Any], *, name: str) -> dict[str, Any]:
        """What stands for the mean of all ranks' gradients; see ``kfcomm.compression``."""


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

    e is what was left out in the step before (error feedback): e' = g + e − what stood for it.

    Args:
        kind: one of these.
        begin_after: so many steps exchange the gradients as they are, while these change most; 0 for none.
        options: of ``kfcomm.compression.PowerSGD`` (``rank``, ``min_rate``) or ``TopK`` (``share``).

    Raises:
        ConfigError: there is no such kind, or it has no such option.
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
        """The dtype on the wire, if that is all."""
        return self.kind if self.kind in WIRE_DTYPES else None

    def made(self, name: str) -> Compressor | None:
        """One with a state of its own, for the gradients of this name, alike on all ranks; None if none is needed.

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
"""For all parameters, or by patterns of names (``fnmatch``), of which the first that matches holds."""


def of(given: str | Compression | None) -> Compression | None:
    """By its name, or as it is."""
    return Compression(given) if isinstance(given, str) else given


def by_parameter(given: Given, names: Iterable[str]) -> dict[str, Compression | None]:
    """How the gradient of each parameter travels.

    Raises:
        ConfigError: a kind is not known, or a pattern matches none of the names.
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
        begin_after: so many steps average them as they are.

    Raises:
        ConfigError: NumPy calculates with no numbers of this dtype.
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
        self._errand: Errand | None = None

    def begin(self, urgency: int) -> None:
        """See ``Bucket``."""
        if self._left > 0:
            self._left -= 1
            super().begin(urgency)
            return
        for place in self.places:
            place.collect()
        self._errand = Errand(self)
        self._errand.start()
        self.is_begun = True

    def done(self) -> bool:
        """See ``Bucket``."""
        return super().done() if self._errand is None else not self._errand.is_alive()

    def wait(self) -> None:
        """See ``Bucket``."""
        if self._errand is None:
            super().wait()
            return
        self._errand.join()
        if self._errand.error is not None:
            raise self._errand.error

    def reset(self) -> None:
        """See ``Bucket``."""
        super().reset()
        self._errand = None

    def average(self) -> None:
        """Make the gradients what stands for their mean."""
        views = {place.name: place.view.numpy() for place in self.places}  # writes to these count as nobody's
        for name, found in self._compressor.average(self._comm, views, name=self.name).items():
            views[name][...] = found


class Errand(threading.Thread):
    """The average of a bucket under way.

    Attributes:
        error: why it failed.
    """

    def __init__(self, bucket: CompressedBucket) -> None:
        super().__init__(name=f"kfcomm {bucket.name}", daemon=True)
        self._bucket = bucket
        self.error: BaseException | None = None

    def run(self) -> None:
        """See ``Thread``."""
        try:
            self._bucket.average()
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            self.error = error


def share_out_by(
    compression: Mapping[str, Compression | None], parameters: Sequence[Named], nbytes: int
) -> list[list[Named]]:
    """As ``share_out``, of those that are compressed alike, in the order in which each bucket's first comes."""
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

"""Buckets of an attached model whose gradients travel in fewer bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import Bucket, share_out
from kfcomm.torch.compression import Compression, Compressor

if TYPE_CHECKING:
    from kfcomm.sync import Communicator

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

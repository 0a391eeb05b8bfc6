"""Communication hook of ``DistributedDataParallel`` that compresses gradients, for process groups of backend kfcomm.

DDP calls a hook with each bucket when its gradients are complete, in the same order on all ranks, and takes a future.
A compression of several exchanges runs on a thread of the state, bucket by bucket, while the backward pass continues.
"""

# DDP looks for types in a hook's annotations: they may not be postponed here.
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from kfcomm.collectives.group import IN_ORDER
from kfcomm.common.arguments import checked_name
from kfcomm.errors import KfcommError
from kfcomm.torch.backend import Backend
from kfcomm.torch.compression import Compression, Compressor
from kfcomm.torch.errors import as_torch
from kfcomm.torch.registration import backend_of
from kfcomm.torch.tensors import place
from kfcomm.torch.work import Ending, Work


class CompressionState:
    """The state of `compression_hook` for one model.

    ::

        model = DistributedDataParallel(net)
        state = kfcomm.torch.CompressionState("powersgd", rank=2, begin_after=100)
        model.register_comm_hook(state, kfcomm.torch.compression_hook)

    Args:
        compression: a kind, see ``Compression``; or a compressor of ``kfcomm.compression``.
        group: the process group of the model; None for the default one.
        name: of the model; models that are trained at the same time need different names.
        begin_after: see ``Compression``. DDP forms new buckets after the first step; compression errors are kept by
            parameter, so that none is lost then.
        options: see ``Compression``.

    Raises:
        ConfigError: the kind or an option is unknown, or the group is not one of backend kfcomm.
    """

    def __init__(
        self, compression: str | Compressor, *, group: Any = None, name: str = "ddp", begin_after: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self.wire_dtype: str | None = None
        self.compressor: Compressor | None
        name = checked_name(name)
        if isinstance(compression, str):
            chosen = Compression(compression, **options)
            self.wire_dtype, self.compressor = chosen.wire_dtype, chosen.made(name)
        else:
            self.compressor = compression
        self.name = name
        self.backend: Backend = backend_of(group)
        self._left = begin_after
        self._names: dict[torch.Tensor, str] = {}
        self._thread = ThreadPoolExecutor(1, "kfcomm-hook")

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter: its place in the order of DDP, which is the same on all ranks."""
        return self._names.setdefault(parameter, str(len(self._names)))

    def begin(self, bucket: Any) -> Any:
        """Average the gradients of a bucket; a future of its buffer."""
        is_whole = self._left > 0
        if is_whole and bucket.is_last():
            self._left -= 1
        if is_whole or self.compressor is None:
            return self._exchanged(bucket.buffer(), None if is_whole else self.wire_dtype)
        parameters = zip(bucket.parameters(), bucket.gradients(), strict=True)
        views = {self.name_of(parameter): gradient.detach() for parameter, gradient in parameters}
        begun: Any = torch.futures.Future()
        # what a callback raises reaches the backward pass; an error set from Python would end the process
        found = begun.then(partial(self._averaged, self.compressor, views, bucket.buffer()))
        self._thread.submit(begun.set_result, None)
        return found

    def _exchanged(self, buffer: Any, wire_dtype: str | None) -> Any:
        array, finish = place(buffer)
        name = f"{IN_ORDER}{self.name}: a bucket of {buffer.numel()} {str(buffer.dtype).removeprefix('torch.')}"
        handle = self.backend.communicator.all_reduce_async(array, name, op="avg", out=array, wire_dtype=wire_dtype)
        work = Work(handle, Ending([buffer], finish, self.backend._completers))
        return work.get_future().then(lambda done: done.value()[0])

    def _averaged(self, compressor: Compressor, views: dict[str, Any], buffer: Any, _: Any) -> Any:
        try:
            found = compressor.average(self.backend.communicator, views, name=self.name)
        except KfcommError as error:
            raise as_torch(error) from None
        for name, view in views.items():
            view.copy_(torch.from_numpy(found[name]))
        return buffer


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``DistributedDataParallel.register_comm_hook``; see ``CompressionState``.

    Args:
        state: of the model.
        bucket: its gradients.

    Returns:
        A future of the bucket's buffer, which holds the averages.
    """
    found: torch.futures.Future[torch.Tensor] = state.begin(bucket)
    return found

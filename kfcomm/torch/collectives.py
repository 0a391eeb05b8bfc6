"""The collectives of ``torch.distributed``, each as one of kfcomm's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from kfcomm.errors import ConfigError, KfcommError
from kfcomm.sync.communicator import Communicator
from kfcomm.torch.c10d import NOTHING, Ending, TorchWork, add_up_sparse, as_torch, meaning_of, sparse_parts, whole_mean
from kfcomm.torch.compiling import uncompiled_methods
from kfcomm.torch.ddp import BucketWork, SharedBuffers, is_bucket
from kfcomm.torch.fsdp import allocate_for_caller, count_of
from kfcomm.torch.kept_works import PLAIN, is_async
from kfcomm.torch.naming import TorchCall, TorchCalls, next_name
from kfcomm.torch.tensors import place, places, read, together
from kfcomm.types import Op

UNSET = timedelta(0)
"""A timeout that is not above this means the group's."""


@uncompiled_methods
class Collectives:
    """The collectives of one process group; torch calls them, with lists of tensors and a record of options."""

    _comm: Communicator
    _calls: TorchCalls
    _completers: ThreadPoolExecutor
    _buffers: SharedBuffers | None
    _reported: Reported
    _reported_twice: Reported

    # ---------------------------------------------------------------- the same shape on all ranks

    def allreduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        """Implement ``dist.all_reduce``."""
        (tensor,) = tensors
        if tensor.layout is torch.sparse_coo:
            return self.allreduce_sparse(tensors, opts)
        buffers = None
        with self._reported:
            op, factor = meaning_of(opts.reduceOp, tensor.dtype)
            x, finish = place(tensor)
            source = x if factor is None else read(tensor * factor)
            if op is Op.AVG:
                op, finish = whole_mean(op, finish, tensor, self._comm.size)
            # The result stays in shared memory until the work is waited for, so it may need no other step.
            if is_async(opts) and tensor.is_cpu and finish is None and is_bucket(tensor):
                buffers = self._buffers
            own = None if buffers is None or factor is not None else buffers.own(tensor)
            buffer = buffers.filled(source) if buffers is not None and own is None else own
        if buffers is None:
            return self._run("all_reduce", source, opts, tensors, finish, op=op, out=x)
        # A reducer's bucket, in shared memory; see ``ddp``.
        options: dict[str, Any] = {"op": op, "shared": True}
        name, call = self._named("all_reduce", buffer, opts, options)
        handle = self._comm.all_reduce_async(buffer, name, **options)
        if call is not None:
            call.handle = weakref.ref(handle)
        if own is None:
            buffers.lend(buffer, handle)
        return BucketWork(handle, Ending(tensors, None, self._completers))

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any) -> Any:
        """Implement ``dist.all_reduce_coalesced``: all tensors together, in few messages."""
        with self._reported:
            op, factor = meaning_of(opts.reduceOp, tensors[0].dtype)
            xs, finish = places(tensors)
            sources = xs if factor is None else [read(tensor * factor) for tensor in tensors]
        return self._run("all_reduce", sources, opts, tensors, finish, op=op, out=xs)

    def allreduce_sparse(self, tensors: Sequence[Any], opts: Any) -> Any:
        """Implement ``dist.all_reduce``: the indices and values of all ranks are gathered, and added up on each."""
        (tensor,) = tensors
        with self._reported_twice:
            indices, values = sparse_parts(tensor, opts.reduceOp)
        # Ranks differ in their numbers of entries, which `all_gather` with ``concat`` allows.
        found: dict[str, Any] = {}
        also = AllgatherOptions()
        also.timeout = opts.timeout
        first = self._run("all_gather", indices, also, (), concat=True, take=partial(found.__setitem__, "indices"))

        def finish() -> None:
            first.wait()
            add_up_sparse(tensor, **found)

        take = partial(found.__setitem__, "values")
        return self._run("all_gather", values, opts, tensors, finish, concat=True, take=take)

    def reduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        """Implement ``dist.reduce``."""
        (tensor,) = tensors
        root = opts.rootRank
        with self._reported:
            op, factor = meaning_of(opts.reduceOp, tensor.dtype)
            x, finish = place(tensor)
            source = x if factor is None else read(tensor * factor)
        # torch leaves the tensors of other ranks as they are, so only the root gives ``out``.
        if root != self._comm.rank:
            return self._run("reduce", source, opts, tensors, root=root, op=op)
        return self._run("reduce", source, opts, tensors, finish, root=root, op=op, out=x)

    def broadcast(self, tensors: Sequence[Any], opts: Any) -> Any:
        """Implement ``dist.broadcast``."""
        (tensor,) = tensors
        with self._reported:
            # As bytes wherever nothing is folded: so tensors of any dtype travel.
            x, finish = place(tensor, as_bytes=True)
        return self._run("broadcast", x, opts, tensors, finish, root=opts.rootRank, out=x)

    def barrier(self, opts: Any) -> Any:
        """Implement ``dist.barrier``."""
        return self._run("barrier", None, opts, ())

    # ---------------------------------------------------------------- gather

    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = PLAIN) -> Any:
        """Implement ``dist.all_gather``."""
        (into,), (tensor,) = outputs, inputs
        with self._reported:
            outs, finish = places(into, as_bytes=True)
            x = read(tensor, as_bytes=True)
        return self._run("all_gather", x, opts, [into], finish, out=outs)

    def all_gather_single(self, output: Any, source: Any, opts: Any) -> Any:
        """Implement ``dist.all_gather_into_tensor``."""
        with self._reported:
            (out, finish), x = _rows(output, self._comm.size), read(source, as_bytes=True)
        if self._buffers is not None:
            allocate_for_caller(self.allocate_tensor)
        return self._run("all_gather", x, opts, [output], finish, out=out)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = PLAIN) -> Any:
        """Implement ``dist.all_gather_coalesced``: ``outputs[r][i]`` is what rank r gave as ``inputs[i]``."""
        with self._reported:
            xs = [read(one, as_bytes=True) for one in inputs]
            made = [torch.empty((self._comm.size, *one.shape), dtype=one.dtype) for one in inputs]
            outs = [_rows(whole, self._comm.size)[0] for whole in made]

        def finish() -> None:
            for rank, row in enumerate(outputs):
                for target, whole in zip(row, made, strict=True):
                    target.detach().copy_(whole[rank].view(target.shape))

        return self._run("all_gather", xs, opts, list(outputs), finish, out=outs)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        """Several of ``all_gather_single``, in few messages."""
        with self._reported:
            found = [_rows(output, self._comm.size) for output in outputs]
            xs = [read(one, as_bytes=True) for one in inputs]
        finish = together(step for _, step in found)
        return self._run("all_gather", xs, opts, outputs, finish, out=[out for out, _ in found])

    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        """Implement ``dist.gather``."""
        (tensor,), root = inputs, opts.rootRank
        with self._reported:
            x = read(tensor, as_bytes=True)
            into = outputs[0] if root == self._comm.rank else []
            outs, finish = places(into, as_bytes=True)
        return self._run("gather", x, opts, [into], finish, root=root, out=outs or None)

    def gather_single(self, output: Any, source: Any, opts: Any) -> Any:
        """Rank ``opts.rootRank`` gets the tensors of all ranks, one after the other."""
        with self._reported:
            x = read(source, as_bytes=True)
            out, finish = _rows(output, self._comm.size) if opts.rootRank == self._comm.rank else (None, None)
        return self._run("gather", x, opts, [output], finish, root=opts.rootRank, out=out)

    # ---------------------------------------------------------------- scatter

    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> Any:
        """Implement ``dist.scatter``."""
        (tensor,), root = outputs, opts.rootRank
        with self._reported_twice:
            out, finish = place(tensor, as_bytes=True)
            parts = None
            if root == self._comm.rank:
                (given,) = inputs
                parts = [read(one, as_bytes=True) for one in given]
        return self._run("scatter", parts, opts, outputs, finish, root=root, out=out)

    def reduce_scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> Any:
        """Implement ``dist.reduce_scatter``."""
        (tensor,), (given,) = outputs, inputs
        with self._reported:
            op, factor = meaning_of(opts.reduceOp, tensor.dtype)
            out, finish = place(tensor)
            xs = [read(one if factor is None else one * factor) for one in given]
        return self._run("reduce_scatter", xs, opts, outputs, finish, op=op, out=out)

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any) -> Any:
        """Implement ``dist.reduce_scatter_tensor``."""
        with self._reported:
            op, factor = meaning_of(opts.reduceOp, output.dtype)
            out, finish = place(output)
            x = read(source if factor is None else source * factor)
        # Equal parts in the order of the ranks, whatever the tensor's shape.
        rows = x.reshape(self._comm.size, -1)
        if self._buffers is not None:
            allocate_for_caller(self.allocate_tensor)
        return self._run("reduce_scatter", rows, opts, [output], finish, op=op, out=out.reshape(1, -1))

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        """Several of ``reduce_scatter_single``, at once."""
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return Several(works) if is_async(opts) and works else NOTHING

    # ---------------------------------------------------------------- all to all

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        """Implement ``dist.all_to_all``."""
        with self._reported_twice:
            outs, finish = places(outputs, as_bytes=True)
            xs = [read(one, as_bytes=True) for one in inputs]
        return self._run("all_to_all", xs, opts, outputs, finish, out=outs)

    def all_to_all_single(
        self, output: Any, source: Any, output_rows: Sequence[int], input_rows: Sequence[int], opts: Any
    ) -> Any:
        """Implement ``dist.all_to_all_single``."""
        size = self._comm.size
        with self._reported_twice if output_rows or input_rows else self._reported:
            (out, finish), x = place(output, as_bytes=True), read(source, as_bytes=True)
            if not output_rows and not input_rows:
                count = _count(x)
                if count % size:
                    raise ConfigError(f"all_to_all_single shares {count} elements evenly among {size} ranks")
                shape = (size, count // size)
                x, out = x.reshape(shape), out.reshape(shape)
            else:
                x, out = _cut(x, source, input_rows, size), _cut(out, output, output_rows, size)
        return self._run("all_to_all", x, opts, [output], finish, out=out)

    # ---------------------------------------------------------------- shared by them

    def allocate_tensor(self, size: int | Sequence[int], *, dtype: Any, device: Any) -> Any:
        """Allocate a flat tensor: for others to read where it is, if it is long and on the CPU; see ``fsdp``."""
        count, buffers = count_of(size), self._buffers
        if buffers is None or torch.device(device).type != "cpu":
            return torch.empty(count, dtype=dtype, device=device)
        return buffers.tensor(count, dtype)

    def _run(
        self, verb: str, x: Any, opts: Any, gives: Sequence[Any], finish: Callable[[], object] | None = None, *,
        take: Callable[[Any], object] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Call a verb of the communicator, blocking or not as torch's ``opts`` say; ``gives`` is its future's value."""
        # When the result has arrived, ``take`` is called with it, and then ``finish``.
        options["name"], call = self._named(verb, x, opts, options)
        if verb != "barrier":
            options["x"] = x
        if is_async(opts):
            handle = getattr(self._comm, f"{verb}_async")(**options)
            if call is not None:
                call.handle = weakref.ref(handle)
            if take is not None:
                finish = partial(_taken, handle, take, finish)
            return TorchWork(handle, Ending(gives, finish, self._completers))
        try:
            result = getattr(self._comm, verb)(**options)
        except KfcommError as error:
            raise as_torch(error) from None
        finally:
            if call is not None:
                self._calls.end(call)
        if take is not None:
            take(result)
        if finish is not None:
            finish()
        return NOTHING

    def _named(self, verb: str, x: Any, opts: Any, options: dict[str, Any]) -> tuple[str, TorchCall | None]:
        """The name of a call that is made now, and the record of one without a name; sets its timeout."""
        timeout = opts.timeout
        if timeout > UNSET:
            options["timeout"] = timeout
        name = next_name()
        if name is not None:
            return name, None
        call = self._calls.begin(verb, x, options)
        return call.name, call


class Reported:
    """Block that prepares a call: an error in it also fails this call on the other ranks, which would else wait.

    ``steps``: of the call, see ``Communicator.refuse``.
    """

    __slots__ = ("_calls", "_comm", "_steps")

    def __init__(self, calls: TorchCalls, comm: Communicator, steps: int = 1) -> None:
        self._calls = calls
        self._comm = comm
        self._steps = steps

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            name = next_name()
            if name is None:
                self._calls.refused(error)
            else:
                self._comm.refuse(name, error, steps=self._steps)
            if isinstance(error, KfcommError):
                as_torch(error)


@uncompiled_methods
class Several(TorchWork):
    """Several works that are waited for together."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        *self._before, last = works
        super().__init__(last._handle, last._ending._replace(tensors=[one._ending.tensors[0] for one in works]))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        for work in self._before:
            work.wait(timeout)
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Whether all are complete."""
        return super().is_completed() and all(work.is_completed() for work in self._before)


def _rows(output: Any, size: int) -> tuple[Any, Callable[[], object] | None]:
    """The place of a result with one row for each rank."""
    array, finish = place(output, as_bytes=True)
    return array.reshape(size, -1), finish


def _taken(handle: Any, take: Callable[[Any], object], finish: Callable[[], object] | None) -> None:
    take(handle.wait())
    if finish is not None:
        finish()


def _cut(array: Any, tensor: Any, rows: Sequence[int], size: int) -> list[Any]:
    """The parts of a flat array: so many rows of the tensor for each rank, equally many without ``rows``."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if length % size:
            raise ConfigError(f"{length} rows cannot be shared evenly among {size} ranks")
        rows = [length // size] * size
    if len(rows) != size or sum(rows) != length:
        raise ConfigError(f"the split sizes {list(rows)} are not those of {size} ranks that make {length} rows")
    width = _count(array) // length if length else 0
    parts, at = [], 0
    for count in rows:
        parts.append(array[at : at + count * width])
        at += count * width
    return parts


def _count(array: Any) -> int:
    """Number of elements of an array, or of a tensor on a device."""
    return int(array.numel() if isinstance(array, torch.Tensor) else array.size)

"""Horovod's elastic training: a function that begins again, from the last commit, when ranks are lost or join.

::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            for number, batch in enumerate(loader):  # through state.sampler
                ...
                state.sampler.record_batch(number, batch_size)
                if number % 100 == 0:
                    state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=hvd.elastic.ElasticSampler(dataset))
    train(state)

Ranks join and leave in ``commit`` and ``check_host_updates`` only; these are the *points* of a state, which each rank
counts. When a rank is lost, each other one returns to its last commit. Some may have made one more than others by then:
a rank with the highest point sends its state to all. So all continue from one state, which none has left.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import wraps
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch.utils.data

from kfcomm.elastic.snapshots import Form, Kept
from kfcomm.elastic.state import State, difference, outline_of, plan_of
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError, KfcommError, PeerLost
from kfcomm.horovod.world import communicator, rank, shutdown, size
from kfcomm.torch.reductions import is_elastic

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "TorchState", "run"]


class HostsUpdatedInterrupt(KfcommError):
    """Ranks have joined or left: the function that is below ``run`` begins again, with its state as it is."""


class TorchState(State):
    """State of training, which all ranks share: a model, an optimizer, and more by name, as attributes.

    Args:
        model: or None.
        optimizer: or None; may be one of ``DistributedOptimizer``.
        values: what ``kfcomm.elastic.State`` takes: further objects with ``state_dict`` (models, optimizers, learning
            rate schedulers, an `ElasticSampler`), tensors and arrays, numbers, text, and containers of these. Other
            attributes may be set later; these are not shared.

    Raises:
        ConfigError: a value is of another kind.

    Cost: a copy in host memory.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)
        self._callbacks: list[Callable[[], object]] = []
        self._point = 0
        self._saved = Kept(self)  # at the point that is its ``place``
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_values", ()):
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these when ranks have joined, left or been lost, before the state is shared."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the callbacks."""
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, and let ranks join and leave; all ranks call it, at one place in their steps.

        Raises:
            HostsUpdatedInterrupt: ranks have joined or left.
            SystemExit: the job does without this rank from now on; its communicator is closed.
            ConfigError: a value cannot be sent to other ranks.

        Cost: a copy of the state to host memory; in an elastic job a broadcast of a small object.
        """
        self._point += 1
        self.save()
        self._look()

    def check_host_updates(self) -> None:
        """Let ranks join and leave, as ``commit`` does, without saving the state."""
        self._point += 1
        self._look()

    def save(self) -> None:
        """Save the state in memory."""
        self._saved.keep(self._point)

    def restore(self) -> None:
        """Return to the state that was saved last."""
        self._saved.restore()
        self._point = self._saved.place

    def sync(self) -> None:
        """Save and load the state of the rank with the highest point, on all ranks.

        Raises:
            ConfigError: this rank's state has other names, shapes or dtypes.
        """
        comm = communicator()
        points = comm.all_gather_object(self._point, "horovod/points")
        point = max(points)
        root = points.index(point)
        if comm.rank == root:
            self._saved.keep(point + 1)
        form = Form(*comm.broadcast_object(self._saved.form if comm.rank == root else None, root, "horovod/form"))
        if comm.rank == root:
            arrays = self._saved.arrays
        else:  # in new memory: a rank that fails here has its last commit still
            self._check_fits(form, root)
            arrays = [np.empty(nbytes, np.uint8).view(dtype) for nbytes, dtype in form.sizes()]
        if arrays:
            parts = [one.view(np.uint8) for one in arrays]
            comm.broadcast(parts, root, "horovod/arrays", out=parts)
        self._saved.take(form, arrays, point + 1)
        self.restore()

    def _check_fits(self, form: Form, root: int) -> None:
        here, there = outline_of(self)[0], form.outline[0]
        problem = difference(plan_of(self), form.plan, f"rank {root}")
        if here != there:
            problem = f"this rank's state has {', '.join(here)}, that of rank {root} {', '.join(there)}"
        if problem is not None:
            raise ConfigError(problem)

    def _look(self) -> None:
        comm: Any = communicator()
        if not is_elastic(comm):
            return
        epoch = comm.epoch
        if not comm.follow_requests():
            shutdown()
            raise SystemExit(0)
        if comm.epoch != epoch:
            raise HostsUpdatedInterrupt(f"epoch {comm.epoch} has begun with ranks {comm.births}")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a state elastic: it begins again when ranks have joined, left or been lost.

    Before it begins, all ranks get one state. When a rank is lost, all return to the last commit. The result is
    returned when all ranks are done. In a job that is not elastic (``kfcomm run`` without ``--elastic``) a lost rank is
    an error.

    Raises:
        PeerLost, CollectiveAborted: a collective has failed, and no rank is lost; or the job is not elastic.
        SystemExit: see ``TorchState.commit``.
    """

    @wraps(func)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        has_changed = False
        while True:
            try:
                if has_changed:
                    state.on_reset()
                state.sync()
                result = func(state, *args, **kwargs)
                if _are_done():
                    return result
                while not _leave_lost():
                    pass
                state.restore()
            except HostsUpdatedInterrupt:
                pass
            except (PeerLost, CollectiveAborted):
                if not _leave_lost():
                    raise
                state.restore()
            has_changed = True

    return wrapper


def _are_done() -> bool:
    """Whether all ranks are done; False if one has met a loss. A rank that left alone could not return with these."""
    comm: Any = communicator()
    try:
        return not is_elastic(comm) or bool(comm.agree(True))
    except CollectiveMismatch:
        return False


def _leave_lost() -> bool:
    """Continue with the surviving ranks; False if all survive, or ranks cannot change."""
    comm: Any = communicator()
    births = comm.births
    while is_elastic(comm):
        with suppress(CollectiveMismatch):  # others are done, and have not heard of the loss
            comm.shrink()
            return bool(comm.births != births)
    return False


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """Order of a rank's samples in an epoch; after a change of the ranks only unused samples are given.

    Put it into the `TorchState`, call ``record_batch`` after each batch, and ``set_epoch`` at the end of each epoch.

    Args:
        dataset: of constant length.
        shuffle: a new order for each epoch.
        seed: of these orders; the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        processed_num: number of samples of the epoch that all ranks together have used.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample of it is used. Call it at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has used a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position, with the ranks that there are."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are left to the ranks that there are."""
        self.rank, self.num_replicas = rank(), size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # All ranks get as many: the first samples come again.
        return islice(cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples

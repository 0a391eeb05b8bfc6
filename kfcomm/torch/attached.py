"""Data-parallel training whose gradients travel while the program computes, backward and forward.

What happens in a step of an attached model::

    backward pass     each gradient goes to its place as it comes; a bucket that is full leaves, by name
    optimizer.step()  buckets that are there are taken by the optimizer now, the others stay under way
    forward pass      a module waits for the gradients of its own parameters, and the optimizer takes these

Names make this possible: nobody has to wait in one order. Gradients that the next forward pass needs first overtake
those that it needs later, on every link (ByteScheduler, SOSP 2019; P3, SysML 2019; PACE, INFOCOM 2020). Nothing is cut
for that: links choose the next chunk by urgency, however large the call is that it belongs to.

Invariants: each bucket is averaged once a step, on every rank; memory that travels is not written to; what the
optimizer does is what it would have done at once, with the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from kfcomm.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.sync import Communicator
from kfcomm.torch.buckets import Bucket, Marks, Place
from kfcomm.torch.compressed import bucket_of, share_out_by
from kfcomm.torch.compression import Given, by_parameter
from kfcomm.torch.needs import Needs
from kfcomm.torch.profile import Profile
from kfcomm.torch.state import broadcast_parameters
from kfcomm.torch.updates import Updates

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

BUCKET_NBYTES = 4 << 20
MAX_URGENCY = 1 << 12


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, *, name: str = "grad",
    defer: bool = True, bucket_nbytes: int = BUCKET_NBYTES, wire_dtype: Any = None, compression: Given = None,
) -> Attached:  # fmt: skip
    """Average the gradients of a model over all ranks from now on, by hooks; the training loop stays as it is.

    Every rank calls it, with the same model. Parameters and buffers become those of rank 0.

    Args:
        model: in host memory. Its gradients are those of the parameters that ``optimizer`` has.
        optimizer: one whose step for a parameter needs its own gradient and state only, and no closure.
        comm: blocking, of ``kfcomm.sync``.
        name: of the collectives; another one for each model that is attached to one communicator.
        defer: parameters whose gradients are under way at ``optimizer.step()`` are updated later, when a module that
            has them is called. False: ``optimizer.step()`` waits for all, for programs in which something else reads
            parameters.
        bucket_nbytes: gradients smaller than this travel together up to so many bytes; larger ones by themselves.
        wire_dtype: see ``Communicator.all_reduce``.
        compression: a kind by name, or a ``Compression`` with options, for all gradients; or by patterns of parameters'
            names, of which the first that matches holds: ``{"*.bias": None, "*": "powersgd"}``.

    Returns:
        What is attached, until ``detach`` is called. See there for what reads gradients or parameters by itself:
        clipping, checkpoints, and micro-batches.

    Raises:
        ConfigError: on all ranks, if their models differ; or the optimizer has nothing of the model, or more; or a
            compression is not known, or for names that no parameter has.

    Cost:
        Memory for one gradient of each parameter; a broadcast of the model. In a step 2(n−1)/n times the bytes of the
        gradients, a byte for each, and a copy of those that share a bucket within the rank's own memory. A gradient
        alone is read where autograd has made it: with 16 MiB and two ranks on one host the exchange took 0.75 of the
        time that it takes with a copy before it.
    """
    if not isinstance(comm, Communicator):
        raise ConfigError(f"attach needs a communicator of kfcomm.sync, not a {type(comm).__name__}")
    name = checked_name(name)
    parameters = _parameters(model, optimizer)
    chosen = by_parameter(compression, [one for one, _ in parameters])
    about = [f"{one} {tuple(parameter.shape)} {parameter.dtype} {chosen[one]}" for one, parameter in parameters]
    if not comm.consensus([*about, bucket_nbytes, str(wire_dtype)], name=f"{name}/model"):
        raise ConfigError(
            f"the ranks do not attach the same model as {name!r}: names, shapes, dtypes or compressions differ"
        )
    broadcast_parameters(model.state_dict(), comm, name=f"{name}/state")
    shared = share_out_by(chosen, parameters[::-1], bucket_nbytes)
    buckets = [bucket_of(comm, part, _title(name, part), chosen[part[0][0]], wire_dtype) for part in shared]
    return Attached(model, optimizer, buckets, Marks(comm, buckets, f"{name}/marks"), Profile(comm, name), defer=defer)


class Attached:
    """A model whose gradients are averaged, made by `attach`.

    ::

        attached = kfcomm.torch.attach(model, optimizer, comm)
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    ``optimizer.step()`` uses the gradients up: ``parameter.grad`` is None then, unless ``wait`` was called before, or
    updates are not deferred.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], marks: Marks,
        profile: Profile, *, defer: bool,
    ) -> None:  # fmt: skip
        self._buckets = buckets
        self._marks = marks
        self._profile = profile
        self._defers = defer
        self._updates = Updates(optimizer)
        self._optimizer = optimizer
        of = {place.parameter: bucket for bucket in buckets for place in bucket.places}
        self._parameters = frozenset(of)
        self._needs = Needs(model, of)
        self._pending: dict[Bucket, None] = {}
        """What the optimizer was asked to take, and has not: the most urgent first."""
        self._syncs = True
        self._is_marked = False
        """The marks of this step have left."""
        self._is_averaged = False
        """All gradients of this step are averaged, and the program may have read and changed them."""
        self._hooks: list[RemovableHandle] = [optimizer.register_step_pre_hook(self._before_step)]
        self._hooks += [one.register_forward_pre_hook(self._before_forward) for one in self._needs.modules(model)]
        self._hooks += [one.register_state_dict_pre_hook(self._before_state) for one in (model, optimizer)]
        for bucket in buckets:
            for place in bucket.places:
                hook = partial(self._accumulated, bucket, place)
                self._hooks.append(place.parameter.register_post_accumulate_grad_hook(hook))

    def __repr__(self) -> str:
        return f"<Attached, {len(self._parameters)} parameters in {len(self._buckets)} buckets>"

    # ---------------------------------------------------------------- for the program

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here exchange nothing: for all micro-batches of a step but the last.

        ::

            with attached.no_sync():
                loss_of(model(first)).backward()
            loss_of(model(second)).backward()
            optimizer.step()
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def wait(self) -> None:
        """Wait for all that is under way, so that the program may read and write gradients and parameters itself.

        After ``backward()``: every ``parameter.grad`` is the average, for clipping, scaling or a look at norms. After
        ``optimizer.step()``: every parameter is updated, for code that is no module of the model. ``state_dict()`` of
        the model and of the optimizer wait for updates by themselves. Between ``backward()`` and ``step()`` every rank
        calls it, or none.

        Raises:
            CollectiveError: an average has failed, as where a peer has died.
            ConfigError: gradients were changed while they were under way.
        """
        self._finish_all()
        if any(place.has_come for bucket in self._buckets for place in bucket.places):
            self._average()

    def detach(self) -> None:
        """Remove all hooks, after what is under way. The gradients are the program's own again."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __deepcopy__(self, _: Any) -> Self:
        """A copy of the model has its hooks, too, and they do nothing there."""
        return self

    # ---------------------------------------------------------------- backward

    def _accumulated(self, bucket: Bucket, place: Place, parameter: torch.Tensor) -> None:
        """A gradient is there, or more of it."""
        if bucket in self._pending:  # of a forward pass that was made before the latest step
            self._finish(bucket)
        if place.has_come:
            raise ConfigError(
                f"the gradient of {place.name} has come twice in a step: "
                "put all backward passes of a step but the last into attached.no_sync()"
            )
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of {place.name} is sparse: only dense ones can be averaged here")
        if not self._syncs:
            place.collect()
            return
        self._profile.came()
        if bucket.came(place):
            self._begin(bucket)

    def _begin(self, bucket: Bucket) -> None:
        bucket.begin(self._urgency(bucket))
        self._profile.began(bucket)
        self._begin_marks()

    def _begin_marks(self) -> None:
        """When all of this step has left; and nothing of the one before needs its marks any more."""
        if not self._is_marked and not self._pending and all(one.is_begun for one in self._buckets):
            self._marks.begin()
            self._is_marked = True

    def _urgency(self, bucket: Bucket) -> int:
        """Of a bucket, larger the earlier a forward pass needs it; the backward pass brings the last first."""
        for place, one in enumerate((*self._needs.order, *reversed(self._buckets))):
            if one is bucket:
                return max(1, MAX_URGENCY - place)
        return 1

    def _begin_all(self) -> None:
        """What has not left yet leaves: with zeros where this rank has no gradient."""
        for bucket in self._buckets:
            if not bucket.is_begun:
                self._begin(bucket)
            elif bucket.was_touched():
                raise ConfigError(
                    f"gradients of {bucket.name} were changed while they were averaged: "
                    "call attached.wait() before gradients are clipped, scaled or zeroed"
                )
        self._begin_marks()

    def _average(self) -> None:
        """Wait for all averages, and show them as ``parameter.grad``."""
        if self._is_averaged:
            return
        self._begin_all()
        self._wait_for(self._marks)
        for bucket in self._buckets:
            self._wait_for(bucket)
            for place in bucket.averaged():
                place.parameter.grad = place.view
        self._is_averaged = True

    # ---------------------------------------------------------------- the optimizer's step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            raise ConfigError("an attached optimizer takes no closure: gradients are averaged once a step")
        found = {one for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
        if not found <= self._parameters:
            raise ConfigError("the optimizer has got parameters since it was attached: detach, and attach again")
        self._finish_all()
        if not self._defers:
            self._average()
        if self._is_averaged:  # then the optimizer takes all of it now
            self._is_averaged = False
            for bucket in self._buckets:
                bucket.reset()
        else:
            self._take_over()
        self._is_marked = False
        self._profile.stepped()

    def _take_over(self) -> None:
        """Leave nothing to the step that the program has called: the optimizer takes each bucket when it is there."""
        self._begin_all()
        self._updates.ask()
        for bucket in self._buckets:
            for place in bucket.places:
                place.parameter.grad = None
        self._pending = dict.fromkeys((*self._needs.order, *reversed(self._buckets)))
        for bucket in list(self._pending):
            is_there = bucket.done() and self._marks.done()
            if bucket in self._pending and (is_there or not self._needs.is_reached(bucket)):
                self._finish(bucket)

    def _finish(self, bucket: Bucket) -> None:
        """The optimizer takes a bucket, when it is there; while that takes time, what else is there already."""
        self._wait_for(self._marks)
        if not bucket.done():
            for other in [one for one in self._pending if one is not bucket and one.done()]:
                self._take(other)
        self._wait_for(bucket)
        self._take(bucket)

    def _take(self, bucket: Bucket) -> None:
        bucket.wait()
        del self._pending[bucket]
        bucket.reset()
        self._updates.do(bucket.averaged())

    def _wait_for(self, one: Bucket | Marks) -> None:
        if one.done():
            one.wait()
            return
        with self._profile.waiting(one.name):
            one.wait()

    def _finish_all(self) -> None:
        for bucket in list(self._pending):
            if bucket in self._pending:
                self._finish(bucket)

    # ---------------------------------------------------------------- forward

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        needed = self._needs.of(module)
        if self._pending:
            for bucket in needed:
                if bucket in self._pending:
                    self._finish(bucket)

    def _before_state(self, *_: Any) -> None:
        self._finish_all()


def _parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Those of the optimizer that get gradients, with their names, in the order of the model.

    Raises:
        ConfigError: see `attach`.
    """
    wanted = {one for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter in wanted]
    if not found:
        raise ConfigError("the optimizer has no parameter of the model that gets a gradient")
    if len(found) < len(wanted):
        raise ConfigError(f"{len(wanted) - len(found)} parameters of the optimizer are not the model's")
    elsewhere = next((name for name, parameter in found if parameter.device.type != "cpu"), None)
    if elsewhere is not None:
        raise ConfigError(f"parameter {elsewhere} is not in host memory: attach is for models on the CPU")
    return found


def _title(name: str, part: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Of a bucket, for people who look at what hangs or takes long."""
    first = f"{name}/{part[0][0]}"
    return first if len(part) == 1 else f"{first} and {len(part) - 1} more"

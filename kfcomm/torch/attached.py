"""Data-parallel training with gradients that are averaged while the program computes.

A step of an attached model::

    backward pass     each gradient goes to its place as it comes; a full bucket is sent, under its own name
    its end           missing gradients are sent as zeros; ``backward()`` returns when all averages have arrived
    optimizer.step()  applies the averages, which are the same on all ranks

So the program may do with gradients and parameters what it likes, and gets the result of one process with the whole
batch. With deferred updates (see `deferred`) neither the end of the backward pass nor the optimizer's step waits.

Invariants: each gradient is averaged once, on every rank; memory under way is not written to; a step applies only
gradients that were averaged.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.sync import Communicator
from kfcomm.sync.driver import before_close
from kfcomm.torch.buckets import Bucket, BucketPlace, Named, dtype_problem, share_out
from kfcomm.torch.compression import Given, GradientAverage, by_parameter
from kfcomm.torch.deferred import Deferred
from kfcomm.torch.exchange import GradientExchange
from kfcomm.torch.state import broadcast_parameters, check_alike, described
from kfcomm.torch.steps import Passes, hook_steps, mean_loss
from kfcomm.torch.tensors import read

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

BUCKET_NBYTES = 4 << 20


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, *, name: str = "grad",
    defer: bool = False, bucket_nbytes: int = BUCKET_NBYTES, wire_dtype: Any = None, compression: Given = None,
) -> Attached:  # fmt: skip
    """Average the gradients of a model over all ranks from now on, by hooks; the training loop stays as it is.

    Every rank calls it, with the same model. Parameters and buffers, those with ``persistent=False`` too, become those
    of rank 0. Buffers become rank 0's again at the end of each backward pass that exchanges gradients.

    Args:
        model: in host memory. Its gradients are those of the parameters that ``optimizer`` has.
        optimizer: one of torch's, or one like these, with the same state on every rank.
        comm: blocking, of ``kfcomm.sync``.
        name: of the collectives; another one for each model that is attached to one communicator.
        defer: False: when ``backward()`` returns, every ``parameter.grad`` is the average. True: gradients are under
            way until the program reads them, and a parameter is updated when the program uses it after
            ``optimizer.step()``. The numbers are the same, and more of the communication is hidden. An average that
            fails raises where it is used. Call ``wait()`` before uses that torch does not see: of a tensor or NumPy
            array made earlier that shares memory with a parameter, of ``optimizer.state``, or by code that is not
            Python (TorchScript, an extension). Only optimizers whose ``step`` is torch's own, without a closure, are
            deferred; others update at once.
        bucket_nbytes: gradients smaller than this travel together up to so many bytes; larger ones by themselves.
        wire_dtype: see ``Communicator.all_reduce``.
        compression: a kind by name, or a ``Compression`` with options, for all gradients; or by patterns of parameters'
            names, where the first match holds: ``{"*.bias": None, "*": "powersgd"}``.

    Returns:
        The attachment, which lasts until ``detach`` is called.

    Raises:
        ConfigError: on all ranks, naming the difference and the ranks: their models, optimizers or options differ; or
            one of them cannot be attached: the optimizer's parameters are not those of the model; a parameter is not in
            host memory; a compression is unknown, or for names that no parameter has.

    Cost:
        Memory for one gradient of each parameter, and for another of each that has a bucket to itself; a broadcast of
        the model. In a backward pass 2(n−1)/n times the bytes of the gradients, a byte for each, a broadcast of the
        buffers if there are any, and a copy of gradients that share a bucket within the rank's own memory.
    """
    if not isinstance(comm, Communicator):
        raise ConfigError(f"attach needs a communicator of kfcomm.sync, not a {type(comm).__name__}")
    name = checked_name(name)
    about: dict[str, str] = {"bucket_nbytes": str(bucket_nbytes), "wire_dtype": str(wire_dtype), "defer": str(defer)}
    problem, shared = None, list[list[Named]]()
    try:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        parameters = parameters_of(model, optimizer)
        chosen = by_parameter(compression, [one for one, _ in parameters])
        about |= {f"compression of {one}": str(kind) for one, kind in chosen.items() if kind is not None}
        # A backward pass makes gradients in about the reverse order of the model.
        shared = share_out(parameters[::-1], bucket_nbytes, chosen)
        about |= described(tensors)[0] | described_optimizer(optimizer, {one: own for own, one in parameters})
    except Exception as error:  # noqa: BLE001  any error is reported to the other ranks
        problem = str(error)
    # Before the broadcast, to which unlike models would give unlike tensors.
    check_alike(comm, name, about, problem)
    broadcast_parameters(tensors, comm, name=f"{name}/state")
    buckets = []
    for part in shared:
        of_part = title(name, part)
        kind = chosen[part[0][0]]
        begin_after = 0 if kind is None else kind.begin_after
        average = GradientAverage(of_part, kind, wire_dtype=wire_dtype, begin_after=begin_after)
        buckets.append(Bucket(comm, part, of_part, average))
    return Attached(comm, optimizer, GradientExchange(comm, name, buckets, model), defer=defer)


class Attached:
    """A model whose gradients are averaged, made by `attach`.

    ::

        attached = kfcomm.torch.attach(model, optimizer, comm)
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    A backward pass that raises on one rank makes ``backward()`` of the others raise ``CollectiveAborted``; no rank has
    gradients then, and all may continue with the next pass. An error before the first gradient of a pass is not
    noticed: the others wait for the next pass of that rank.
    """

    def __init__(
        self, comm: Communicator, optimizer: torch.optim.Optimizer, exchange: GradientExchange, *, defer: bool
    ) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._passes = Passes(self._leave, self._end_of_pass, exchange.fail)
        self._parameters = frozenset(place.parameter for place in exchange.places)
        self._deferred = Deferred(optimizer, exchange) if defer else None
        self._comm = comm
        self._syncs = True
        self._is_averaged = False
        """Whether a pass has been averaged since the latest step."""
        self._hooks: list[RemovableHandle] = [hook_steps(optimizer, self._before_step, self._around_step)]
        if self._deferred is not None:
            self._hooks += self._deferred.hooks(self._hooks[0])
        for bucket in exchange.buckets:
            for place in bucket.places:
                hook = partial(self._accumulated, bucket, place)
                self._hooks.append(place.parameter.register_post_accumulate_grad_hook(hook))
        before_close(comm, self._finish)

    def __repr__(self) -> str:
        return f"<Attached, {len(self._parameters)} parameters in {len(self._exchange.buckets)} buckets>"

    # ---------------------------------------------------------------- for the program

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange nothing in backward passes of this block: for all micro-batches of a step but the last.

        ::

            with attached.no_sync():
                loss_of(model(first)).backward()
            loss_of(model(second)).backward()
            optimizer.step()

        The last pass averages the sum. Without it the result is the same, with an exchange for each pass.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def wait(self) -> None:
        """Wait until nothing is under way, and every ``parameter.grad`` is the average, on all ranks.

        It also averages what passes in ``no_sync`` have accumulated, and gradients that the program has assigned to
        ``parameter.grad``; then every rank has to call it. With ``defer=True`` all parameters are updated.

        Raises:
            CollectiveError: an average has failed, as where a peer has died, or the backward pass of another rank has.
        """
        self._finish()
        if any(place.has_come or place.is_foreign for place in self._exchange.places):
            self._leave()
            self._exchange.settle()

    def detach(self) -> None:
        """Wait, and remove all hooks. Gradients are no longer averaged."""
        try:
            self.wait()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    # ---------------------------------------------------------------- backward

    def _accumulated(self, bucket: Bucket, place: BucketPlace, parameter: torch.Tensor) -> None:
        """Take a gradient that autograd has made, or added to."""
        is_inner = self._syncs and self._passes.join()
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of {place.name} is sparse: only dense ones can be averaged here")
        if self._exchange.has_left:  # of an earlier pass: its memory is needed
            self._finish()
        place.has_come = True
        if self._syncs:
            self._exchange.came(bucket, place, is_inner=is_inner)

    def _end_of_pass(self) -> None:
        if self._deferred is None:
            self._exchange.settle()
        else:
            self._deferred.cover()

    def _leave(self) -> None:
        self._is_averaged = True
        try:
            self._exchange.leave()
        except BaseException:
            self._exchange.clear()
            raise

    def _finish(self) -> None:
        """Wait for everything that was deferred or is under way."""
        if self._deferred is not None:
            self._deferred.finish()
            self._deferred.show()
        self._exchange.drain()

    # ---------------------------------------------------------------- the optimizer's step

    def _before_step(self) -> None:
        self._begin_step()
        if self._deferred is None or not self._deferred.take():
            self._finish()
            self._check()
        self._is_averaged = False
        self._exchange.steps.made(self._optimizer)

    def _around_step(self) -> Callable[[Any], Any]:
        self._begin_step()
        self._finish()
        self._exchange.steps.made(self._optimizer)

        def settled(loss: Any) -> Any:
            self._finish()
            self._check()
            return mean_loss(self._comm, loss, f"{self._exchange.name}/loss")

        return settled

    def _begin_step(self) -> None:
        found = {one for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad}
        if not found <= self._parameters:
            raise ConfigError("the optimizer has got parameters since it was attached: detach, and attach again")
        self._exchange.profile.stepped()

    def _check(self) -> None:
        """Refuse gradients that are not averages."""
        for place in self._exchange.places:
            if place.has_come and place.parameter.grad is not None:
                raise ConfigError(
                    f"the gradient of {place.name} was gathered in no_sync and not averaged: make the last backward "
                    "pass of a step outside of it, or call attached.wait() on all ranks"
                )
            if not self._is_averaged and place.is_foreign:
                raise ConfigError(
                    f"the program has put a gradient of {place.name} into parameter.grad itself, which is not "
                    "averaged: call attached.wait() on all ranks before it is used"
                )


def parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Named]:
    """Parameters of the optimizer that get gradients, with their names, in the order of the model."""
    wanted = {one for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter in wanted]
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"parameter {name} is not in host memory: attach is for models on the CPU, not on "
                f"{parameter.device.type!r}"
            )
    if not found:
        raise ConfigError("the optimizer has no parameter of the model that gets a gradient")
    if len(found) < len(wanted):
        raise ConfigError(f"{len(wanted) - len(found)} parameters of the optimizer are not the model's")
    for name, parameter in found:
        if (problem := dtype_problem(parameter)) is not None:
            raise ConfigError(f"the gradient of {name} cannot be averaged: {problem}")
    return found


def described_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, str]:
    """Description of an optimizer for comparison: its class, the options of its groups, its state of each parameter."""
    said = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        own = {key: _described(value) for key, value in group.items() if key != "params"}
        own["params"] = ", ".join(names.get(one, "another") for one in group["params"])
        said[f"group {number} of the optimizer"] = str(own)
    for parameter, name in names.items():
        state = optimizer.state.get(parameter)
        if state:
            said[f"the optimizer's state of {name}"] = str({key: _described(value) for key, value in state.items()})
    return said


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.numel() < 2:
        return repr(value.tolist())
    if value.device.type != "cpu":
        return f"{tuple(value.shape)}"
    return f"{tuple(value.shape)}, checksum {zlib.crc32(read(value, as_bytes=True).view('uint8')):08x}"


def title(name: str, part: Sequence[Named]) -> str:
    """The name of a bucket's collective, as errors and statistics show it."""
    first = f"{name}/{part[0][0]}"
    return first if len(part) == 1 else f"{first} and {len(part) - 1} more"

"""Updates that are made when the program next uses a parameter, so that gradients travel meanwhile.

While a gradient is under way, ``parameter.grad`` is the memory in which it arrives, *covered* by a tensor subclass:
every use first waits for the averages. The optimizer's step takes the covered gradients, and covers its parameters
instead: the first use of a parameter waits for its bucket, and makes the optimizer update the parameters of that
bucket. In a forward pass that happens when a layer needs its weights.

Uses are seen where torch is called from Python (``__torch_function__``). A use of memory that was shared with a
parameter before is not seen; a write to it is, if it raises the version of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import Bucket, BucketPlace
from kfcomm.torch.compiling import uncompiled
from kfcomm.torch.exchange import GradientExchange
from kfcomm.torch.steps import Updates, is_divisible, is_outermost

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

MAX_URGENCY = 1 << 12
T = torch.Tensor
HARMLESS: frozenset[Any] = frozenset(
    getattr(T, name).__get__
    for name in ("grad", "requires_grad", "shape", "dtype", "device", "layout", "is_leaf", "is_cpu", "is_cuda",
                 "is_meta", "is_sparse", "ndim", "grad_fn")
) | {T.grad.__set__, T.grad.__delete__, T.size, T.numel, T.dim, T.is_contiguous, T.stride, T.element_size,
     T.is_floating_point, T.is_complex, T.__len__}  # fmt: skip
"""Uses that do not read the numbers, and so need not wait."""


class Covered:
    """Mix-in for tensors that wait when they are used."""

    _uncover: Callable[[Any], None]
    _plain: type[Any]

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Uncover the covered arguments of a call of torch, and make the call."""
        kwargs = kwargs or {}
        if func not in HARMLESS:
            found = list(_covered((args, kwargs)))
            for one in found:
                if isinstance(one, Covered):  # uncovering another one of the same bucket has uncovered it
                    one._uncover(one)
            if found:
                return func(*args, **kwargs)
        # Harmless uses keep the cover; without this line they would come here again, for ever.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._uncover(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._uncover(self)
        return self.__reduce_ex__(protocol)


class Deferred:
    """Updates of one optimizer that are made later."""

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: GradientExchange) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._updates = Updates(optimizer)
        self._is_covered = False  # gradients are under way, and no step has taken them
        self._pending: dict[Bucket, list[BucketPlace]] = {}  # places that a step has taken, and not updated yet
        self._asked: list[tuple[BucketPlace, torch.Tensor]] = []  # gradients hidden from the step under way
        # Of parameters when a step took them: a write by a tensor that shares their memory goes past the cover.
        self._versions: dict[torch.Tensor, int] = {}
        self._order: dict[Bucket, None] = {}  # in which the program has used their parameters
        self._of = {place.parameter: bucket for bucket in exchange.buckets for place in bucket.places}
        self._classes: dict[type[Any], type[Any]] = {}

    def hooks(self, before_step: RemovableHandle) -> list[RemovableHandle]:
        """Register hooks for uses that covers do not see."""
        optimizer = self._optimizer
        self._before_step = before_step
        after_step = optimizer.register_step_post_hook(self._after_step)
        optimizer._optimizer_step_post_hooks.move_to_end(after_step.id, last=False)  # others may look at what it covers
        found = [after_step, optimizer.register_state_dict_pre_hook(lambda *_: self.finish()),
                 optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish())]  # fmt: skip
        return found + [place.parameter.register_hook(self._before_gradient) for place in self._exchange.places]

    @uncompiled
    def _before_gradient(self, _: torch.Tensor) -> None:
        """Uncover before autograd adds to ``parameter.grad``, which it does without ``__torch_function__``."""
        if self._exchange.has_left:
            self.finish()
            self.show()

    # ---------------------------------------------------------------- gradients

    def cover(self) -> None:
        """Cover the gradients of a pass, which were sent: the first use of one waits for all."""
        exchange = self._exchange
        exchange.urgency = self._urgency()
        is_part = any(place.parameter.grad is None for place in exchange.places)  # another rank may have these
        exchange.wait_for_buffers(and_marks=is_part)
        self._is_covered = True
        for place in exchange.places:
            if place.parameter.grad is None and not place.is_used:
                continue
            place.show()
            gradient = place.parameter.grad
            gradient.__class__ = self._covering(type(gradient))

    def show(self) -> None:
        """Wait for gradients under way, unless a step has taken them."""
        if not self._is_covered:
            return
        self._is_covered = False
        # A gradient that is not covered any more was replaced by the program, and is put back below.
        own = [
            (place, place.parameter.grad) for place in self._exchange.places if not _make_plain(place.parameter.grad)
        ]
        self._exchange.settle()
        for place, gradient in own:  # the program has dropped it, or put another in its place
            place.parameter.grad = gradient

    # ---------------------------------------------------------------- the optimizer's step

    def take(self) -> bool:
        """Hide the gradients in flight from the optimizer's step; False if no gradient is in flight."""
        places = self._exchange.places
        if not self._is_covered:
            return False
        # A hook that runs after ours, or a step of the program's own, could look at gradients before they arrive.
        is_last = next(reversed(self._optimizer._optimizer_step_pre_hooks)) == self._before_step.id
        if not (is_last and is_divisible(self._optimizer)) or any(
            place.is_foreign for place in places if not isinstance(place.parameter.grad, Covered)
        ):
            return False
        self._is_covered = False
        self._updates.ask()
        self._asked = [(place, place.parameter.grad) for place in places if place.parameter.grad is not None]
        # In the order in which the next forward pass is expected to need them.
        self._pending = {bucket: [] for bucket in (*self._order, *reversed(self._exchange.buckets))}
        for place, _ in self._asked:
            parameter = place.parameter
            self._pending[self._of[parameter]].append(place)
            self._versions[parameter] = parameter._version
            parameter.grad = None
            parameter.__class__ = self._covering(type(parameter))
        return True

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        """After a step, from which all gradients were hidden: update by the buckets that have arrived."""
        if not is_outermost(optimizer):
            return
        for place, gradient in self._asked:
            place.parameter.grad = gradient
        self._asked = []
        for bucket in list(self._pending):
            if bucket in self._order and bucket in self._pending and self._exchange.is_there(bucket):
                self._finish(bucket)

    @uncompiled
    def finish(self) -> None:
        """Carry out all requested steps of the optimizer."""
        for bucket in list(self._pending):
            if bucket in self._pending:
                self._finish(bucket)

    def _finish(self, bucket: Bucket) -> None:
        """Update the parameters of a bucket, and before it, while it is on its way, those that have arrived."""
        try:
            if not self._exchange.is_there(bucket):
                for other in [one for one in self._pending if one is not bucket and self._exchange.is_there(one)]:
                    self._take(other)
            self._take(bucket)
        except BaseException:
            # A parameter that stayed covered would wait for a pass that is gone.
            for one in self._pending:
                self._uncover(one)
            self._pending.clear()
            self._exchange.clear()
            raise
        if not self._pending:
            self._exchange.close()

    def _take(self, bucket: Bucket) -> None:
        self._exchange.wait_for(bucket)
        self._uncover(bucket)
        wanted = self._pending.pop(bucket)
        for place in wanted:
            if place.parameter._version != self._versions.pop(place.parameter):
                raise ConfigError(
                    f"{place.name} was written to after optimizer.step() and before its update, by a tensor that "
                    "shares its memory: call attached.wait() before, or attach with defer=False"
                )
        self._updates.do(wanted)

    def _uncover(self, bucket: Bucket) -> None:
        for place in bucket.places:
            _make_plain(place.parameter)
            _make_plain(place.parameter.grad)

    # ---------------------------------------------------------------- uses

    def _covering(self, kind: type[Any]) -> type[Any]:
        """The covering subclass of a class of tensors, made once."""
        if issubclass(kind, Covered):
            return kind
        found = self._classes.get(kind)
        if found is None:
            own = {"_uncover": staticmethod(self._used), "_plain": kind, "__module__": kind.__module__}
            found = self._classes[kind] = type(kind.__name__, (Covered, kind), own)
        return found

    def _used(self, tensor: torch.Tensor) -> None:
        bucket = self._of.get(tensor)
        if bucket is None:  # a gradient
            self.finish()
            self.show()
        else:
            self._order[bucket] = None
            if bucket in self._pending:
                self._finish(bucket)
        _make_plain(tensor)

    def _urgency(self) -> dict[Bucket, int]:
        """Priorities of buckets: the earlier a forward pass needs one, the higher; backward makes the last first."""
        order = dict.fromkeys((*self._order, *reversed(self._exchange.buckets)))
        return {bucket: max(1, MAX_URGENCY - place) for place, bucket in enumerate(order)}


def _make_plain(tensor: torch.Tensor | None) -> bool:
    """Uncover a tensor; return False if it is not covered."""
    if not isinstance(tensor, Covered):
        return False
    tensor.__class__ = type(tensor)._plain
    return True


def _covered(given: Any) -> Iterator[Covered]:
    """Covered tensors among the arguments of a call."""
    if isinstance(given, Covered):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _covered(one)
    elif isinstance(given, dict):
        yield from _covered(list(given.values()))

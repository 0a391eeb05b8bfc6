"""Updates that are made when the program uses a parameter next, so that gradients travel meanwhile.

While a gradient is under way, ``parameter.grad`` is the memory that it comes to, *covered*: of a class whose every
use waits for the averages first. The optimizer's step takes covered gradients over: its parameters are covered then,
and the first use of one waits for its bucket, and has the optimizer update these parameters. In a forward pass that is
when a layer needs its weights.

A use is seen where it is a call of torch from Python (``__torch_function__``). What shares memory with a parameter and
was made before is not seen; a write by it is, if it raises the version of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import Bucket, Place
from kfcomm.torch.exchange import Exchange
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
"""Uses that tell nothing of the numbers."""


class Covered:
    """Mix-in of classes whose instances wait on use."""

    _uncover: Callable[[Any], None]
    _plain: type[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``torch.Tensor``."""
        kwargs = kwargs or {}
        if func not in HARMLESS:
            found = list(_covered((args, kwargs)))
            for one in found:
                if isinstance(one, Covered):  # not any more, where another was in the same bucket
                    one._uncover(one)
            if found:
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._uncover(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._uncover(self)
        return self.__reduce_ex__(protocol)


class Deferred:
    """Updates of one optimizer that are made later.

    Args:
        optimizer: whose step is put off.
        exchange: of its gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: Exchange) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._updates = Updates(optimizer)
        self._is_covered = False
        """Gradients are under way, and not asked for."""
        self._pending: dict[Bucket, list[Place]] = {}
        """What the optimizer was asked to take, and has not."""
        self._asked: list[tuple[Place, torch.Tensor]] = []
        """Gradients that are kept from the step under way."""
        self._versions: dict[torch.Tensor, int] = {}
        self._order: dict[Bucket, None] = {}
        """In which the program has used their parameters."""
        self._of = {place.parameter: bucket for bucket in exchange.buckets for place in bucket.places}
        self._classes: dict[type[Any], type[Any]] = {}

    def hooks(self, before_step: RemovableHandle) -> list[RemovableHandle]:
        """Hooks that see what covers do not.

        Args:
            before_step: of the hook that calls `take`.
        """
        optimizer = self._optimizer
        self._before_step = before_step
        after_step = optimizer.register_step_post_hook(self._after_step)
        optimizer._optimizer_step_post_hooks.move_to_end(after_step.id, last=False)  # others may look at what it covers
        found = [after_step, optimizer.register_state_dict_pre_hook(lambda *_: self.finish()),
                 optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish())]  # fmt: skip
        return found + [place.parameter.register_hook(self._before_gradient) for place in self._exchange.places]

    def _before_gradient(self, _: torch.Tensor) -> None:
        """Autograd is about to add to ``parameter.grad``, which it does without a look at its class."""
        if self._exchange.has_left:
            self.finish()
            self.show()

    # ---------------------------------------------------------------- gradients

    def cover(self) -> None:
        """The gradients of a pass have left: who uses one waits for all."""
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
        """Wait until gradients under way are there, unless the optimizer has been asked to take them.

        Raises:
            CollectiveError: see ``Exchange.settle``.
        """
        if not self._is_covered:
            return
        self._is_covered = False
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
        is_last = next(reversed(self._optimizer._optimizer_step_pre_hooks)) == self._before_step.id
        if not (is_last and is_divisible(self._optimizer)) or any(
            place.is_foreign for place in places if not isinstance(place.parameter.grad, Covered)
        ):
            return False
        self._is_covered = False
        self._updates.ask()
        self._asked = [(place, place.parameter.grad) for place in places if place.parameter.grad is not None]
        self._pending = {bucket: [] for bucket in (*self._order, *reversed(self._exchange.buckets))}
        for place, _ in self._asked:
            parameter = place.parameter
            self._pending[self._of[parameter]].append(place)
            self._versions[parameter] = parameter._version
            parameter.grad = None
            parameter.__class__ = self._covering(type(parameter))
        return True

    def _after_step(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        """The step had nothing to do: buckets that are there are taken now, the others when they are used."""
        if not is_outermost(optimizer):
            return
        for place, gradient in self._asked:
            place.parameter.grad = gradient
        self._asked = []
        for bucket in list(self._pending):
            if bucket in self._order and bucket in self._pending and self._exchange.is_there(bucket):
                self._finish(bucket)

    def finish(self) -> None:
        """Carry out all requested steps of the optimizer.

        Raises:
            ConfigError: a parameter was written to meanwhile.
            CollectiveError: see ``Exchange.wait_for``.
        """
        for bucket in list(self._pending):
            if bucket in self._pending:
                self._finish(bucket)

    def _finish(self, bucket: Bucket) -> None:
        """The optimizer takes a bucket, when it is there; while that takes time, what else is there already."""
        try:
            if not self._exchange.is_there(bucket):
                for other in [one for one in self._pending if one is not bucket and self._exchange.is_there(one)]:
                    self._take(other)
            self._take(bucket)
        except BaseException:
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
        """The class of a tensor that is covered."""
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
        """Of a bucket, larger the earlier a forward pass needs it; the backward pass brings the last first."""
        order = dict.fromkeys((*self._order, *reversed(self._exchange.buckets)))
        return {bucket: max(1, MAX_URGENCY - place) for place, bucket in enumerate(order)}


def _make_plain(tensor: torch.Tensor | None) -> bool:
    """Of a tensor that is covered; False if it is not."""
    if not isinstance(tensor, Covered):
        return False
    tensor.__class__ = type(tensor)._plain
    return True


def _covered(given: Any) -> Iterator[Covered]:
    """Among the arguments of a call."""
    if isinstance(given, Covered):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _covered(one)
    elif isinstance(given, dict):
        yield from _covered(list(given.values()))

"""Which gradients the forward pass of a module has to wait for.

A module's own parameters, and those of modules below it that were never called: some read the parameters of a child
without calling it (``torch.nn.MultiheadAttention`` those of its ``out_proj``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from kfcomm.torch.buckets import Bucket


class Needs:
    """What each module of a model needs, and the order in which the forward pass needs it.

    Args:
        model: its modules are called, or not.
        buckets: by parameter.

    Attributes:
        order: buckets in the order in which modules that need them were first called.
    """

    def __init__(self, model: torch.nn.Module, buckets: Mapping[torch.Tensor, Bucket]) -> None:
        self._own: dict[torch.nn.Module, list[Bucket]] = {}
        for module in model.modules():
            found = [buckets[one] for one in module.parameters(recurse=False) if one in buckets]
            if found:
                self._own[module] = list(dict.fromkeys(found))
        self._never_called = dict.fromkeys(self._own)
        self._known: dict[torch.nn.Module, list[Bucket]] = {}
        self._reached: set[torch.nn.Module] = set()
        self.order: dict[Bucket, None] = {}

    def modules(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Those that need anything, themselves or below them."""
        return [module for module in model.modules() if any(below in self._own for below in module.modules())]

    def of(self, module: torch.nn.Module) -> Iterable[Bucket]:
        """What a module that is called now needs."""
        known = self._known.get(module)
        if known is not None:
            return known
        if module in self._never_called:
            del self._never_called[module]
            self._known.clear()
        self._reached.update(module.modules())
        found = dict.fromkeys(self._own.get(module, ()))
        self.order.update(found)
        for below in module.modules():
            if below in self._never_called:
                found.update(dict.fromkeys(self._own[below]))
        known = self._known[module] = list(found)
        return known

    def is_reached(self, bucket: Bucket) -> bool:
        """Whether every module that has a parameter of it is called, or below one that is."""
        return all(bucket not in own or module in self._reached for module, own in self._own.items())

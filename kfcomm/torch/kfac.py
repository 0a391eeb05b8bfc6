"""K-FAC for models of torch: covariances from hooks, gradients preconditioned in place before the optimizer's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from kfcomm.errors import ConfigError
from kfcomm.sync.adapter import Adapter
from kfcomm.torch.compiling import uncompiled
from kfcomm.torch.memory import is_on_device
from kfcomm.train import kfac
from kfcomm.train.kfac import Damping, Layer

Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor, float]
"""Rows of what came back, rows of what went in, and the number of rows of one sample."""


class KFAC:
    """K-FAC preconditioner of the linear and convolutional layers of a model. Made alike on every rank.

    ::

        attached = kfcomm.torch.attach(model, optimizer, comm)
        kfac = kfcomm.torch.KFAC(model, optimizer, comm, damping=0.003)
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            kfac.step()
            optimizer.step()

    A gradient G of a layer becomes A⁻¹ G B⁻¹; parameters of other layers keep theirs. A layer of ``torch.nn.Linear``
    has A = K·Σ g·gᵀ and B = Σ a·aᵀ / K over K rows, where g comes back of a mean loss; one of ``Conv2d`` sums over its
    T places: A = K/T·Σ g·gᵀ, B = Σ a·aᵀ / K, with a the patches (Grosse and Martens, ICML 2016,
    https://arxiv.org/abs/1602.01407). The bias is a further column of the weight, with an input of 1.

    Args:
        model: in host memory.
        optimizer: its learning rate is that of ``kl_clip``.
        comm: of ``kfcomm.sync``.
        damping: see `kfcomm.train.KFAC`, as for what follows; layers have the names of their modules.
        decay: of the moving averages.
        covariances_every: steps from one average of the covariances to the next.
        inverses_every: steps from one renewal of the inverses to the next.
        kl_clip: bound of the step.
        name: its collectives begin with it.

    Raises:
        ConfigError: a number is out of its range; or the model is not in host memory, or has no layer that can be
            preconditioned.

    Cost: that of `kfcomm.train.KFAC`, and K·(M² + N²) operations in steps that take covariances.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Any, *, damping: Damping = 0.003,
        decay: float = 0.95, covariances_every: int = 10, inverses_every: int = 100, kl_clip: float | None = 0.001,
        name: str = "kfac",
    ) -> None:  # fmt: skip
        if not isinstance(comm, Adapter):
            raise ConfigError(f"KFAC needs a communicator of kfcomm.sync, not a {type(comm).__name__}")
        if any(map(is_on_device, model.parameters())):
            raise ConfigError("KFAC is for models in host memory, not for one with parameters on a device")
        self._optimizer = optimizer
        users = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
        self._layers = {
            one: RecordedLayer(module)
            for one, module in model.named_modules()
            # A tied parameter has the sum of two layers' gradients, for which the covariances of neither hold.
            if can_be_recorded(module) and all(users[id(own)] == 1 for own in module.parameters(recurse=False))
        }
        if not self._layers:
            raise ConfigError("the model has no torch.nn.Linear or Conv2d (of one group) whose weight gets a gradient")
        self._inner = kfac.KFAC(
            comm, damping, decay=decay, covariances_every=covariances_every, inverses_every=inverses_every,
            kl_clip=kl_clip, name=name,
        )  # fmt: skip
        self._hooks = [
            layer.module.register_forward_hook(partial(self._after_forward, layer)) for layer in self._layers.values()
        ]

    @uncompiled
    def step(self) -> None:
        """Precondition ``parameter.grad``, in place; after ``backward()``, where gradients are averaged.

        Raises:
            CollectiveError: an exchange failed.
        """
        given = {name: layer for name, layer in self._layers.items() if layer.module.weight.grad is not None}
        wants = self._inner.wants_covariances
        layers = {name: layer.taken(wants=wants) for name, layer in given.items()}
        rate = float(self._optimizer.param_groups[0]["lr"])
        for name, found in self._inner.precondition(layers, lr=rate).wait().items():
            given[name].put(torch.from_numpy(found))

    def detach(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def state_dict(self) -> dict[str, Any]:
        """State, the same on all ranks; see `kfcomm.train.KFAC`."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another rank, or of a checkpoint."""
        self._inner.load_state_dict(state)

    @uncompiled
    def _after_forward(
        self, layer: RecordedLayer, _: torch.nn.Module, given: tuple[torch.Tensor, ...], out: Any
    ) -> None:
        # Most steps take no covariances, and cost nothing here.
        if self._inner.wants_covariances and torch.is_grad_enabled() and out.requires_grad:
            out.register_hook(partial(layer.came_back, given[0].detach()))


@dataclass(eq=False)
class RecordedLayer:
    """A layer with the covariances of the passes since the latest step."""

    module: Any
    outer: Any = None  # sum of A over the passes
    inner: Any = None  # sum of B over them
    num_passes: int = 0
    rows_of: Callable[..., Rows] = field(init=False)

    def __post_init__(self) -> None:
        self.rows_of = _of_conv if isinstance(self.module, torch.nn.Conv2d) else _of_linear

    @torch.no_grad()  # type: ignore[untyped-decorator]
    @uncompiled
    def came_back(self, given: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the covariances of a pass of K samples: T rows of each."""
        back, forth, num_places = self.rows_of(self.module, given, gradient)
        if self.module.bias is not None:
            forth = torch.cat([forth, forth.new_ones(len(forth), 1)], dim=1)
        count = len(back) / num_places
        if not count:
            return
        outer, inner = back.T @ back * (count / num_places), forth.T @ forth / count
        self.outer = outer if self.outer is None else self.outer.add_(outer)
        self.inner = inner if self.inner is None else self.inner.add_(inner)
        self.num_passes += 1

    def taken(self, *, wants: bool) -> Layer:
        """The gradient with the bias as its last column, and the mean covariances since the latest step."""
        weight = self.module.weight.grad.detach().flatten(1)
        if self.module.bias is not None:
            weight = torch.cat([weight, self.module.bias.grad.detach().unsqueeze(1)], dim=1)
        outer = inner = None
        if wants:
            # A rank without samples in this step takes part with zeros.
            sizes = weight.shape if self.outer is None else (0, 0)
            outer = _array(weight.new_zeros(sizes[0], sizes[0]) if self.outer is None else self.outer / self.num_passes)
            inner = _array(weight.new_zeros(sizes[1], sizes[1]) if self.inner is None else self.inner / self.num_passes)
        self.outer = self.inner = None
        self.num_passes = 0
        return Layer(_array(weight), outer, inner)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def put(self, found: torch.Tensor) -> None:
        """Replace the gradient by a preconditioned one."""
        weight, bias = self.module.weight, self.module.bias
        if bias is not None:
            bias.grad.copy_(found[:, -1])
            found = found[:, :-1]
        weight.grad.copy_(found.reshape(weight.shape))


def can_be_recorded(module: torch.nn.Module) -> bool:
    """Whether K-FAC knows the covariances of a layer."""
    if isinstance(module, torch.nn.Conv2d):
        is_known = module.groups == 1 and module.padding_mode == "zeros"
    else:
        is_known = isinstance(module, torch.nn.Linear)
    parameters = list(module.parameters(recurse=False))
    return is_known and all(one.requires_grad and one.dtype in EXACT for one in parameters)


EXACT = (torch.float32, torch.float64)
"""Types in which matrices can be inverted."""


def _of_linear(_: Any, given: torch.Tensor, gradient: torch.Tensor) -> Rows:
    return gradient.flatten(0, -2), given.flatten(0, -2), 1


def _of_conv(module: Any, given: torch.Tensor, gradient: torch.Tensor) -> Rows:
    if isinstance(module.padding, str):
        given, padding = functional.pad(given, module._reversed_padding_repeated_twice), (0, 0)
    else:
        padding = module.padding
    patches = functional.unfold(given, module.kernel_size, module.dilation, padding, module.stride)
    num_places = patches.shape[-1]
    back = gradient.flatten(2).transpose(1, 2).flatten(0, 1)
    return back, patches.transpose(1, 2).flatten(0, 1), num_places


def _array(x: torch.Tensor) -> Any:
    return x.contiguous().numpy()

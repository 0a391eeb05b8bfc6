"""The class of torch that a process group's backend extends, and methods that only older versions need.

Since torch 2.14 a ``Backend`` may be made in Python, below torch's own ``ProcessGroup``. An earlier torch takes a
``ProcessGroup`` made in Python in the place of its own: then the backend is the group itself, for all devices. It has
no `split_group`, and older torch knows some of its methods by other names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import ProcessGroup

from kfcomm.errors import ConfigError
from kfcomm.torch.compiling import uncompiled_methods
from kfcomm.torch.kept_works import PLAIN

NAME = "kfcomm"
DEVICES = ("cpu", "cuda")

IS_GROUP = not hasattr(TorchBackend, "all_gather_single")
"""Whether backends are process groups."""

Group: Any = ProcessGroup
Options: Any = TorchBackend.Options if hasattr(TorchBackend, "Options") else Group.Options  # before torch 2.6


@uncompiled_methods
class GroupBase(Group):  # type: ignore[misc]
    """A process group that is its own backend."""

    _store: Any
    _name = _text = ""

    def name(self) -> str:
        """Its name."""
        return NAME

    _get_backend_name = name

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(one) for one in DEVICES if one == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: Any) -> GroupBase:
        return self

    # torch keeps these two in the backends of a group, of which it finds none here.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._text = text

    def getGroupName(self) -> str:  # noqa: N802  torch's
        """The name by which torch knows the group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Description of the group."""
        return self._text

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def get_group_store(self) -> Any:
        """The store of its ranks."""
        return self._store

    # ---------------------------------------------------------------- names in older torch

    def _allgather_base(self, output: Any, source: Any, opts: Any) -> Any:
        return self.all_gather_single(output, source, opts)

    def allgather_into_tensor_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = PLAIN) -> Any:
        """Implement ``all_gather_single_coalesced``."""
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any) -> Any:
        return self.reduce_scatter_single(output, source, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        """Implement ``reduce_scatter_single_coalesced``."""
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def alltoall_base(
        self, output: Any, source: Any, output_rows: Sequence[int], input_rows: Sequence[int], opts: Any
    ) -> Any:
        """Implement ``all_to_all_single``."""
        return self.all_to_all_single(output, source, output_rows, input_rows, opts)


Base: Any = GroupBase if IS_GROUP else TorchBackend


def make_known(create: Callable[..., Any]) -> None:
    """Tell torch of the backend, which ``create`` makes. May be called again."""
    if NAME not in dist.Backend.backend_list:
        # Some of torch takes a device that a group has, if it is not the CPU. The count does not initialize CUDA.
        devices = [one for one in DEVICES if one == "cpu" or torch.cuda.device_count()]
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


def refuse_mixtures() -> None:
    """Refuse another backend for some devices: a group that is its own backend has them all. May be called again."""
    kind: Any = dist.distributed_c10d.BackendConfig
    begin = kind.__init__
    if getattr(begin, "is_patched", False):
        return

    def init(self: Any, backend: Any) -> None:
        begin(self, backend)
        found = set(self.get_device_backend_map().values())
        if NAME in found and len(found) > 1:
            raise ConfigError(
                f"{backend!r}: torch {torch.__version__} has kfcomm for all devices or for none; two backends in a "
                'group need torch 2.14: call init_process_group("kfcomm")'
            )

    init.__dict__["is_patched"] = True
    kind.__init__ = init


def patch_groups() -> None:
    """Let functions of torch that ask for Gloo by name take a group of ours. May be called again."""
    refuse_mixtures()
    c10d: Any = dist.distributed_c10d
    monitored = c10d.monitored_barrier
    if getattr(monitored, "is_patched", False):
        return

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        found = group or dist.group.WORLD
        if not isinstance(found, GroupBase):
            return monitored(group, timeout, wait_all_ranks)
        return found.monitored_barrier(timeout, wait_all_ranks)

    monitored_barrier.__doc__ = monitored.__doc__
    monitored_barrier.__dict__["is_patched"] = True
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
    shrunk = getattr(c10d, "_create_shrunk_process_group", None)
    if shrunk is None:  # torch without shrink_group
        return

    def create(new_backend: Any, ranks: list[int], metadata: dict[str, Any], is_default_group: bool) -> Any:
        if not isinstance(new_backend, GroupBase):
            return shrunk(new_backend, ranks, metadata, is_default_group)
        new_backend._set_group_name(metadata["new_group_name"])
        new_backend._set_group_desc("default:shrunken" if is_default_group else "shrunk")
        return new_backend

    c10d._create_shrunk_process_group = create

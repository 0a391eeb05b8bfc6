"""Where ``ProcessGroup`` takes for granted what is not so of a backend made in Python; both would end the process.

- ``split_group`` asks the backend of every rank, and one in no part is to give none. From Python None cannot be given:
  torch looks for the object in it (2.15, ``PyBackend::initSlotAndCast``).
- ``dist.shrink_group`` registers every smaller group of the CPU as one of Gloo, and DDP's logger then takes its
  backend for Gloo's (2.15, ``_create_shrunk_process_group``).

Groups of other libraries, and those that hold one of theirs, are left to torch.
"""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import ProcessGroup

from kfcomm.torch.backend import Backend

Group: Any = ProcessGroup
GLOO, CUSTOM = Group.BackendType.GLOO, Group.BackendType.CUSTOM


def patch() -> None:
    """Teach torch's class both. May be called again."""
    if getattr(Group.split_group, "is_patched", False):
        return
    split, register, set_default = Group.split_group, Group._register_backend, Group._set_default_backend

    def split_group(self: Any, new_ranks: Any, *args: Any, **options: Any) -> Any:
        if self.rank() not in new_ranks and _is_ours(self):
            return None
        return split(self, new_ranks, *args, **options)

    def register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> None:
        register(self, device, CUSTOM if isinstance(backend, Backend) else kind, backend)

    def set_default_backend(self: Any, kind: Any) -> None:
        set_default(self, CUSTOM if kind == GLOO and _is_ours(self) else kind)

    split_group.__doc__ = split.__doc__
    split_group.__dict__["is_patched"] = True
    Group.split_group = split_group
    Group._register_backend = register_backend
    Group._set_default_backend = set_default_backend


def _is_ours(group: Any) -> bool:
    """Whether all that a group has registered are backends of ours."""
    devices = group._device_types
    return bool(devices) and all(isinstance(group._get_backend(device), Backend) for device in devices)

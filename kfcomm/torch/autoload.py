"""Called by torch at the end of ``import torch``, in every process, by the entry point group ``torch.backends``.

It makes the backend known to torch before 2.14, which does not look for it, and carries out ``KFCOMM_TORCH_DEFAULT``.
Everything else is imported when a group is made.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from kfcomm.rendezvous.torch_groups import TorchDefault, torch_default


def load() -> None:
    """Make the backend known, and the default where the environment asks for it. May be called again.

    Raises:
        ConfigError: ``KFCOMM_TORCH_DEFAULT`` has an unknown value.
    """
    chosen = torch_default(os.environ)
    if not dist.is_available():
        return
    from kfcomm.torch.bases import IS_GROUP, NAME, make_known, refuse_mixtures

    if IS_GROUP:
        refuse_mixtures()
    if IS_GROUP or chosen is not TorchDefault.NONE:
        make_known(create)
    if chosen is TorchDefault.NAMELESS:
        dist.Backend.default_device_backend_map["cpu"] = NAME
    elif chosen is TorchDefault.GLOO:  # torch's default, whose name programs may look for
        stand_in(NAME)


def create(opts: Any, backend_options: Any = None) -> Any:
    """The backend of one process group."""
    from kfcomm.torch import registration

    registration.register()
    return registration.create(opts, backend_options)


def stand_in(name: str) -> None:
    """Let the backend of this name be made wherever a program asks for Gloo."""
    kind: Any = dist.Backend
    named = kind.__new__
    if getattr(named, "stands_in", False):
        return

    def new(cls: Any, asked: Any) -> Any:
        found = named(cls, asked)
        return name if found == kind.GLOO else found

    new.__dict__["stands_in"] = True
    kind.__new__ = new

"""Process groups of torch over kfcomm: the versions that have them, and the choice from outside of a program.

Read whenever a process imports torch: so this module imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kfcomm.errors import ConfigError

VARIABLE = "KFCOMM_TORCH_DEFAULT"
FIRST_TORCH = (2, 4)
"""With it a program calls ``kfcomm.torch.register()``, from 2.5 on torch does."""


def why_too_old(version: str) -> str:
    """The reason why a version of torch has no groups over kfcomm; empty if it has them."""
    first = ".".join(map(str, FIRST_TORCH))
    major, minor, *_ = version.split(".")
    return "" if (int(major), int(minor)) >= FIRST_TORCH else f"the backend kfcomm needs torch {first} or later"


class TorchDefault(Enum):
    """Groups that are made over kfcomm although the program does not name it."""

    NONE = "0"
    NAMELESS = "1"  # those without a backend's name, on CPUs
    GLOO = "gloo"  # those too for which the program names Gloo


def torch_default(environ: Mapping[str, str]) -> TorchDefault:
    """The choice of ``KFCOMM_TORCH_DEFAULT``.

    Raises:
        ConfigError: the value is unknown.
    """
    text = environ.get(VARIABLE) or TorchDefault.NONE.value
    try:
        return TorchDefault(text)
    except ValueError:
        raise ConfigError(
            f"{VARIABLE}={text!r} must be 1 (groups without a backend's name), gloo (those for Gloo too) or 0"
        ) from None

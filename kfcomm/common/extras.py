"""Optional packages, and how to install each: an extra of kfcomm brings it."""

from __future__ import annotations

import importlib.util
from typing import Final

EXTRAS: Final = {
    "cryptography": "tls",
    "jax": "jax",
    "matplotlib": "bench",
    "ml_dtypes": "bfloat16",
    "prometheus_client": "metrics",
    "scipy": "train",
    "torch": "torch",
    "xxhash": "checksum",
}
"""The extra of each package, by the name under which the package is imported."""


def lacking(what: str, package: str) -> str:
    """The text of an error: ``what`` was asked for, and ``package`` is not installed."""
    extra = EXTRAS.get(package)
    install = f'"kfcomm[{extra}]"' if extra else package
    return f"{what} needs the package {package}, which is not installed: pip install {install}"


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Imports nothing."""
    return importlib.util.find_spec(package) is not None


def require(what: str, package: str) -> None:
    """Check that a package is installed. Imports nothing.

    Raises:
        ModuleNotFoundError: it is not installed; says how to install it.
    """
    if not is_installed(package):
        raise ModuleNotFoundError(lacking(what, package), name=package)

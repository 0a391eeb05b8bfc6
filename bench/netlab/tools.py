"""The tools that the bed is made with: ip(8), tc(8), nsenter(1). Owns how they are run and what their failures mean."""

from __future__ import annotations

import shutil
import subprocess
import sys

from kfcomm.errors import KfcommError

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


class NetlabError(KfcommError):
    """The bed cannot do what was asked for."""


class NetlabUnavailable(NetlabError):
    """No bed can be made here: a tool, a right, or a part of the kernel is missing. The text names it."""


def tool(*line: str, text: str = "") -> str:
    """Run a tool to its end, with ``text`` as its input; what it wrote.

    Raises:
        NetlabUnavailable: it is not installed.
        NetlabError: it failed; with what it said.
    """
    try:
        done = subprocess.run(line, capture_output=True, text=True, input=text)
    except FileNotFoundError:
        raise NetlabUnavailable(
            f"{line[0]} is not installed (it comes with {_TOOLS.get(line[0], 'the system')})"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise NetlabError(f"{' '.join(line)}: {said}")
    return done.stdout


def check_tools() -> None:
    """Whether everything is there that the bed is made with; whether it may be used shows when it is.

    Raises:
        NetlabUnavailable: something is missing.
    """
    if sys.platform != "linux":
        raise NetlabUnavailable(f"network namespaces are Linux's; this is {sys.platform}")
    missing = [f"{name} ({package})" for name, package in _TOOLS.items() if shutil.which(name) is None]
    if missing:
        raise NetlabUnavailable(f"not installed: {', '.join(missing)}")

"""Measured costs of messages on this host, saved in the user's cache.

Homes may be shared by hosts, so the file is named after the host. An unreadable file is ignored with a warning, and the
default costs apply.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.interfaces import hostname
from kfcomm.types import UNMEASURED, Costs

logger = logging.getLogger("kfcomm")

FORMAT = 1
LEAST, MOST = 1e-13, 10.0
"""Plausible range of a cost in seconds."""


def path_of_costs(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/kfcomm/costs-HOST.json``; the cache is ``~/.cache`` by default.

    Raises:
        ConfigError: ``HOME`` is unset, and this user has no passwd entry.
    """
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if cache.startswith("~"):
        raise ConfigError("no home folder for saved costs: set HOME, or XDG_CACHE_HOME to a folder")
    return Path(cache) / "kfcomm" / f"costs-{hostname().replace('/', '_')}.json"


def save_costs(costs: Costs, busy: float | None = None) -> Path:
    """Save costs for later jobs on this host; unmeasured ones keep their saved values.

    Args:
        costs: measured costs.
        busy: share of the processors that was in use just before; None if unknown.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = path_of_costs()
    known = {name: value for name, value in costs._asdict().items() if value is not None}
    about = {"format": FORMAT, "measured": time.strftime("%Y-%m-%d %H:%M"), "busy": busy, "load": os.getloadavg()[0]}
    record = {**about, **saved_costs()._asdict(), **known}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(f".{os.getpid()}")
        partly.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        # A reader sees the old file or the new one, never half of one.
        partly.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    return path


def forget_costs() -> Path | None:
    """Remove the saved costs of this host; return their file, if there was one.

    Raises:
        ConfigError: the file cannot be removed.
    """
    path = path_of_costs()
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot remove {path}: {error.strerror}") from error
    return path


def saved_costs() -> Costs:
    """Saved costs of this host; `UNMEASURED` without any."""
    try:
        path = path_of_costs()
    except ConfigError:
        return UNMEASURED
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        costs = Costs(**{name: record[name] for name in Costs._fields})
        if record["format"] == FORMAT and is_plausible(costs):
            return costs
        reason = "it holds something else"
    except FileNotFoundError:
        return UNMEASURED
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, TypeError, KeyError):
        reason = "it holds something else"
    logger.warning("%s is left out: %s; kfcomm probe --keep makes it anew", path, reason)
    return UNMEASURED


def describe_saved() -> str:
    """Path of the recorded costs of this host, their date, and the load at that time; empty without a record."""
    if saved_costs() == UNMEASURED:
        return ""
    path = path_of_costs()
    record = json.loads(path.read_text(encoding="utf-8"))
    busy = record.get("busy")
    how_busy = f", {busy:.0%} of the processors busy" if isinstance(busy, float) else ""
    return f"{path}, measured {record.get('measured')}{how_busy}"


def is_plausible(costs: object) -> bool:
    """Whether these are costs: the right number of them, each None or within `LEAST` and `MOST`."""
    if not isinstance(costs, tuple) or len(costs) != len(Costs._fields):
        return False
    return all(one is None or (type(one) is float and LEAST <= one <= MOST) for one in costs)

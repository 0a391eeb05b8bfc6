"""What messages cost on this host, kept from one job to the next: in the user's cache, a file for each host.

Homes may be shared by hosts, so the file bears the host's name. What cannot be read is as good as nothing: it says so,
and the usual constants hold.
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
"""Seconds, of anything: what is outside is a mistake."""


def path_of_costs(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/kfcomm/costs-HOST.json``; the cache is ``~/.cache`` by default."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "kfcomm" / f"costs-{hostname().replace('/', '_')}.json"


def save_costs(costs: Costs, busy: float | None = None) -> Path:
    """Keep them for the jobs that start after this on this host; what they do not know stays as it was.

    Args:
        costs: that were measured.
        busy: the share of the processors that was in use just before; None if that is not known.

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
        partly.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    return path


def forget_costs() -> Path | None:
    """From now on jobs on this host count with the usual costs; returns the file that held others, if there was one.

    Raises:
        ConfigError: it cannot be removed.
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
    """What was kept on this host; nothing is known if nothing was."""
    path = path_of_costs()
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
    """Whether these can be costs: as many as there are, each unknown or a number of seconds that can be."""
    if not isinstance(costs, tuple) or len(costs) != len(Costs._fields):
        return False
    return all(one is None or (type(one) is float and LEAST <= one <= MOST) for one in costs)

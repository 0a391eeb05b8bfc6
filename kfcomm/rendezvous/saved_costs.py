"""Measured costs of messages on this host, and of the links from it, kept for later jobs.

They are saved in the user's cache. Homes may be shared by hosts, so the file is named after the host. An unreadable
file is ignored with a warning, and the default costs apply.

Hosts are known by name and address together: another interface, or a host that was given the address of another, is
another host. Each host tells the others its own *row*, the rates of its port, of its rack's uplink, and of the links
from it. All ranks have the rows of all, and make the same `Rates` of them, whatever files they have themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.host import hostname
from kfcomm.types import UNMEASURED, Costs, Rates, Uplink

logger = logging.getLogger("kfcomm")

FORMAT = 1
LEAST, MOST = 1e-13, 10.0
"""Plausible range of a cost in seconds, and of a latency; of a rate, in seconds per byte."""
MAX_HOSTS: Final = 256
"""Links of more hosts are not kept."""

Link: TypeAlias = tuple[float, float]
"""Bytes/s, and seconds one way."""
Links: TypeAlias = Mapping[str, Mapping[str, Link]]
"""From host to host, both by `host_name`."""


class Rack(NamedTuple):
    """Hosts that share an uplink, by `host_name`, and the bytes/s that it sends and receives at most."""

    hosts: tuple[str, ...]
    send: float
    receive: float


# bytes/s that the port sends, and receives, at most; digest of the rack, 0 without one; bytes/s of its uplink likewise
_HEAD = struct.Struct("<ff8sff")
_ENTRY = struct.Struct("<8sff")  # digest of the other host's name, bytes/s to it, seconds one way
MAX_ROW_NBYTES: Final = _HEAD.size + MAX_HOSTS * _ENTRY.size


class Saved(NamedTuple):
    """Contents of the file."""

    costs: Costs = UNMEASURED
    links: Links = {}  # noqa: RUF012  never changed
    racks: tuple[Rack, ...] = ()


def host_name(name: str, address: str) -> str:
    """Name under which the links of a host are kept."""
    return f"{name} {address}"


def path_of_costs(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/kfcomm/costs-HOST.json``; the cache is ``~/.cache`` by default.

    Raises:
        ConfigError: ``HOME`` is unset, and this user has no passwd entry.
    """
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if cache.startswith("~"):
        raise ConfigError("no home folder for saved costs: set HOME, or XDG_CACHE_HOME to a folder")
    return Path(cache) / "kfcomm" / f"costs-{hostname().replace('/', '_')}.json"


def save_costs(
    costs: Costs, busy: float | None = None, links: Links | None = None, racks: Sequence[Rack] = ()
) -> Path:  # fmt: skip
    """Save costs, links and racks for later jobs on this host; unmeasured ones keep their saved values.

    A rack is forgotten when links were measured between its hosts and one more. ``busy`` is the share of the processors
    that was in use before. Raises `ConfigError`: the file cannot be written.
    """
    path = path_of_costs()
    before = saved()
    known = {name: value for name, value in _constants(costs).items() if value is not None}
    about = {"format": FORMAT, "measured": time.strftime("%Y-%m-%d %H:%M"), "busy": busy, "load": os.getloadavg()[0]}
    merged = _merged(before.links, links or {})
    record = {**about, **_constants(before.costs), **known, **_matrices(merged)}
    if kept := [*_still_racks(before.racks, links or {}, merged, racks), *racks]:
        record["racks"] = [rack._asdict() for rack in kept]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(f".{os.getpid()}")
        partly.write_text(_as_text(record), encoding="utf-8")
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


def saved() -> Saved:
    """Saved costs and links of this host; nothing without any, or, with a warning, if the file cannot be used."""
    try:
        path = path_of_costs()
    except ConfigError:
        return Saved()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        costs = Costs(**{name: record[name] for name in _CONSTANTS})
        if record["format"] == FORMAT and is_plausible(costs):
            links = _links_of(record)
            return Saved(costs, links, _racks_of(record, links))
        reason = "it holds something else"
    except FileNotFoundError:
        return Saved()
    except OSError as error:
        reason = error.strerror or str(error)
    except _BadRackError as error:
        reason = str(error)
    except (ValueError, TypeError, KeyError, IndexError):
        reason = "it holds something else"
    logger.warning("%s is left out: %s; kfcomm probe --keep makes it anew", path, reason)
    return Saved()


def saved_costs() -> Costs:
    """Saved costs of this host; `UNMEASURED` without any."""
    return saved().costs


def describe_saved() -> str:
    """Path of the saved record, its date, and the load at that time; empty without a record."""
    kept = saved()
    if kept == Saved():
        return ""
    path = path_of_costs()
    record = json.loads(path.read_text(encoding="utf-8"))
    busy = record.get("busy")
    how_busy = f", {busy:.0%} of the processors busy" if isinstance(busy, float) else ""
    links = f", with the links of {len(kept.links)} hosts" if kept.links else ""
    racks = f" in {len(kept.racks)} rack{'s' * (len(kept.racks) > 1)}" if kept.racks else ""
    return f"{path}, measured {record.get('measured')}{how_busy}{links}{racks}"


def is_plausible(costs: object) -> bool:
    """Whether these are costs without rates: the right number of them, each None or within `LEAST` and `MOST`."""
    if not isinstance(costs, tuple) or len(costs) != len(Costs._fields) or costs[-1] is not None:
        return False
    return all(one is None or (type(one) is float and LEAST <= one <= MOST) for one in costs)


# ---------------------------------------------------------------- rows


def row_of(links: Links, name: str, racks: Sequence[Rack] = ()) -> bytes:
    """Pack the rates of a host's port, its uplink, and the links from it, for the other hosts.

    Empty where no link was measured.
    """
    mine = links.get(name)
    if not mine:
        return b""
    back = [row[name][0] for row in links.values() if name in row]
    sends = max(rate for rate, _ in mine.values())
    entries = sorted((_digest(other), *link) for other, link in mine.items())
    rack = next((rack for rack in racks if name in rack.hosts), None)
    uplink = (_NO_RACK, 0.0, 0.0) if rack is None else (_digest(*sorted(rack.hosts)), rack.send, rack.receive)
    head = _HEAD.pack(sends, max(back, default=sends), *uplink)
    return head + b"".join(_ENTRY.pack(*entry) for entry in entries)


def links_of_hosts(hosts: Sequence[int], names: Sequence[str], rates: Rates) -> tuple[Links, tuple[Rack, ...]]:
    """Links and racks of all hosts, by name: ``hosts`` and ``names`` are those of each rank."""
    named = dict(zip(hosts, names, strict=True))
    latencies = rates.latency_s or tuple((0.0,) * len(named) for _ in named)
    links = {
        here: {there: (rates.links[a][b], latencies[a][b]) for b, there in named.items() if a != b}
        for a, here in named.items()
    }
    racks = (Rack(tuple(named[host] for host in one.hosts), one.send, one.receive) for one in rates.uplinks)
    return links, tuple(racks)


def digest_of(rates: Rates) -> bytes:
    """Eight bytes that differ if any rate or latency differs."""
    return hashlib.blake2b(repr(rates).encode(), digest_size=8).digest()


def is_row(row: object) -> bool:
    """Whether this is a row: of a length that can be, with plausible rates and latencies."""
    if not isinstance(row, bytes) or not (row == b"" or _HEAD.size < len(row) <= MAX_ROW_NBYTES):
        return False
    if not row:
        return True
    if (len(row) - _HEAD.size) % _ENTRY.size:
        return False
    ports, (rack, *uplink), links = _read(row)
    rates = [*ports, *(uplink if rack != _NO_RACK else ())]
    return all(map(_is_rate, rates)) and all(map(_is_link, links.values()))


def rates_of_rows(names: Sequence[str], rows: Sequence[bytes]) -> tuple[Rates | None, str]:
    """``(rates, reason)``: between hosts with these names, from their rows; without rates the reason for it.

    The reason is empty where no host has a row: nothing was kept. A picture that lacks a link is left out as a whole.
    """
    if len(names) < 2 or not any(rows):
        return None, ""
    read, uplinks = [], []
    for name, row in zip(names, rows, strict=True):
        if not row:
            return None, f"nothing is kept on host {name}"
        ports, uplink, links = _read(row)
        known = {digest: links[digest] for digest in map(_digest, names) if digest in links}
        missing = [other for other in names if other != name and _digest(other) not in known]
        if missing:
            return None, f"the link from host {name} to host {missing[0]} was not measured"
        read.append((ports, [known.get(_digest(other), (0.0, 0.0)) for other in names]))
        uplinks.append(uplink)
    send, receive = zip(*(ports for ports, _ in read), strict=True)
    links_, latencies = (tuple(tuple(link[place] for link in row) for _, row in read) for place in (0, 1))
    return Rates(send, receive, links_, latencies, _uplinks_of(uplinks)), ""


def _uplinks_of(told: Sequence[tuple[bytes, float, float]]) -> tuple[Uplink, ...]:
    """Racks with several of the hosts, but not with all, from the rack in each host's row."""
    racks: dict[bytes, list[int]] = {}
    for host, (rack, *_) in enumerate(told):
        if rack != _NO_RACK:
            racks.setdefault(rack, []).append(host)
    return tuple(
        Uplink(tuple(hosts), min(told[host][1] for host in hosts), min(told[host][2] for host in hosts))
        for hosts in racks.values()
        if 1 < len(hosts) < len(told)
    )


_NO_RACK: Final = bytes(8)


def _read(row: bytes) -> tuple[Link, tuple[bytes, float, float], dict[bytes, Link]]:
    """``((bytes/s sent, bytes/s received), (rack, its bytes/s out, and in), {digest: link})`` of a row."""
    sends, receives, *uplink = _HEAD.unpack_from(row)
    entries = _ENTRY.iter_unpack(row[_HEAD.size :])
    return (sends, receives), (*uplink,), {digest: (rate, latency_s) for digest, rate, latency_s in entries}


def _digest(*names: str) -> bytes:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8, person=b"host").digest()


def _is_rate(rate: float) -> bool:
    return rate > 0 and LEAST / 2 <= 1 / rate <= MOST


def _is_link(link: Link) -> bool:
    return _is_rate(link[0]) and 0 <= link[1] <= MOST


# ---------------------------------------------------------------- the file

_CONSTANTS: Final = Costs._fields[:-1]


def _constants(costs: Costs) -> dict[str, float | None]:
    return dict(zip(_CONSTANTS, costs.constants, strict=True))


def _merged(old: Links, new: Links) -> Links:
    """Both, with the new in place of the old; the new ones alone if there would be too many hosts."""
    if len({*old, *new}) > MAX_HOSTS:
        old = {}
    if len(new) > MAX_HOSTS:
        raise ConfigError(f"links of {len(new)} hosts are not kept, only of up to {MAX_HOSTS}")
    return {name: {**old.get(name, {}), **new.get(name, {})} for name in {**old, **new}}


def _still_racks(old: Sequence[Rack], new: Links, known: Links, racks: Sequence[Rack]) -> Iterator[Rack]:
    """Racks of before that a new measurement leaves as they are."""
    taken = {host for rack in racks for host in rack.hosts}
    for rack in old:
        measured_anew = new.keys() > set(rack.hosts)
        if not measured_anew and taken.isdisjoint(rack.hosts) and known.keys() >= set(rack.hosts):
            yield rack


def _matrices(links: Links) -> dict[str, Any]:
    if not links:
        return {}
    names = list(links)
    rows = {
        field: [[links[a][b][place] if b in links[a] else None for b in names] for a in names]
        for place, field in enumerate(("bandwidth", "latency_s"))
    }
    return {"hosts": names, **rows}


def _as_text(record: Mapping[str, Any]) -> str:
    """JSON with a line for each field, and for each row of a matrix."""

    def shown(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], list):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    return "{\n " + ",\n ".join(f"{json.dumps(name)}: {shown(value)}" for name, value in record.items()) + "\n}\n"


class _BadRackError(ValueError):
    """A rack of a file cannot be."""


def _racks_of(record: Mapping[str, Any], links: Links) -> tuple[Rack, ...]:
    """Racks of a file, none if it is of a version that kept none.

    Raises:
        _BadRackError: they cannot be.
    """
    try:
        racks = tuple(
            Rack(tuple(one["hosts"]), float(one["send"]), float(one["receive"])) for one in record.get("racks", ())
        )
        named = [name for rack in racks for name in rack.hosts]
        unknown = [name for name in named if name not in links]
    except (TypeError, ValueError, KeyError) as error:
        raise _BadRackError("a rack needs hosts, and rates to and from them") from error
    if unknown:
        raise _BadRackError(f"a rack names host {unknown[0]!r}, whose links were not measured")
    if len(set(named)) < len(named):
        raise _BadRackError("a host is in two racks")
    if not all(_is_rate(rate) for rack in racks for rate in (rack.send, rack.receive)):
        raise _BadRackError("the rate of a rack is out of range")
    return racks


def _links_of(record: Mapping[str, Any]) -> Links:
    """Links of a file, none if it is of a version that kept none.

    Raises:
        ValueError, TypeError, KeyError, IndexError: they cannot be.
    """
    names: list[str] = record.get("hosts", [])
    links: dict[str, dict[str, Link]] = {}
    for a, name in enumerate(names):
        rates, latencies = record["bandwidth"][a], record["latency_s"][a]
        if len(rates) != len(names) or len(latencies) != len(names) or not isinstance(name, str):
            raise ValueError("the matrices are not square")
        row = zip(names, zip(rates, latencies, strict=True), strict=True)
        links[name] = {other: (float(rate), float(latency_s)) for other, (rate, latency_s) in row if rate is not None}
        if not all(map(_is_link, links[name].values())):
            raise ValueError("a link is out of range")
    if len(links) != len(names) or len(names) > MAX_HOSTS:
        raise ValueError("a host comes twice, or there are too many")
    return links

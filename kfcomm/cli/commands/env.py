"""`kfcomm env`: settings and environment of this process, with reasons, as aligned text."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata

import click

from kfcomm.arrays.devices import DeviceReport
from kfcomm.arrays.devices.routes import backend_in_words, driver_version
from kfcomm.common.version import versions
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.joining import look_for_device
from kfcomm.rendezvous.finders import choose, survey
from kfcomm.rendezvous.host import choose_address, host_and_port, hostname, interfaces
from kfcomm.rendezvous.identity import host_id
from kfcomm.rendezvous.saved_costs import describe_saved
from kfcomm.rendezvous.settings import Settings, detect
from kfcomm.rendezvous.torch_groups import why_too_old
from kfcomm.transports.registry import AUTO, LINKS, TCP, TRANSPORTS, named, selected

Row = tuple[str, str]


@click.command()
def env() -> None:
    """Explain what this process finds: place in the world, device, interfaces, links, versions."""
    text, exit_code = explain(os.environ)
    click.echo(text)
    sys.exit(exit_code)


def explain(environ: Mapping[str, str]) -> tuple[str, int]:
    """Text, without the token, and exit code: 2 if the environment cannot work."""
    # Shown also where the settings are wrong.
    finders = _section("finders", _finders(environ))
    fixed = [_section("links", _links()), _section("versions", _versions())]
    try:
        settings = detect(environ)
    except ConfigError as error:
        shown = [_section("world", [("error", str(error))]), finders, _section("interfaces", _interfaces(None)), *fixed]
        return "\n".join(shown), 2
    address, why = _address(settings)
    device, refused = _look(settings)
    shown = [
        _section("world", _world(settings)),
        _section("found", [("", reason) for reason in settings.reasons]),
        finders,
        _section("settings", [*_settings(settings, device), ("address", f"{address or 'none'} ({why})")]),
        _section("device", _device(device, refused)),
        _section("interfaces", _interfaces(address)),
        *fixed,
    ]
    # Links and devices that were asked for by name must work; auto takes what does.
    works = address is not None and (settings.links == AUTO or named(settings.links).why_unsupported() is None)
    works = works and refused is None and _lack(settings.transport, device) is None
    return "\n".join(shown), 0 if works else 2


def _section(title: str, rows: Iterable[Row]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:{width}}  {text}".rstrip() if width else f"  {text}" for name, text in rows]
    return "\n".join([title, *lines, ""])


def _world(settings: Settings) -> list[Row]:
    return [
        ("source", settings.source),
        ("rank", f"{settings.rank} of {settings.size}"),
        ("local rank", f"{settings.local_rank} of {settings.local_size}"),
        ("host", f"{hostname()} ({host_id()})"),
        ("store", _store(settings)),
        ("token", _token(settings)),
    ]


def _finders(environ: Mapping[str, str]) -> list[Row]:
    """Each finder, and why it was taken or left."""
    findings = survey(environ)
    try:
        chosen = choose(findings)
    except ConfigError:
        chosen = None
    return [(finding.finder.name, finding.describe(chosen)) for finding in findings]


def _token(settings: Settings) -> str:
    if settings.token is not None:
        return "known"
    return "none: a world of one needs none" if settings.channel is None else f"handed over by {settings.channel}"


def _store(settings: Settings) -> str:
    if settings.store is None:
        return "none: a world of one needs none"
    return f"{settings.store} (served by {'rank 0' if settings.serve else 'the launcher'})"


def _settings(settings: Settings, device: DeviceReport) -> list[Row]:
    return [
        ("strategy", settings.strategy),
        ("costs", _costs()),
        ("transport", _transport(settings.transport, device)),
        ("device", settings.device),
        ("timeout", f"{settings.timeout_s:g} s"),
        ("stall after", f"{settings.stall_after_s:g} s"),
        ("lost after", f"{settings.lost_after_s:g} s"),
        ("interface", settings.interface or "by the route to the store"),
        ("dumps to", settings.dump_dir),
        ("timeline in", settings.timeline or "none"),
        ("tls", settings.tls or "off"),
        ("checksum", "on, over TCP" if settings.checksum else "off"),
        ("monitoring", "on" if settings.monitor else "off"),
        ("metrics", "none" if settings.metrics_port is None else f"port {settings.metrics_port} + local rank"),
    ]


def _costs() -> str:
    """Costs that ``auto`` uses."""
    kept = describe_saved()
    if not kept:
        return "the usual ones (kfcomm probe --keep measures those of this host)"
    return f"measured on this host ({kept}; kfcomm probe --forget removes them)"


def _transport(asked: str, device: DeviceReport) -> str:
    """Transport setting, and its effect here. Peers without shared memory use Unix sockets."""
    if asked in LINKS and asked != AUTO:
        unsupported = named(asked).why_unsupported()
        return asked if unsupported is None else f"{asked}: cannot work ({unsupported}); use auto"
    links = f"{_within_a_host()} within a host, {TCP.title} between hosts"
    if asked == AUTO:
        return f"{AUTO}: {links}"
    lack = _lack(asked, device)
    works = f"{named(asked).title} for device memory" if lack is None else f"cannot work ({lack}); use auto"
    return f"{asked}: {works}; for host memory {links}"


def _lack(asked: str, device: DeviceReport) -> str | None:
    """The reason why a transport of device memory cannot work here; None if it can, and for other transports."""
    if asked == "ipc" and not device.exports:
        return device.lack or "memory of the device cannot be exported"
    return device.lack if asked == "nccl" and not device.backend else None


def _within_a_host() -> str:
    """The transport that ``auto`` takes between processes of this host, and why not the preferred one, if so."""
    obstacle = ""
    for transport in selected(AUTO):
        unsupported = transport.why_unsupported()
        if unsupported is None:
            return transport.title + obstacle
        obstacle = obstacle or f" ({unsupported})"
    return f"nothing{obstacle}"


def _look(settings: Settings) -> tuple[DeviceReport, str | None]:
    """Device report for the others, and the reason why this process would not start, if any."""
    try:
        own = look_for_device(settings)
    except ConfigError as error:
        return DeviceReport(lack=str(error)), str(error)
    if own.device is not None:
        own.device.close()
    return own.report, None


def _device(report: DeviceReport, refused: str | None) -> list[Row]:
    """Device, driver, backend of collectives, and what is missing."""
    rows = [("device", f"{report.kind}: {report.model} ({report.uuid})" if report.kind else "none")]
    if report.kind:
        rows.append(("driver", f"for CUDA up to {driver_version(report.driver)}"))
    if report.backend:
        rows.append(("backend", backend_in_words(report.backend, report.backend_version)))
    if refused is not None:
        rows.append(("error", refused))
    elif report.lack:
        rows.append(("lacks", report.lack))
    return rows


def _address(settings: Settings) -> tuple[str | None, str]:
    """Address to listen at, or None, and the reason."""
    towards = None if settings.store is None else host_and_port(settings.store)
    try:
        address = choose_address(settings.interface, towards)
    except KfcommError as error:
        return None, str(error)
    if settings.interface is not None:
        return address, f"interface {settings.interface}"
    return address, "a world of one" if towards is None else f"the route to {towards[0]}"


def _interfaces(chosen: str | None) -> list[Row]:
    return [(each.name, each.address + ("  <- chosen" if each.address == chosen else "")) for each in interfaces()]


def _links() -> list[Row]:
    rows = []
    for transport in TRANSPORTS:
        if transport.has_links:
            unsupported = transport.why_unsupported()
            works = "yes" if unsupported is None else "no "
            rows.append((transport.name, f"{works}  {unsupported or transport.about}"))
    return rows


def _versions() -> list[Row]:
    version, protocol = versions()
    return [
        ("kfcomm", f"{version} (protocol {protocol})"),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        *((name, _installed(name)) for name in ("numpy", "msgpack", "aiohttp", "uvloop")),
        ("torch", _torch()),
    ]


def _torch() -> str:
    version = _installed("torch")
    why = why_too_old(version) if version[0].isdigit() else ""
    return f"{version} ({why})" if why else version


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"

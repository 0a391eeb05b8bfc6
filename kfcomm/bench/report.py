"""Report of a benchmark: results so far, as text, JSON and page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from kfcomm.bench.devices import in_words
from kfcomm.bench.events import Begun, Event, Failed, Measured
from kfcomm.bench.figures import Result
from kfcomm.bench.suite import Place, Suite
from kfcomm.bench.table import COLUMNS, Table
from kfcomm.common.imports import is_installed, lacking
from kfcomm.errors import ConfigError

_FORMAT = 1


@dataclass(slots=True)
class Report:
    """Report of the events so far.

    Attributes:
        suite: the cases asked for.
        begun: the world, once it is complete.
        results: so far.
        failure: the wrong result, if there is one.
    """

    suite: Suite
    begun: Begun | None = None
    results: list[Result] = field(default_factory=list)
    failure: str | None = None

    def note(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Begun():
                self.begun = event
            case Measured(result):
                self.results.append(result)
            case Failed(message):
                self.failure = message
            case _:
                pass

    def world(self) -> str:
        """One line on the ranks, hosts and interface."""
        if self.begun is None:
            return ""
        hosts = self.begun.hosts
        where = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
        kinds = ", ".join(dict.fromkeys(f"{host['processor']}, {host['usable_cores']} cores" for host in hosts))
        interface = "kfcomm.sync" if self.suite.blocking else "kfcomm, asynchronous"
        devices = f"; {in_words(self.begun.devices)}" if self.begun.devices else ""
        symmetric = "; arrays in symmetric memory" if self.suite.device is Place.SYMMETRIC else ""
        return f"{self.begun.size} ranks on {where} ({kinds}){devices}; {interface}{symmetric}"

    def as_text(self) -> str:
        """World and table; empty without results."""
        return f"{self.world()}\n{Table.of(self.results, COLUMNS).as_text()}\n" if self.results else ""

    def as_json(self) -> dict[str, Any]:
        """Everything: machine, versions, settings, and for each case its times and what follows from them."""
        return {
            "format": _FORMAT,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "ranks": self.begun.size if self.begun else None,
            "hosts": self.begun.hosts if self.begun else (),
            **((self.begun.devices if self.begun else None) or {}),
            "suite": asdict(self.suite),
            "results": [_as_json(result) for result in self.results],
        }

    def as_html(self) -> str:
        """The page."""
        from kfcomm.bench import pages  # imports matplotlib

        return pages.measured(self)


class Shown(Protocol):
    """Report that `Files` can write."""

    def as_json(self) -> dict[str, Any]:
        """Its data."""

    def as_html(self) -> str:
        """Its page; needs matplotlib."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files of a report; None for those that are not wanted."""

    json: Path | None = None
    html: Path | None = None

    def check(self) -> None:
        """Check that the files can be written, before anything is measured.

        Raises:
            ConfigError: a file cannot be written, or matplotlib, which draws the page, is not installed.
        """
        for path in (self.json, self.html):
            if path is not None:
                _try(path)
        if self.html is not None and not is_installed("matplotlib"):
            raise ConfigError(lacking("--html", "matplotlib"))

    def write(self, report: Shown) -> None:
        """Write a report.

        Raises:
            ConfigError: a file cannot be written.
        """
        if self.json is not None:
            _write(self.json, json.dumps(report.as_json(), indent=1) + "\n")
        if self.html is not None:
            _write(self.html, report.as_html())


def _try(path: Path) -> None:
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{str(path)!r} cannot be written: {error.strerror}")


def _as_json(result: Result) -> dict[str, Any]:
    return {
        **asdict(result.case),
        "p50_s": result.p50_s,
        "p99_s": result.p99_s,
        "algbw_gb_per_s": result.algbw,
        "busbw_gb_per_s": result.busbw,
        "correct": True,
        "times_s": result.times_s,
    }

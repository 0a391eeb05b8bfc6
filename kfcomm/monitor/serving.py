"""Endpoints of a process's statistics: for its user's other processes, and for Prometheus if asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kfcomm.monitor import live
from kfcomm.rendezvous.host import choose_address, host_and_port
from kfcomm.rendezvous.settings import Settings

if TYPE_CHECKING:
    from kfcomm.engine.meter import Meter
    from kfcomm.engine.session import Session
    from kfcomm.monitor.records import Statistics


def check(settings: Settings) -> None:
    """Refuse, before anything is open, what cannot work.

    Raises:
        ConfigError: see ``metrics.check``.
    """
    if settings.metrics_port is not None:
        from kfcomm.monitor import metrics

        metrics.check(settings.metrics_port, settings.monitor)


def attend(session: Session, settings: Settings, statistics: Callable[[], Statistics]) -> None:
    """Let others read the statistics of a session, until it is closed.

    Raises:
        ConfigError: the metrics port cannot be used.
    """
    first = session.engine.meter
    if first is None:
        return

    def meter(epoch: int) -> Meter:
        return session.at(epoch).engine.meter or first

    if settings.metrics_port is not None:
        from kfcomm.monitor import metrics

        towards = None if settings.store is None else host_and_port(settings.store)
        address = choose_address(settings.interface, towards)
        # who joins later has a port that nobody has or had
        local_rank = session.layout.local_rank(session.rank) if settings.join is None else settings.join
        session.services.append(metrics.attend(address, settings.metrics_port, local_rank, meter, statistics))
    found = live.attend(live.job_name(settings.job, settings.store), session.rank, statistics)
    if found is not None:
        session.services.append(found)

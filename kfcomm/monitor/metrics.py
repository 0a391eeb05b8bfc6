"""The statistics of a process for Prometheus: an endpoint, asked for by a port, that reads them when it is scraped.

Names follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): base units, ``_total`` for what
only grows. The package prometheus-client does the format; it is the extra ``metrics``, imported when a port is set.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kfcomm.common.extras import is_installed, lacking
from kfcomm.engine.meter import PER_OCTAVE, Meter, Tally, bound_s
from kfcomm.engine.traffic import added
from kfcomm.errors import ConfigError
from kfcomm.monitor.attendant import PATIENCE_S, Attendant
from kfcomm.monitor.records import Statistics
from kfcomm.monitor.statistics import OTHERS, OWN, is_own, tallies_of
from kfcomm.transports.base import Counts

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kfcomm.engine.earlier import Earlier

MAX_LABELLED_KEYS = 256
"""Keys with series of their own, the first that were used; the others are ``(others)`` together, and those of kfcomm
itself ``(kfcomm itself)``."""
BOUNDS = range(-20 * PER_OCTAVE, 11 * PER_OCTAVE, 2 * PER_OCTAVE)
"""Buckets whose upper bounds are those of the histogram: from 1 µs to 17 minutes, each four times the one before."""


def check(port: int, monitor: bool) -> None:
    """Refuse a metrics port that cannot work whatever the world is.

    Raises:
        ConfigError: monitoring is off, or prometheus-client is missing.
    """
    if not monitor:
        raise ConfigError(f"metrics_port={port} needs monitoring, which is off: leave monitor=False out")
    if not is_installed("prometheus_client"):
        raise ConfigError(lacking(f"metrics_port={port}", "prometheus_client"))


def attend(
    address: str, port: int, local_rank: int, meter: Callable[[int], Meter], statistics: Callable[[], Statistics]
) -> Attendant:
    """Answer Prometheus at ``port + local_rank`` of an address; ``meter`` gives the meter of an epoch.

    Raises:
        ConfigError: that port is taken, out of range, or not permitted; names it.
    """
    from prometheus_client import CollectorRegistry, MetricsHandler

    mine = port + local_rank
    if mine > 65535:
        raise ConfigError(f"metrics_port={port}: port {mine} of local rank {local_rank} is out of range")
    registry = CollectorRegistry()
    registry.register(_Collector(meter, statistics))
    handler: Any = type("Handler", (MetricsHandler.factory(registry),), {"timeout": PATIENCE_S})
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, mine))
        listener.listen()
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        of = "" if mine == port else f" (of local rank {local_rank})"
        raise ConfigError(f"metrics_port={port}: port {mine}{of} of {address} {why}") from error

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who has scraped may be gone before the end
            handler(sock, sock.getpeername(), None)

    return Attendant(listener, serve, "kfcomm-metrics")


class _Collector:
    """What ``prometheus_client`` asks at each scrape."""

    def __init__(self, meter: Callable[[int], Meter], statistics: Callable[[], Statistics]) -> None:
        self._meter = meter
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Nothing: or the registry would collect once to find out."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        now = self._statistics()
        meter = self._meter(now.epoch)
        yield from _of_process(now)
        yield from _of_peers(now, meter.earlier)
        yield from _of_strategies(now)
        yield from _of_training(now)
        yield from _of_keys(*tallies_of(meter))


def _of_process(now: Statistics) -> Iterator[Metric]:
    from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

    labels = {"rank": str(now.rank), "size": str(now.size), "strategy": now.strategy}
    yield InfoMetricFamily("kfcomm", "Who this process is.", labels)
    yield GaugeMetricFamily("kfcomm_epoch", "Number of the membership.", now.epoch)
    yield GaugeMetricFamily("kfcomm_size", "Ranks of the epoch.", now.size)
    yield GaugeMetricFamily("kfcomm_event_loop_lag_seconds", "How late the event loop is.", now.loop_lag_s)
    yield GaugeMetricFamily("kfcomm_peak_memory_bytes", "The most memory ever resident.", now.peak_memory_nbytes)
    yield GaugeMetricFamily("kfcomm_slots", "Slots of shared memory that were taken.", now.slots)
    yield GaugeMetricFamily("kfcomm_slots_bytes", "What these may take of its memory.", now.slots_nbytes)
    yield GaugeMetricFamily("kfcomm_symmetric_bytes", "Of arrays in symmetric memory.", now.symmetric_nbytes)


def _of_peers(now: Statistics, earlier: Earlier | None) -> Iterator[Metric]:
    """Traffic with all processes that have, or had in earlier epochs, the rank of a peer: so it only grows."""
    from prometheus_client.metrics_core import CounterMetricFamily

    totals = {(one.rank, one.link): Counts(*(getattr(one, field) for field in Counts._fields)) for one in now.peers}
    waited: dict[int, float] = {}
    if earlier is not None:
        totals = added(earlier.totals, totals)
        waited = {rank: earlier.waited_s.get(rank, 0.0) for rank, _ in totals}
    for peer in now.peers:
        waited[peer.rank] = waited.get(peer.rank, 0.0) + peer.waited_s
    for name, text, field in (
        ("sent_bytes", "Bytes sent to a peer.", "sent_nbytes"),
        ("received_bytes", "Bytes received from a peer.", "received_nbytes"),
        ("sent_messages", "Messages sent to a peer.", "sent_messages"),
        ("received_messages", "Messages received from a peer.", "received_messages"),
    ):
        family = CounterMetricFamily(f"kfcomm_{name}", text, labels=("peer", "link"))
        for (rank, link), counts in totals.items():
            family.add_metric((str(rank), link), getattr(counts, field))
        yield family
    family = CounterMetricFamily("kfcomm_waited_seconds", "Waiting for a peer, of all collectives.", labels=("peer",))
    for rank, waited_s in waited.items():
        family.add_metric((str(rank),), waited_s)
    yield family


def _of_strategies(now: Statistics) -> Iterator[Metric]:
    from prometheus_client.metrics_core import GaugeMetricFamily

    for name, text, field in (
        ("throughput", "Of the latest monitored all_reduce.", "throughput"),
        ("reference_throughput", "What is to be expected.", "reference"),
    ):
        family = GaugeMetricFamily(f"kfcomm_{name}_bytes_per_second", text, labels=("strategy",))
        for one in now.strategies:
            family.add_metric((one.name,), getattr(one, field))
        yield family


def _of_training(now: Statistics) -> Iterator[Metric]:
    from prometheus_client.metrics_core import GaugeMetricFamily

    if now.gauges:
        family = GaugeMetricFamily("kfcomm_training", "What kfcomm.train says, by quantity.", labels=("quantity",))
        for name, value in now.gauges.items():
            family.add_metric((name,), value)
        yield family


def _of_keys(tallies: dict[str, Tally], others: Tally | None) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily

    own = [tallies.pop(name) for name in [*tallies] if is_own(name)]
    names = list(tallies)
    rest = [tallies[name] for name in names[MAX_LABELLED_KEYS:]] + ([] if others is None else [others])
    shown = {name: tallies[name] for name in names[:MAX_LABELLED_KEYS]}
    if rest:
        shown[OTHERS] = Tally.sum(rest)
    if own:
        shown[OWN] = Tally.sum(own)
    whole = Tally.sum(shown.values())
    family = HistogramMetricFamily("kfcomm_collective_duration_seconds", "Collectives, from post to completion.")
    family.add_metric((), list(_cumulated(whole)), whole.total_s)
    yield family
    for name, text, field in (
        ("collectives", "Collectives completed, by name.", "count"),
        ("collective_bytes", "Bytes of their results.", "nbytes"),
        ("collective_seconds", "Seconds from post to completion, of all together.", "total_s"),
        ("collective_failures", "Collectives that failed, by name.", "failures"),
    ):
        counter = CounterMetricFamily(f"kfcomm_{name}", text, labels=("key",))
        for key, tally in shown.items():
            counter.add_metric((key,), getattr(tally, field))
        yield counter


def _cumulated(tally: Tally) -> Iterator[tuple[str, float]]:
    """How many took at most so long, by bound."""
    buckets = dict(tally.buckets)
    for bound in BOUNDS:
        yield f"{bound_s(bound):.9g}", sum(count for bucket, count in buckets.items() if bucket <= bound)
    yield "+Inf", tally.count

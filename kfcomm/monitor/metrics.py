"""The statistics of a process for Prometheus: an endpoint, asked for by a port, that reads them when it is scraped.

Names follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): base units, ``_total`` for what
only grows. The package prometheus-client does the format; it is the extra ``metrics``, imported when a port is set.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.common.imports import is_installed, lacking
from kfcomm.engine.meter import PER_OCTAVE, Meter, Tally, bound_s
from kfcomm.engine.traffic import added
from kfcomm.errors import ConfigError
from kfcomm.monitor.serving import PATIENCE_S, Attendant
from kfcomm.monitor.statistics import OTHERS, OWN, Statistics, is_own, tallies_of
from kfcomm.transports.base import Counts

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

    from kfcomm.engine.traffic import Totals

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
        # Else a job that is started again would find its port taken by connections that have just ended.
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
    """Collector that ``prometheus_client`` calls at each scrape."""

    def __init__(self, meter: Callable[[int], Meter], statistics: Callable[[], Statistics]) -> None:
        self._meter = meter
        self._statistics = statistics

    def describe(self) -> Iterable[Family]:
        """Describe nothing: otherwise the registry would collect once to find out."""
        return ()

    def collect(self) -> Iterator[Family]:
        """All metrics, as they are now."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        now = self._statistics()
        scrape = Scrape.of(now, self._meter(now.epoch))
        yield _info(now)
        yield _durations(scrape)
        for metric in METRICS:
            family = (CounterMetricFamily if metric.grows else GaugeMetricFamily)(
                f"kfcomm_{metric.name}", metric.text, labels=metric.labels
            )
            for labels, value in metric.read(scrape):
                family.add_metric(labels, value)
            if family.samples or not metric.is_optional:
                yield family


@dataclass(frozen=True, slots=True)
class Scrape:
    """Figures at one scrape."""

    now: Statistics  # the statistics of the world of this epoch
    meter: Meter  # of this epoch
    # traffic with all processes that have, or had in earlier epochs, the rank of a peer: so it only grows
    totals: Totals
    waited_s: dict[int, float]  # the same, of the waiting for each rank
    keys: dict[str, Tally]  # calls by name, of all epochs; those beyond ``MAX_LABELLED_KEYS`` together

    @classmethod
    def of(cls, now: Statistics, meter: Meter) -> Scrape:
        """Read what the metrics need."""
        totals = {(one.rank, one.link): Counts(*(getattr(one, field) for field in Counts._fields)) for one in now.peers}
        waited_s: dict[int, float] = {}
        earlier = meter.earlier
        if earlier is not None:
            totals = added(earlier.totals, totals)
            waited_s = {rank: earlier.waited_s.get(rank, 0.0) for rank, _ in totals}
        for peer in now.peers:
            waited_s[peer.rank] = waited_s.get(peer.rank, 0.0) + peer.waited_s
        return cls(now, meter, totals, waited_s, _labelled(*tallies_of(meter)))


Values: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and of the metric."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a line of ``METRICS``."""

    name: str  # without ``kfcomm_``, and ``_total`` where it grows
    text: str  # for people
    read: Callable[[Scrape], Values]  # gives its values at a scrape
    labels: tuple[str, ...] = ()  # their names
    grows: bool = False  # it is a counter, else a gauge
    is_optional: bool = False  # it is left out where it has no values


def _of_process(name: str, text: str, field: str) -> Metric:
    return Metric(name, text, lambda scrape: [((), getattr(scrape.now, field))])


def _of_peers(name: str, text: str, field: str) -> Metric:
    def read(scrape: Scrape) -> Values:
        return [((str(rank), link), getattr(counts, field)) for (rank, link), counts in scrape.totals.items()]

    return Metric(name, text, read, ("peer", "link"), grows=True)


def _of_paths(name: str, text: str, field: str, *, grows: bool = False) -> Metric:
    """By peer, over TCP; those that grow begin anew with each connection."""
    return Metric(
        name, text,
        lambda scrape: [((str(one.rank),), getattr(one.path, field)) for one in scrape.now.peers if one.path],
        ("peer",), grows=grows, is_optional=True,
    )  # fmt: skip


def _of_strategies(name: str, text: str, field: str) -> Metric:
    return Metric(
        name, text, lambda scrape: [((one.name,), getattr(one, field)) for one in scrape.now.strategies], ("strategy",)
    )


def _of_keys(name: str, text: str, field: str) -> Metric:
    return Metric(
        name, text, lambda scrape: [((key,), getattr(tally, field)) for key, tally in scrape.keys.items()], ("key",),
        grows=True,
    )  # fmt: skip


METRICS = (
    _of_process("epoch", "Number of the membership.", "epoch"),
    _of_process("size", "Ranks of the epoch.", "size"),
    _of_process("event_loop_lag_seconds", "How late the event loop is.", "loop_lag_s"),
    _of_process("peak_memory_bytes", "The most memory ever resident.", "peak_memory_nbytes"),
    _of_process("slots", "Slots of shared memory that were taken.", "slots"),
    _of_process("slots_bytes", "What these may take of its memory.", "slots_nbytes"),
    _of_process("symmetric_bytes", "Of arrays in symmetric memory.", "symmetric_nbytes"),
    _of_peers("sent_bytes", "Bytes sent to a peer.", "sent_nbytes"),
    _of_peers("received_bytes", "Bytes received from a peer.", "received_nbytes"),
    _of_peers("sent_messages", "Messages sent to a peer.", "sent_messages"),
    _of_peers("received_messages", "Messages received from a peer.", "received_messages"),
    _of_paths("round_trip_seconds", "Least round trip to a peer, over TCP.", "round_trip_s"),
    _of_paths("delivery_rate_bytes_per_second", "What the way to a peer carried lately, over TCP.", "delivery_rate"),
    _of_paths("retransmits", "TCP segments that were sent to a peer again.", "retransmits", grows=True),
    Metric(
        "waited_seconds", "Waiting for a peer, of all collectives.",
        lambda scrape: [((str(rank),), waited_s) for rank, waited_s in scrape.waited_s.items()], ("peer",), grows=True,
    ),
    _of_strategies("throughput_bytes_per_second", "Of the latest monitored all_reduce.", "throughput"),
    _of_strategies("reference_throughput_bytes_per_second", "What is to be expected.", "reference"),
    Metric(
        "training", "What kfcomm.train says, by quantity.",
        lambda scrape: [((name,), value) for name, value in scrape.now.gauges.items()], ("quantity",), is_optional=True,
    ),
    _of_keys("collectives", "Collectives completed, by name.", "count"),
    _of_keys("collective_bytes", "Bytes of their results.", "nbytes"),
    _of_keys("collective_seconds", "Seconds from post to completion, of all together.", "total_s"),
    _of_keys("collective_failures", "Collectives that failed, by name.", "failures"),
)  # fmt: skip
"""All metrics but the histogram of durations and the information about the process. One more is one more line here,
and what it reads, which may be a field of the meter or of the statistics."""


def _info(now: Statistics) -> Family:
    from prometheus_client.metrics_core import InfoMetricFamily

    labels = {"rank": str(now.rank), "size": str(now.size), "strategy": now.strategy}
    return InfoMetricFamily("kfcomm", "Who this process is.", labels)


def _labelled(tallies: dict[str, Tally], others: Tally | None) -> dict[str, Tally]:
    own = [tallies.pop(name) for name in [*tallies] if is_own(name)]
    names = list(tallies)
    rest = [tallies[name] for name in names[MAX_LABELLED_KEYS:]] + ([] if others is None else [others])
    labelled = {name: tallies[name] for name in names[:MAX_LABELLED_KEYS]}
    if rest:
        labelled[OTHERS] = Tally.sum(rest)
    if own:
        labelled[OWN] = Tally.sum(own)
    return labelled


def _durations(scrape: Scrape) -> Family:
    from prometheus_client.metrics_core import HistogramMetricFamily

    whole = Tally.sum(scrape.keys.values())
    family = HistogramMetricFamily("kfcomm_collective_duration_seconds", "Collectives, from post to completion.")
    family.add_metric((), list(_cumulated(whole)), whole.total_s)
    return family


def _cumulated(tally: Tally) -> Iterator[tuple[str, float]]:
    """Number of durations up to each bound."""
    buckets = dict(tally.buckets)
    for bound in BOUNDS:
        yield f"{bound_s(bound):.9g}", sum(count for bucket, count in buckets.items() if bucket <= bound)
    yield "+Inf", tally.count

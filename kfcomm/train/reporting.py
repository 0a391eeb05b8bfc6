"""Where figures of training are shown: a rank's statistics, its Prometheus endpoint, its timeline."""

from __future__ import annotations

from collections.abc import Mapping

from kfcomm.train.procedure import Comm


def report(comm: Comm, values: Mapping[str, float], units: Mapping[str, str] | None = None) -> None:
    """Show the latest value of each figure; nothing where monitoring is off.

    Args:
        comm: a communicator of either interface.
        values: by name, in the words of a metric: ``noise_scale``.
        units: of those that have one, for the timeline.
    """
    engine = comm._session.engine
    if engine.meter is not None:
        engine.meter.gauges.update(values)
    if engine.tracer is not None:
        for name, value in values.items():
            engine.tracer.counter(name, (units or {}).get(name, ""), value)

"""Calls of a timeline as OpenTelemetry spans, sent to a collector by OTLP over HTTP.

One world is one trace: a span of the job, and below it a span for each call of each rank. Identifiers are computed from
the job's, so that a timeline that is sent again gives the same spans. Importing this module needs the extra ``otel``.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

from kfcomm.common.imports import lacking
from kfcomm.common.version import __version__
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.monitor.timeline.files import Event, TraceFile, clocks_of, missing_ranks
from kfcomm.monitor.timeline.merge import UNFINISHED, Merged, aligned, calls

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
    from requests import RequestException, Session
except ImportError as error:
    raise ConfigError(lacking("--otlp", "opentelemetry")) from error

TIMEOUT_S = 10.0  # of a request and its retries
SPANS_PER_REQUEST: Final = 512
MAX_INTEGER: Final = (1 << 63) - 1  # of an attribute, and of a time in nanoseconds


def send(traces: Sequence[TraceFile], url: str) -> Merged:
    """Send the calls of all ranks to the collector at ``url``; the result's ``num_events`` is the number of calls.

    Raises:
        ConfigError: ``url`` is not one of HTTP, or a line is malformed.
        KfcommError: the collector did not accept the spans within `TIMEOUT_S`.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"expected --otlp http://HOST:4318, got {url}")
    job = _Job(traces)
    session = Session()
    reasons = _noted(session)
    logging.getLogger("opentelemetry.exporter").addHandler(logging.NullHandler())
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=TIMEOUT_S, session=session)
    spans = job.spans()
    try:
        while batch := list(islice(spans, SPANS_PER_REQUEST)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS or reasons:
                raise KfcommError(f"no spans accepted by {url}: {' '.join(reasons) or 'they cannot be encoded'}")
    except RequestException as error:  # exporter 1.35 raises it
        raise KfcommError(f"no spans accepted by {url}: {' '.join(reasons)}") from error
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    return Merged(traces, job.clocks, missing_ranks(traces), job.unfinished, job.num_calls)


class _Job:
    """Spans of one job, in the order of the files."""

    def __init__(self, traces: Sequence[TraceFile]) -> None:
        self.clocks = clocks_of(traces)
        self.unfinished: Counter[int] = Counter()
        self.num_calls = 0
        self._traces = traces
        self._about = first = traces[0].about
        # The wall clock less the clock of rank 0.
        self._offset_ns = round(first.time_s * 1e9) - self.clocks[first.rank].on_rank_0(first.started_ns)
        self._resource = Resource.create({"service.name": _clean(first.job), "kfcomm.version": __version__})

    def spans(self) -> Iterator[ReadableSpan]:
        """One for each call of each rank, and at last that of the job."""
        starts = [self.clocks[one.about.rank].on_rank_0(one.about.started_ns) for one in self._traces]
        until_ns = max(starts)
        for trace in self._traces:
            rank = trace.about.rank
            for begin, end in calls(aligned(trace, self.clocks[rank])):
                self.num_calls += 1
                self.unfinished[rank] += end["args"].get("outcome") == UNFINISHED
                until_ns = max(until_ns, end["ts"])
                yield self._call(rank, begin, end)
        size = {"kfcomm.size": self._about.size}
        yield self._span(f"job {self._about.job}", (), min(starts), until_ns, attributes=size)

    def _call(self, rank: int, begin: Event, end: Event) -> ReadableSpan:
        args, name, outcome = begin["args"], begin["name"], end["args"].get("outcome")
        known = {name: args.get(name) for name in ("verb", "strategy", "group", "seq")}
        failed = Status(StatusCode.ERROR, _clean(str(end["args"].get("error", outcome))))
        options = {
            "parent": self._context(()),
            "attributes": _attributes({**known, "key": name, "nbytes": args.get("bytes"), "rank": rank}),
            "status": Status(StatusCode.OK) if outcome == "completed" else failed,
        }
        call = (rank, known["group"], name, known["seq"])
        return self._span(f"{known['verb']} {name}", call, begin["ts"], end["ts"], **options)

    def _span(self, name: str, call: tuple[object, ...], start_ns: int, end_ns: int, **options: Any) -> ReadableSpan:
        """A span; its times are given by the clock of rank 0."""
        start_ns, end_ns = (min(max(0, ns + self._offset_ns), MAX_INTEGER) for ns in (start_ns, max(start_ns, end_ns)))
        options |= {"resource": self._resource, "instrumentation_scope": InstrumentationScope("kfcomm", __version__)}
        return ReadableSpan(_clean(name), self._context(call), start_time=start_ns, end_time=end_ns, **options)

    def _context(self, call: tuple[object, ...]) -> SpanContext:
        trace_id, span_id = _digest(16, self._about.job), _digest(8, self._about.job, *call)
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _attributes(found: dict[str, Any]) -> dict[str, str | int]:
    """Attributes, without values of other types: a file may hold anything."""
    integers = {name: value for name, value in found.items() if isinstance(value, int) and abs(value) <= MAX_INTEGER}
    texts = {name: _clean(value) for name, value in found.items() if isinstance(value, str)}
    return {f"kfcomm.{name}": value for name, value in (integers | texts).items()}


def _clean(text: str) -> str:
    """The text without lone surrogates, which protobuf refuses."""
    return text.encode("utf-8", "replace").decode()


def _digest(nbytes: int, *parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=nbytes).digest())


def _noted(session: Any) -> list[str]:
    """How the last request of a session failed; empty if it did not. The exporter itself only logs it."""
    reasons: list[str] = []
    request = session.request

    def requested(*args: Any, **options: Any) -> Any:
        handled = sys.exception()
        try:
            response = request(*args, **options)
        except RequestException as error:
            cause: BaseException = error
            while (inner := cause.__cause__ or cause.__context__) and inner is not handled:
                cause = inner
            reasons[:] = [getattr(cause, "strerror", None) or str(cause)]
            raise
        # The exporter takes a redirection for a success.
        reasons[:] = [] if 200 <= response.status_code < 300 else [f"{response.status_code} {response.reason}"]
        return response

    session.request = requested
    return reasons

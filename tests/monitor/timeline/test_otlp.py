"""Timelines sent to an OpenTelemetry collector: `kfcomm timeline merge --otlp`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kfcomm import __version__
from kfcomm.cli import main
from kfcomm.errors import KfcommError
from kfcomm.monitor.timeline import otlp, read_files
from kfcomm.testing import run_ranks, world
from tests.monitor.timeline.traces import about, collective, record, sampled, written
from tests.support import free_port

SECOND = 1_000_000_000


class Collector(ThreadingHTTPServer):
    """Collector on loopback that keeps requests; answers with ``status``."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Span]:
        """Spans in the order of arrival."""
        parts = [part for request in self.requests for part in request.resource_spans]
        return [span for part in parts for scope in part.scope_spans for span in scope.spans]

    def calls(self) -> list[dict[str, Any]]:
        """Attributes of calls."""
        return [attributes(span) for span in self.spans() if span.parent_span_id]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


def attributes(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time than the exporter waits before it retries."""
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.5)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sent(folder: Path, url: str) -> Result:
    return CliRunner().invoke(main, ["timeline", "merge", str(folder), "--otlp", url])


def two_ranks(folder: Path) -> None:
    """Rank 1's clock is 5 seconds behind; both began at the same moment."""
    first = about(job="job", started_ns=1000, time_s=1_800_000_000.0)
    written(folder / "kfcomm-0.trace.json", [first, *collective(0, "grad/0", 10, 30)])
    second = about(job="job", rank=1, host=1, started_ns=1000 - 5 * SECOND, time_s=1_800_000_001.0)
    failed = collective(1, "loss", 40 - 5e6, 50 - 5e6, outcome="failed", strategy="star", bytes=4)
    failed[1]["args"]["error"] = "rank 0 was lost"
    own = [*collective(1, "grad/0", 20 - 5e6, 31 - 5e6), *failed, *collective(1, "open", 60 - 5e6, None)]
    clock = sampled(1, 0, 5 * SECOND, 10)
    written(folder / "kfcomm-1.trace.json", [second, clock, *own], whole=False)


def test_calls_are_spans_of_one_trace_at_their_real_times(tmp_path: Path, collector: Collector) -> None:
    two_ranks(tmp_path)
    done = sent(tmp_path, collector.url)
    assert done.exit_code == 0, done.output
    assert f"{collector.url}: 4 calls of 2 ranks" in done.output
    assert "breaks off (its process was killed, or still runs); 1 collectives unfinished" in done.output
    (request,) = collector.requests
    (part,) = request.resource_spans
    assert attributes(part.resource).items() >= {"service.name": "job", "kfcomm.version": __version__}.items()
    *calls, job = collector.spans()
    assert (job.name, attributes(job)) == ("job job", {"kfcomm.size": 2})
    assert {span.trace_id for span in (job, *calls)} == {job.trace_id}
    assert {span.parent_span_id for span in calls} == {job.span_id}
    assert len({span.span_id for span in (job, *calls)}) == 5
    began_ns = 1_800_000_000 * SECOND - 1000
    times = [(span.start_time_unix_nano - began_ns, span.end_time_unix_nano - began_ns) for span in calls]
    assert times == [(10_000, 30_000), (20_000, 31_000), (40_000, 50_000), (60_000, 60_000)]
    assert (job.start_time_unix_nano - began_ns, job.end_time_unix_nano - began_ns) == (1000, 60_000)
    usual = {"verb": "all_reduce", "nbytes": 8, "strategy": "ring", "group": "world", "seq": 0}
    assert collector.calls() == [
        {f"kfcomm.{name}": value for name, value in {**usual, **own}.items()}
        for own in (
            {"key": "grad/0", "rank": 0},
            {"key": "grad/0", "rank": 1},
            {"key": "loss", "rank": 1, "strategy": "star", "nbytes": 4},
            {"key": "open", "rank": 1},
        )
    ]
    assert [span.name for span in calls][::2] == ["all_reduce grad/0", "all_reduce loss"]
    good, bad = Status.STATUS_CODE_OK, Status.STATUS_CODE_ERROR
    outcomes = [(span.status.code, span.status.message) for span in calls]
    assert outcomes == [(good, ""), (good, ""), (bad, "rank 0 was lost"), (bad, "unfinished")]


def test_a_timeline_that_is_sent_again_gives_the_same_spans(tmp_path: Path, collector: Collector) -> None:
    two_ranks(tmp_path)
    for _ in range(2):
        otlp.send(read_files([tmp_path]), f"{collector.url}/")
    assert collector.requests[0] == collector.requests[1]


@pytest.mark.asyncio
async def test_a_recorded_job_is_sent_in_batches(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "SPANS_PER_REQUEST", 4)
    async with world(3) as comms:
        record(comms, tmp_path)

        async def rank(comm: Any) -> None:
            for step in range(5):
                await comm.all_reduce(1.0, name=f"step/{step}")

        await run_ranks(comms, rank)
    found = otlp.send(read_files([tmp_path]), collector.url)
    calls = collector.calls()
    assert found.num_events == len(calls) == len(collector.spans()) - 1
    assert len(collector.requests) == -(-len(collector.spans()) // 4)
    for step in range(5):
        assert [one["kfcomm.rank"] for one in calls if one["kfcomm.key"] == f"step/{step}"] == [0, 1, 2]


def test_malformed_values_are_left_out(tmp_path: Path, collector: Collector) -> None:
    args = {"bytes": 1 << 70, "strategy": None, "group": ["world"], "verb": "\ud800", "seq": "0"}
    events = collective(0, "\udfff", -1e15, 1e18, **args)
    written(tmp_path / "kfcomm-0.trace.json", [about(job="\ud800"), *events])
    otlp.send(read_files([tmp_path]), collector.url)
    assert collector.calls() == [{"kfcomm.key": "?", "kfcomm.rank": 0, "kfcomm.verb": "?", "kfcomm.seq": "0"}]
    assert collector.spans()[0].name == "? ?"


def test_a_missing_collector_is_an_error_in_one_line(tmp_path: Path, hasty: None) -> None:
    two_ranks(tmp_path)
    url = f"http://127.0.0.1:{free_port()}"
    done = sent(tmp_path, url)
    assert (done.exit_code, done.stderr) == (1, f"kfcomm: error: no spans accepted by {url}: Connection refused\n")


def test_a_timeline_sent_while_another_error_is_handled_names_its_own(tmp_path: Path, hasty: None) -> None:
    two_ranks(tmp_path)
    traces, url = read_files([tmp_path]), f"http://127.0.0.1:{free_port()}"
    try:
        raise ValueError("the job has failed")
    except ValueError:
        with pytest.raises(KfcommError, match=f"no spans accepted by {url}: Connection refused"):
            otlp.send(traces, url)


@pytest.mark.parametrize("status", [301, 404, 503])
def test_a_collector_that_refuses_is_an_error_in_one_line(
    tmp_path: Path, collector: Collector, hasty: None, status: int
) -> None:
    two_ranks(tmp_path)
    collector.status = status
    done = sent(tmp_path, collector.url)
    error = f"kfcomm: error: no spans accepted by {collector.url}: {status} {HTTPStatus(status).phrase}\n"
    assert (done.exit_code, done.stderr) == (1, error)


def test_a_silent_collector_is_an_error_in_one_line(tmp_path: Path, hasty: None) -> None:
    two_ranks(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = sent(tmp_path, url)
    assert (done.exit_code, done.stderr) == (1, f"kfcomm: error: no spans accepted by {url}: timed out\n")


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317"])
def test_other_schemes_are_refused(tmp_path: Path, url: str) -> None:
    two_ranks(tmp_path)
    done = sent(tmp_path, url)
    assert (done.exit_code, done.stderr) == (2, f"kfcomm: error: expected --otlp http://HOST:4318, got {url}\n")


@pytest.mark.parametrize(
    ("options", "given"), [((), "neither"), (("-o", "x.json", "--otlp", "http://localhost:4318"), "both")]
)
def test_a_merge_has_one_destination(tmp_path: Path, options: tuple[str, ...], given: str) -> None:
    two_ranks(tmp_path)
    done = CliRunner().invoke(main, ["timeline", "merge", str(tmp_path), *options])
    assert done.exit_code == 2
    assert f"expected --output or --otlp, got {given}" in done.stderr

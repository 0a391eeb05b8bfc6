"""CuPy is here and has started, or every test of this folder is skipped with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.gpu.arrays import library


@pytest.fixture(scope="session", autouse=True)
def gpu_met(request: pytest.FixtureRequest) -> Iterator[None]:
    """The first use of a device, of NCCL and of a framework opens descriptors that stay: no test is to be blamed."""
    if lack := _lack():
        pytest.skip(lack)
    if all(getattr(getattr(item, "module", None), "IN_PROCESSES", False) for item in request.session.items):
        yield  # none of them uses the device in this process
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the device's memory
        if import_module("cupy.cuda.nccl").available:
            _meet_nccl()
        _meet_frameworks()
        yield


def _meet_nccl() -> None:
    cupy, nccl = library("cupy"), import_module("cupy.cuda.nccl")
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    x = cupy.empty(8, "float32")
    comm.allReduce(x.data.ptr, x.data.ptr, 8, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, cupy.cuda.Stream.null.ptr)
    cupy.cuda.Stream.null.synchronize()
    comm.destroy()


def _meet_frameworks() -> None:
    if find_spec("torch") is not None and library("torch").cuda.is_available():
        library("torch").ones(2, device="cuda").sum().item()
    if find_spec("jax") is not None:
        float(library("jax").numpy.ones(2).sum())


def _lack() -> str:
    """Reason why these tests cannot run here; empty if they can."""
    if find_spec("cupy") is None:
        return "CuPy is not installed here"
    cupy = library("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy cannot use the GPU: {error}"
    return ""


_ran: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts the tests that were not skipped, and tells at once of one that fails."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(report.longrepr if crash is None else crash.message)[:400].replace("\n", " ")
        print(f"{report.nodeid} FAILED: {why}", file=sys.__stderr__, flush=True)
    if report.when == "call" and "gpu" in report.keywords and not report.skipped:
        _ran.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says how many ran, where it was asked for them: a run that skips them all looks like one in which all is well."""
    if config.option.markexpr == "gpu":
        terminalreporter.write_line(f"{len(_ran)} tests ran on a GPU")

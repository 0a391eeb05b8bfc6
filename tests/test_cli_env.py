import os
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from kfcomm.arrays.devices import DeviceReport
from kfcomm.cli import main
from kfcomm.cli.commands.env import explain
from kfcomm.errors import ConfigError
from tests.launch.launched import TOKEN, command, environ, finished
from tests.stubs import StubDevice


def test_alone() -> None:
    text, code = explain({})
    assert code == 0
    assert "alone" in text
    assert "0 of 1" in text
    assert "127.0.0.1  <- chosen" in text


def test_an_interrupt_in_a_command_ends_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kfcomm.cli.commands.env.explain", interrupted)
    done = CliRunner().invoke(main, ["env"])
    assert (done.exit_code, done.output) == (130, "")


def test_a_launched_rank() -> None:
    done = finished("run", "-n", "2", *command("env"))
    assert done.returncode == 0, done
    assert "[1]   rank        1 of 2" in done.stdout
    assert "(served by the launcher)" in done.stdout


def test_the_reasons_are_told_and_the_token_is_not() -> None:
    text, code = explain(
        {"KFCOMM_RANK": "1", "KFCOMM_SIZE": "2", "KFCOMM_STORE": "http://127.0.0.1:5", "KFCOMM_TOKEN": TOKEN}
    )
    assert code == 0
    assert "KFCOMM_RANK=1, KFCOMM_SIZE=2" in text
    assert "token: KFCOMM_TOKEN" in text
    assert TOKEN not in text


def test_impossible_settings_are_shown_with_the_rest() -> None:
    text, code = explain({"KFCOMM_RANK": "1"})
    assert code == 2
    assert "KFCOMM_SIZE is not" in text
    assert "interfaces" in text


def test_an_interface_that_does_not_exist() -> None:
    text, code = explain({"KFCOMM_INTERFACE": "no-such-interface"})
    assert code == 2
    assert "no-such-interface" in text


def test_links_and_versions_are_listed() -> None:
    text, _ = explain({})
    for word in ("tcp ", "unix", "numpy", "python", "protocol"):
        assert word in text


def row(text: str, name: str) -> str:
    """Text after this name."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split(None, 1)[1]


def test_transport_that_auto_takes_within_a_host_is_shown() -> None:
    text, _ = explain({})
    assert row(text, "transport") == "auto: shared memory within a host, TCP between hosts"
    assert row(text, "shm") == "yes  between processes of one host, through memory of both"


def test_why_memory_cannot_be_shared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    reason = "this system has no memfd_create"
    text, code = explain({})
    assert code == 0
    assert row(text, "transport") == f"auto: Unix sockets ({reason}) within a host, TCP between hosts"
    assert row(text, "shm") == f"no   {reason}"
    text, code = explain({"KFCOMM_TRANSPORT": "shm"})
    assert code == 2
    assert row(text, "transport") == f"shm: cannot work ({reason}); use auto"
    assert row(explain({"KFCOMM_TRANSPORT": "tcp"})[0], "transport") == "tcp"


def section(text: str, title: str) -> list[str]:
    """The rows of a section, without their indent."""
    (found,) = [part for part in text.split("\n\n") if part.split("\n")[0] == title]
    return [line[2:] for line in found.strip().splitlines()[1:]]


def finds(monkeypatch: pytest.MonkeyPatch, report: DeviceReport) -> StubDevice:
    """The device that is found from now on."""
    device = StubDevice(report)
    monkeypatch.setattr(
        "kfcomm.arrays.devices.routes.find", lambda choice, local_rank: (device if report.kind else None, report)
    )
    monkeypatch.setattr("kfcomm.transports.nccl.Nccl", object)
    return device


def test_a_device_is_shown_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    device = finds(monkeypatch, DeviceReport("cuda", "GPU-8f1c", "NVIDIA H100", 13010, "nccl", 23207))
    text, code = explain({"KFCOMM_TRANSPORT": "nccl", "KFCOMM_DEVICE": "cuda"})
    assert code == 0
    assert section(text, "device") == [
        "device   cuda: NVIDIA H100 (GPU-8f1c)",
        "driver   for CUDA up to 13.1",
        "backend  NCCL 2.32.7",
    ]
    assert "  device       cuda\n" in text
    assert row(text, "transport").startswith("nccl: NCCL for device memory; for host memory ")
    assert len(device.closed_by) == 1


def test_missing_parts_of_a_device_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, DeviceReport("cuda", "GPU-8f1c", "NVIDIA H100", 13010, lack="CuPy has no NCCL"))
    text, code = explain({})
    assert code == 0
    assert section(text, "device")[2:] == ["lacks   CuPy has no NCCL"]
    text, code = explain({"KFCOMM_TRANSPORT": "nccl"})
    assert code == 2
    assert row(text, "transport").startswith("nccl: cannot work (CuPy has no NCCL); use auto; for host memory ")


def test_memory_that_cannot_be_mapped_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    report = DeviceReport("cuda", "GPU-8f1c", "NVIDIA H100", 13010, "nccl", 23207)
    finds(monkeypatch, report)
    text, code = explain({"KFCOMM_TRANSPORT": "ipc"})
    assert code == 2
    assert row(text, "transport").startswith(
        "ipc: cannot work (memory of the device cannot be exported); use auto; for "
    )
    finds(monkeypatch, replace(report, exports=1))
    text, code = explain({"KFCOMM_TRANSPORT": "ipc"})
    assert code == 0
    assert row(text, "transport").startswith("ipc: CUDA IPC for device memory; for host memory ")


def test_missing_device_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, DeviceReport(lack="no driver"))
    text, code = explain({})
    assert (code, section(text, "device")) == (0, ["device  none", "lacks   no driver"])
    text, code = explain({"KFCOMM_DEVICE": "none"})
    assert (code, section(text, "device")) == (0, ["device  none", "lacks   device 'none' was asked for"])


def test_a_device_that_is_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(choice: str, local_rank: int) -> None:
        raise ConfigError(f"device is {choice}, but the driver is missing")

    monkeypatch.setattr("kfcomm.arrays.devices.routes.find", refuse)
    text, code = explain({"KFCOMM_DEVICE": "cuda:1"})
    assert code == 2
    assert section(text, "device") == ["device  none", "error   device is cuda:1, but the driver is missing"]


def test_the_option_becomes_the_variable() -> None:
    program = "import os; print(os.environ.get('KFCOMM_DEVICE'), os.environ.get('KFCOMM_TRANSPORT'))"
    run = ("run", "-n", "1", "--device", "cuda:01", "--transport", "nccl", sys.executable, "-c", program)
    assert "cuda:1 nccl" in finished(*run).stdout
    done = finished("run", "-n", "1", "--device", "gpu", "true")
    assert done.returncode == 2
    assert "device='gpu' must be auto, none, cuda, or cuda:N" in " ".join(done.stderr.split())


def test_columns_are_aligned() -> None:
    rows = explain({})[0].split("\n\n")[0].splitlines()[1:]
    assert [row[:14] for row in rows] == [f"  {row[2:12].strip():10}  " for row in rows]


def test_as_a_command() -> None:
    done = finished("env", env=environ(KFCOMM_TRANSPORT="pigeon"))
    assert done.returncode == 2
    assert "KFCOMM_TRANSPORT='pigeon'" in done.stdout
    assert finished("env").returncode == 0


def test_each_finder_says_what_it_saw_and_why_it_was_taken_or_left() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    text, code = explain(environ)
    assert code == 0
    assert row(text, "torchrun") == "taken: rank 0 of 1 (RANK=0, WORLD_SIZE=1)"
    assert row(text, "pmi") == "left: rank 0 of 2 (PMI_RANK=0, PMI_SIZE=2); torchrun comes first"
    assert row(text, "flux") == "left: FLUX_TASK_RANK and FLUX_JOB_SIZE are not set"
    assert "(saw KUBERNETES_SERVICE_HOST)" in row(text, "kubernetes")


def test_finders_are_shown_where_the_place_is_unknown() -> None:
    text, code = explain({"JOB_COMPLETION_INDEX": "1", "PBS_NODEFILE": "/no/such/file", "OMPI_COMM_WORLD_RANK": "x"})
    assert code == 2
    assert row(text, "kubernetes").startswith("incomplete: JOB_COMPLETION_INDEX=1")
    assert row(text, "pbs").startswith("incomplete: PBS_NODEFILE=/no/such/file")
    assert row(text, "openmpi").startswith("invalid: OMPI_COMM_WORLD_RANK='x'")

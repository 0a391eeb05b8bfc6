"""Choice of a rank's device, without CUDA and with a small fake of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kfcomm.arrays.devices import cuda, routes
from kfcomm.errors import ConfigError, TransportError


class Refused(RuntimeError):
    """As CuPy calls what CUDA refuses."""


class Runtime:
    """Fake of the CUDA calls before a device is used; one device for each name."""

    CUDARuntimeError = Refused

    def __init__(self, *names: str) -> None:
        self.names = names

    def getDeviceCount(self) -> int:  # noqa: N802
        if not self.names:
            raise Refused("cudaErrorNoDevice: no CUDA-capable device is detected")
        return len(self.names)

    def getDeviceProperties(self, ordinal: int) -> dict[str, bytes]:  # noqa: N802
        if self.names[ordinal] == "broken":
            raise Refused("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable")
        return {"name": self.names[ordinal].encode(), "uuid": bytes([ordinal] * 16)}

    def deviceGetPCIBusId(self, ordinal: int) -> str:  # noqa: N802
        return f"0000:0{ordinal}:00.0"

    def driverGetVersion(self) -> int:  # noqa: N802
        return 13000


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """Plays a host with these devices, and with this NCCL."""

    def play(*names: str, nccl: int = 22803) -> None:
        module = SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime(*names)))
        # The entry without a specification is what `find_spec` reads where a module is loaded already.
        module.__spec__ = SimpleNamespace(name="cupy")
        monkeypatch.setitem(sys.modules, "cupy", module)
        monkeypatch.setattr(routes, "DRIVER_NODES", ("/dev/null",))
        monkeypatch.setattr(cuda, "nccl_version", lambda: nccl)

    return play


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


# --- without ---------------------------------------------------------------------------------------------------------


def test_device_none_gives_no_device() -> None:
    device, report = routes.find("none", 0)
    assert device is None
    assert (report.kind, report.uuid, report.backend) == ("", "", "")
    assert "none" in report.lack


def test_a_host_without_a_driver_has_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "DRIVER_NODES", ("/dev/there/is/no/such/node",))
    device, report = routes.find("auto", 3)
    assert device is None
    assert report.kind == ""
    assert "no NVIDIA GPU" in report.lack


@pytest.mark.usefixtures("no_cupy")
def test_missing_cupy_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "DRIVER_NODES", ("/dev/null",))
    device, report = routes.find("auto", 0)
    assert device is None
    assert "kfcomm[cuda13]" in report.lack
    for choice in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=rf"device is {choice}, but .*\[cuda13\].*\[cuda12\]"):
            routes.find(choice, 0)
    with pytest.raises(ConfigError, match="CuPy"):
        cuda.CudaDevice(0)


@pytest.mark.parametrize(
    "choice", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0x1", "cudaa", "auto:0", "none:0", "0"]
)
def test_invalid_device_setting_is_config_error(choice: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, none, cuda, or cuda:N"):
        routes.find(choice, 0)


def test_looking_imports_nothing() -> None:
    code = (
        "import sys, kfcomm\n"
        "from kfcomm.arrays import on_device\n"
        "from kfcomm.arrays.devices import cuda, host, routes\n"
        "routes.DRIVER_NODES = ()\n"
        "routes.find('auto', 0), routes.find('none', 0), on_device.is_on_device([1])\n"
        "print([name for name in ('cupy', 'torch', 'jax', 'ml_dtypes') if name in sys.modules])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- with ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("local_rank", "ordinal"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_ranks_are_distributed_over_the_devices(host, local_rank: int, ordinal: int) -> None:
    host("first", "second")
    for choice in ("auto", "cuda"):
        device, report = routes.find(choice, local_rank)
        assert device is not None
        assert (device.ordinal, report.model) == (ordinal, ("first", "second")[ordinal])
        assert device.report == report


def test_device_by_number(host) -> None:
    host("first", "second")
    device, _ = routes.find("cuda:1", 0)
    assert device is not None
    assert device.ordinal == 1
    with pytest.raises(ConfigError, match=r"device is cuda:2, but .*only cuda:0 \(first\), cuda:1 \(second\)"):
        routes.find("cuda:2", 0)


def test_report_of_a_cuda_device(host) -> None:
    host("first", "second")
    (_, one), (_, other) = routes.find("cuda:0", 0), routes.find("cuda:1", 0)
    assert (one.kind, one.driver, one.backend, one.backend_version, one.lack) == ("cuda", 13000, "nccl", 22803, "")
    assert one.uuid != other.uuid
    assert routes.find("cuda:0", 7)[1] == one


@pytest.mark.parametrize(
    ("version", "allowed", "shares"), [(23000, "1", 1), (22907, "1", 0), (23207, "0", 0), (23207, None, 0), (0, "1", 0)]
)
def test_sharing_a_device_takes_a_new_nccl_and_its_variable(
    host, monkeypatch: pytest.MonkeyPatch, version: int, allowed: str | None, shares: int
) -> None:
    host("first", nccl=version)
    if allowed is None:
        monkeypatch.delenv(cuda.SHARING_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(cuda.SHARING_VARIABLE, allowed)
    assert routes.find("cuda:0", 0)[1].shares == shares


def test_without_nccl_there_is_a_device_and_a_lack(host) -> None:
    host("first", nccl=0)
    device, report = routes.find("auto", 0)
    assert device is not None
    assert (report.kind, report.backend, report.backend_version) == ("cuda", "", 0)
    assert "NCCL" in report.lack
    assert "kfcomm[cuda13]" in report.lack


@pytest.mark.parametrize("names", [(), ("broken",)], ids=["no device", "a broken one"])
def test_a_driver_without_a_device_that_works(host, names: tuple[str, ...]) -> None:
    host(*names)
    device, report = routes.find("auto", 0)
    assert device is None
    assert "cudaError" in report.lack
    with pytest.raises(ConfigError, match=r"device is cuda, but .*cudaError"):
        routes.find("cuda", 0)


def test_a_device_that_is_not_used_has_nothing_to_close(host) -> None:
    host("first")
    device, _ = routes.find("auto", 0)
    assert device is not None
    device.close()
    device.close()


def test_a_broken_device_is_a_transport_error(host) -> None:
    host("broken")
    with pytest.raises(TransportError, match="cuda:0: cudaErrorDevicesUnavailable"):
        cuda.CudaDevice(0)

import pytest

from kfcomm.arrays.devices.routes import backend_in_words, driver_version


@pytest.mark.parametrize(("number", "text"), [(12040, "12.4"), (13010, "13.1"), (11080, "11.8"), (0, "0.0")])
def test_versions_of_drivers(number: int, text: str) -> None:
    assert driver_version(number) == text


@pytest.mark.parametrize(
    ("backend", "number", "text"),
    [
        ("nccl", 22803, "NCCL 2.28.3"),
        ("nccl", 23207, "NCCL 2.32.7"),
        ("nccl", 2804, "NCCL 2.8.4"),
        ("fake", 1, "fake 1"),
    ],
)
def test_versions_of_backends(backend: str, number: int, text: str) -> None:
    assert backend_in_words(backend, number) == text

import pytest

from kfcomm.arrays.devices.words import backend_in_words, driver_version, ranks_in_words


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


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 2], "ranks 0 and 2"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6 and 7"),
        (range(64), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"),
    ],
)
def test_lists_of_ranks(ranks: range, text: str) -> None:
    assert ranks_in_words(ranks) == text

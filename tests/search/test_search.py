"""The searches run, and find what is there: each for a moment. (Where they are let, it is by ``make search``.)"""

import asyncio
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.netlab import Netlab, even
from tests.programs.__main__ import read_arguments
from tests.search import (
    ctrl_c,
    damaged,
    decoders,
    partitions,
    pulls,
    read_in_place,
    resizes,
    restarts,
    resumed,
    soak,
    voided,
)
from tests.search.__main__ import PARTS
from tests.search.kills import once


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_a_command_that_its_seed_repeats(name: str) -> None:
    assert PARTS[name](Random(5), 5) == PARTS[name](Random(5), 5)


@pytest.mark.parametrize("seed", range(200))
def test_programs_are_run_in_worlds_that_there_can_be(seed: int) -> None:
    _, _, *arguments = PARTS["programs"](Random(seed), seed)
    assert read_arguments(arguments).seed == seed


def test_decoders_read_what_they_are_given_first() -> None:
    for data in decoders.SEEDS:
        decoders.read(data)


def test_other_exceptions_of_decoders_are_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "READERS", (lambda data: data[9],))
    with pytest.raises(IndexError):
        decoders.read(b"\0short")


def test_a_killed_rank_is_found_lost_by_all_others() -> None:
    what, seconds = once(Random(1))
    assert what in ("kill", "stop")
    assert seconds >= 0


def test_blobs_are_whole_beside_a_stopped_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    found: Counter[str] = Counter()
    while not (found["whole"] and found["saved"]):
        found += pulls.once(Random(2), seconds=1.0)


def test_adasum_is_right_beside_a_stopped_rank_that_reads_late(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    found = read_in_place.once(Random(1), seconds=0.3)
    assert min(found["again"], found["group"], found["several"]) > 0


def test_torn_blob_is_found_by_its_checksum() -> None:
    blob = pulls.made(Random(3), 7)
    assert pulls.check(blob) == 7
    with pytest.raises(AssertionError, match="torn copy of save 7"):
        pulls.check(np.append(blob[:-1], [np.uint64(1)]))


@pytest.mark.parametrize("seed", range(2))
def test_interrupted_job_leaves_no_process(seed: int) -> None:
    whom, seconds = ctrl_c.once(Random(seed))
    assert whom in ("all", "launcher", "rank")
    assert seconds >= 0


def test_damaged_checkpoints_are_refused_or_read_right(tmp_path: Path) -> None:
    found = damaged.search(Random(1), tmp_path, 1000)
    assert found.total() == 1000
    assert found["refused"] > 500
    right = damaged.bytes_of(damaged.state_of(4))
    for make in (damaged.written, damaged.written_before):
        assert damaged.outcome(tmp_path / "c.npz", make(tmp_path / "c.npz", 4), right) == "right"


@pytest.mark.parametrize("seed", [1, 2, 90])
def test_jobs_that_are_lost_as_a_whole_go_on_from_their_checkpoint(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    lives, resumed_lives, _ = resumed.search(seed)
    assert lives > resumed_lives


@pytest.mark.slow
def test_processes_that_are_killed_before_their_first_step_are_outlived(tmp_path: Path) -> None:
    assert restarts.Job(Random(1), tmp_path).run()["outlived a death before the first step"]


def test_growth_is_told_from_fluctuation() -> None:
    random = Random(1)
    for kept in (0, 50):  # bytes a second
        samples = [(float(s), 60_000_000 + kept * s + random.choice([0, 25_000_000]), 9) for s in range(600, 7200, 14)]
        floors = [min(part, key=lambda one: one[1]) for part in soak.parts(samples)]
        assert len(floors) == soak.NUM_PARTS
        assert soak.slope(floors) == pytest.approx(kept, abs=1)


@pytest.mark.netns
@pytest.mark.slow
def test_hosts_that_are_cut_off_are_found_lost_by_all_ranks() -> None:
    with Netlab(even(partitions.HOSTS), network="10.77.9.0/24") as lab:
        assert partitions.once(lab, Random(1)) >= 0


def test_failure_ends_search_with_command_to_repeat_it() -> None:
    program = (
        "import sys; from tests.search import __main__ as search; "
        "search.PARTS['kills'] = lambda random, seed: ['-c', 'raise SystemExit(3)']; "
        "sys.argv[1:] = ['--only', 'kills', '--seed', '7']; sys.exit(search.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.endswith("found by: python -c 'raise SystemExit(3)'\n")


def test_a_job_that_is_resized_comes_to_the_size_that_was_asked_for_last(tmp_path: Path) -> None:
    assert resizes.once(tmp_path, 3)[0] > 0


@pytest.mark.parametrize("seed", [2, 5])
def test_guarded_training_is_not_damaged(seed: int) -> None:
    found = voided.once(seed)
    assert found.num_injections > 10
    assert found.num_void > 5


def test_damage_and_lost_samples_are_found() -> None:
    given = voided.Round(3, 1)
    ranks = asyncio.run(voided.trained(given))
    voided.check(given, ranks)
    used, rate, model = ranks[0].trace[7]
    ranks[0].trace[7] = used, rate, model + 1e-6
    with pytest.raises(AssertionError):
        voided.check(given, ranks)
    ranks[0].trace[7] = used & False, rate, model
    with pytest.raises(AssertionError), np.errstate(all="ignore"):
        voided.check(given, ranks)

"""Every example as its reader starts it: real processes, and what they print."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.launch.launched import ROOT, environ, finished

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def four_ranks(name: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """An example under the launcher; warnings are errors there too."""
    program = (sys.executable, "-W", "error", str(EXAMPLES / name))
    return finished("run", "-n", "4", *options, *program, *arguments)


def one_process(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    return subprocess.run(program, env=environ(), capture_output=True, text=True, stdin=subprocess.DEVNULL)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Sorted output of a job, since ranks print in any order; the job must succeed."""
    # a rank that a busy machine starts late makes the others report that their close() waits
    complaints = [line for line in done.stderr.splitlines() if "close() waits for" not in line]
    assert (done.returncode, complaints) == (0, [])
    return sorted(done.stdout.splitlines())


HELLO = [f"[{rank}] rank {rank} of 4: {what}" for rank in range(4) for what in ("low 1, high 4", "total [10. 10. 10.]")]


def test_hello_async() -> None:
    from_rank_0 = ["[0] even ranks: [0, 2]", "[0] strategy auto -> ring: the same total? True"]
    assert lines(four_ranks("hello_async.py")) == sorted(HELLO + from_rank_0)


def test_hello_sync() -> None:
    said = [
        f"[{rank}] rank {rank} of 4: my neighbour sent [{rank or 4}. {rank or 4}. {rank or 4}.]" for rank in range(4)
    ]
    assert lines(four_ranks("hello_sync.py")) == sorted(HELLO + said)


def test_two_groups() -> None:
    grid, error = lines(four_ranks("two_groups.py"))
    assert grid == "[0] a grid of 2 x 2 ranks; each holds 6 of 12 weight rows"
    assert re.fullmatch(r"\[0\] largest error \d\.\de-\d\d; bit-identical on 4 ranks", error)


def test_pipeline_has_the_losses_of_one_process() -> None:
    (said,) = lines(four_ranks("pipeline.py"))
    assert re.fullmatch(r"\[0\] loss 0\.\d+ at first, 0\.0\d+ in the end; of one process: equal", said)


def test_adaptive() -> None:
    """Every strategy is tried, one is kept, and the slow rank is found; times decide which, and if others are tried."""
    said = "\n".join(four_ranks("adaptive.py").stdout.splitlines())
    assert "step 0: AutoStrategy: strategy auto -> star" in said
    tried = re.findall(
        r"^\[0\] step \d+: AutoStrategy: strategy (\w+) -> (\w+)(?: \(.* MB/s .*\))?$", said, re.MULTILINE
    )
    assert tried[:3] == [("auto", "star"), ("star", "ring"), ("ring", "binary_tree")]
    assert re.search(r"AutoStrategy: keeps \w+, the fastest \(star MB/s .*, ring MB/s .*, binary tree MB/s .*\)", said)
    assert re.search(r"ReportStragglers: slow ranks: \[(\d, )?3\] \(own ms \[.*\]\)", said)
    end = rf"^\[0\] steps: 80; changes of the strategy: {len(tried)}; in the end it is {tried[-1][1]}$"
    assert re.search(end, said, re.MULTILINE)


def test_elastic(tmp_path: Path) -> None:
    page = tmp_path / "elastic.html"
    done = four_ranks("elastic.py", "--html", str(page), "--passes", "40", options=("--elastic", "2:6"))
    said = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done
    changes = [line.split(": ", 1)[1] for line in said[:-2]]
    assert changes[0] == "3 ranks go on, without [1]"
    assert " go on, with [4" in changes[1]  # others may come with it, or one by one
    assert all(re.fullmatch(r"[3-6] ranks go on, with(out)? \[\d(, \d)*\]", change) for change in changes)
    assert re.fullmatch(r"\d+ steps; each of 1437 samples was used \[40\] times", said[-2])
    assert re.fullmatch(r"test accuracy: 0\.9\d+ \(wanted: at least 0\.95\)", said[-1])
    assert "samples / s" in page.read_text()


def test_adaptive_training(tmp_path: Path) -> None:
    """The noise scale raises the batch, a fourth worker comes, the link becomes slow; how slow all is matters not."""
    page = tmp_path / "adaptive.html"
    program = (sys.executable, "-W", "error", str(EXAMPLES / "adaptive_training.py"), "--alone", "--html", str(page))
    options = ("-n", "3", "--elastic", "2:4", "--transport", "tcp", "--strategy", "star")
    done = finished("run", *options, *program)
    said = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done
    assert any(re.match(r"step \d+: NoiseScaleBatch: batch size 24 -> 48 \(noise scale ", line) for line in said)
    assert any(re.match(r"step \d+: AskForWorkers: asks for 4 ranks instead of 3 ", line) for line in said)
    raised, workers, link, adaptive = said[-4:]
    assert re.fullmatch(r"the noise scale raised the batch: 24 -> \d+ samples", raised)
    assert workers == "workers: 3 -> 4"
    assert re.fullmatch(
        r"a link was slow from second [\d.]+ on; (strategy \w+ -> \w+|the graphs did not need it)", link
    )
    assert any(re.match(r"step \d+: AvoidSlowLinks: strategy \w+ -> ", line) for line in said)
    assert re.fullmatch(r"adaptive: loss [\d.]+ after [\d.]+ s; below [\d.]+ from second [\d.]+ on", adaptive)
    drawn = page.read_text("utf-8")
    assert all(label in drawn for label in ("loss", "noise scale", "samples / s", "workers", "AskForWorkers"))


@pytest.fixture
def adaptive_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("adaptive_page")


def test_decisions_that_are_near_have_one_mark(adaptive_page: ModuleType) -> None:
    decisions = [(1, 0.0), (3, 0.9), (4, 1.0), (9, 1.5)]
    assert adaptive_page.marks(decisions, 1.0) == [decisions[:2], decisions[2:]]
    shown = [adaptive_page.numbers(one) for one in ([7], [7, 8, 9], [7, 9], [7, 9, 12])]
    assert shown == ["7", "7–9", "7, 9", "7 … 12"]


def test_runs_stand_beside_each_other(
    adaptive_page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The adapting run first; it must answer the slow link."""
    rows = [adaptive_page.Row(n, 4 - n, 50.0 + n, 24 << n, 100.0, 3 + n // 2) for n in range(4)]
    adaptive = adaptive_page.Run("adaptive", rows, slow_s=1.0)
    rows = [adaptive_page.Row(n, 4.0, 60.0, 24, 50.0, 3) for n in range(4)]
    static = adaptive_page.Run("batch of 24", rows)
    assert not adaptive_page.tell([adaptive, static])
    adaptive.decisions.append(adaptive_page.Decided(2.0, "AvoidSlowLinks", "strategy star -> ring", "<slow>"))
    assert adaptive_page.tell([adaptive, static])
    said = capsys.readouterr().out.splitlines()[-5:]
    assert said[:3] == [
        "the noise scale raised the batch: 24 -> 192 samples", "workers: 3 -> 4",
        "a link was slow from second 1.0 on; strategy star -> ring",
    ]  # fmt: skip
    assert said[4] == "batch of 24: loss 4.000 after 3.0 s; below 4.000 from second 0.0 on"
    adaptive_page.draw([adaptive, static], tmp_path / "page.html")
    drawn = (tmp_path / "page.html").read_text("utf-8")
    assert "batch of 24" in drawn
    assert "&lt;slow&gt;" in drawn


@pytest.mark.parametrize("name", ["hello_async.py", "hello_sync.py", "two_groups.py"])
def test_alone_it_is_a_world_of_one(name: str) -> None:
    done = one_process(name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4" not in done.stdout.splitlines()[0]


def digest(done: subprocess.CompletedProcess[str]) -> str:
    """Output of a successful training, with losses and the change of strategy."""
    out = re.sub(r"^\[0\] ", "", done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0, done
    assert re.findall(r"^epoch +(\d+): loss \d\.\d{4}$", out, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "strategy: auto -> ring\n" in out
    assert "replicas: bit-identical on 4 ranks\n" in out
    accuracy = re.search(r"^test accuracy: (\d\.\d{4})", out, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
    found = re.search(r"^digest of losses and weights: ([0-9a-f]{16})$", out, re.MULTILINE)
    assert found is not None
    return found[1]


def test_digits_give_the_same_bits_over_every_kind_of_link() -> None:
    over_tcp, over_unix = (
        four_ranks("digits.py", "--epochs", "5", options=("--transport", t)) for t in ("tcp", "unix")
    )
    in_memory = one_process("digits.py", "--epochs", "5", "--memory", "4")
    assert digest(over_tcp) == digest(over_unix) == digest(in_memory)
    assert re.search(r"\[0\] training: 100%\|.*\| 110/110 ", over_tcp.stderr)
    assert all(line.startswith("[0] ") for line in (over_tcp.stdout + over_tcp.stderr).splitlines())


def test_digits_that_learned_too_little_are_a_failure() -> None:
    done = one_process("digits.py", "--epochs", "1", "--memory", "2")
    assert done.returncode == 1
    assert "replicas: bit-identical on 2 ranks" in done.stdout

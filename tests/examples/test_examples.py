"""Every example as its reader starts it: real processes, and what they print."""

import re
import subprocess
import sys
from pathlib import Path

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
    """What a job printed, sorted, as ranks print in any order; it must have gone well."""
    assert (done.returncode, done.stderr) == (0, "")
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


def test_adaptive() -> None:
    """Every strategy is tried, one is kept, and the slow rank is found; how fast they are is for nobody to say."""
    said = "\n".join(four_ranks("adaptive.py").stdout.splitlines())
    assert "step 0: AutoStrategy: strategy auto -> star" in said
    tried = re.findall(
        r"^\[0\] step \d+: AutoStrategy: strategy (\w+) -> (\w+)(?: \(.* MB/s .*\))?$", said, re.MULTILINE
    )
    assert tried[:3] == [("auto", "star"), ("star", "ring"), ("ring", "binary_tree")]
    kept = re.search(
        r"AutoStrategy: keeps (\w+), the fastest \(star MB/s .*, ring MB/s .*, binary tree MB/s .*\)", said
    )
    assert kept is not None
    assert re.search(r"ReportStragglers: slow ranks: \[(\d, )?3\] \(own ms \[.*\]\)", said)
    assert re.search(rf"^\[0\] steps: 80; changes of the strategy: \d; in the end it is {kept[1]}$", said, re.MULTILINE)


def test_elastic(tmp_path: Path) -> None:
    page = tmp_path / "elastic.html"
    done = four_ranks("elastic.py", "--html", str(page), options=("--elastic", "2:6"))
    said = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done
    changes = [line.split(": ", 1)[1] for line in said[:-2]]
    assert changes[0] == "3 ranks go on, without [1]"
    assert " go on, with [4" in changes[1]  # others may come with it, or one by one
    assert all(re.fullmatch(r"[3-6] ranks go on, with(out)? \[\d(, \d)*\]", change) for change in changes)
    assert re.fullmatch(r"\d+ steps; each of 1437 samples was used \[20\] times", said[-2])
    assert re.fullmatch(r"test accuracy: 0\.9\d+ \(wanted: at least 0\.95\)", said[-1])
    assert "samples / s" in page.read_text()


@pytest.mark.parametrize("name", ["hello_async.py", "hello_sync.py", "two_groups.py"])
def test_alone_it_is_a_world_of_one(name: str) -> None:
    done = one_process(name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4" not in done.stdout.splitlines()[0]


def digest(done: subprocess.CompletedProcess[str]) -> str:
    """That of a training which went well; losses and the change of strategy were shown."""
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

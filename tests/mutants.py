"""Mutation testing of four packages: each mutant is a small change of the code that a test should notice.

python -m tests.mutants --count 300 --seed 1

Each mutant of a random sample is run against the tests that execute its line, the quickest first. `tests/mutants.json`
records the sample and the outcomes. The library cosmic-ray makes the mutants; ``make mutants`` installs it. A line that
only a child process executes counts as untested.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import click

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
RECORD = Path(__file__).with_suffix(".json")
DURATIONS, COVERAGE = BUILD / "durations.json", BUILD / "coverage"
PACKAGES = ("core", "engine", "collectives", "elastic")
FOLDERS = ("core", "engine", "collectives", "conformance", "elastic")
MAX_TESTS = 60
MAX_TESTS_S = 40.0
WITHIN_S = 240.0
"""A mutant whose tests have not ended by then counts as killed: it hangs."""
OPERATORS = (
    "core/AddNot", "core/NumberReplacer", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak", "core/ReplaceFalseWithTrue",
    "core/ReplaceTrueWithFalse", "core/ZeroIterationForLoop", "core/ExceptionReplacer", "core/ReplaceBinaryOperator",
    "core/ReplaceComparisonOperator", "core/ReplaceUnaryOperator",
)  # fmt: skip
"""Prefixes of cosmic-ray's operators. Those that remove decorators are left out: `override` does nothing."""


@dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        path: file, from the root.
        operator: cosmic-ray's name of the change.
        occurrence: number of the place among those of this operator in the file.
        line: number of its line.
        column: its column.
    """

    path: str
    operator: str
    occurrence: int
    line: int
    column: int


# ---------------------------------------------------------------- which test executes which line (a plugin of pytest)

_durations: dict[str, float] = {}


def pytest_runtest_protocol(item: Any) -> None:
    """Note each line that is executed from now on as this test's."""
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Add up how long a test takes."""
    _durations[report.nodeid] = _durations.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    """Write the durations beside the coverage."""
    if DURATIONS.parent.exists() and not DURATIONS.exists():
        DURATIONS.write_text(json.dumps(_durations))


def trace() -> None:
    """Run the tests once, and note which of them execute which line."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    sources = ",".join(f"kfcomm/{package}/*" for package in PACKAGES)
    measured = ["-m", "coverage", "run", f"--data-file={COVERAGE}", f"--include={sources}", "--rcfile=/dev/null"]
    tests = ["-m", "pytest", "-q", "-p", "tests.mutants", "-p", "no:randomly", "-m", "not slow"]
    subprocess.run(
        [sys.executable, *measured, *tests, *(f"tests/{folder}" for folder in FOLDERS)], cwd=ROOT, check=False
    )


def tests_of(path: str, line: int, durations: dict[str, float], lines: dict[str, dict[int, list[str]]]) -> list[str]:
    """The tests that execute a line, the quickest first, within bounds."""
    chosen, total_s = [], 0.0
    found = {test for test in lines.get(path, {}).get(line, ()) if test in durations}
    for test in sorted(found, key=durations.__getitem__)[:MAX_TESTS]:
        total_s += durations[test]
        if total_s > MAX_TESTS_S:
            break
        chosen.append(test)
    return chosen


# ---------------------------------------------------------------- the mutants


def mutants(path: Path) -> Iterator[Mutant]:
    """All of one file."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    tree = get_ast_from_path(path)
    for name in sorted(operator_names()):
        if not name.startswith(OPERATORS) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = [start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for number, (line, column) in enumerate(places):
            yield Mutant(str(path.relative_to(ROOT)), name, number, line, column)


def sample(count: int, seed: int) -> list[Mutant]:
    """So many, drawn by a seed; at most one of each place, since those of one place live and die together."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / "kfcomm" / package).rglob("*.py")):
            for one in mutants(path):
                if not is_typing(path, one.line):
                    places.setdefault((one.path, one.line, one.column), []).append(one)
    random = Random(seed)
    chosen = random.sample(sorted(places), min(count, len(places)))
    return [random.choice(places[place]) for place in chosen]


def is_typing(path: Path, line: int) -> bool:
    """Whether a line is a signature or an annotation, whose ``X | None`` computes nothing."""
    text = path.read_text("utf-8").splitlines()[line - 1].split("#")[0].strip()
    return "| None" in text or text.startswith(("def ", "async def ", "import ", "from "))


def outcome_of(one: Mutant, tree: Path, tests: Sequence[str]) -> str:
    """Run the tests against a mutant in a copy of the checkout: "killed", "survived" or "untested"."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    if not tests:
        return "untested"
    with use_mutation(tree / one.path, get_operator(one.operator)(), one.occurrence) as (_, changed):
        assert changed is not None, one
        return "survived" if passes(tree, tests) else "killed"


def passes(tree: Path, tests: Sequence[str]) -> bool:
    """Whether all of these tests pass in time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests],
        cwd=tree, env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(WITHIN_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        kill_group(process.pid)
        process.wait()


def kill_group(pid: int) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run(chosen: Sequence[Mutant], workers: int) -> dict[Mutant, str]:
    """Return the outcome of each mutant."""
    import coverage

    durations = json.loads(DURATIONS.read_text())
    data = coverage.CoverageData(str(COVERAGE))
    data.read()
    lines = {str(Path(path).relative_to(ROOT)): data.contexts_by_lineno(path) for path in data.measured_files()}
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(workers):
        tree = BUILD / f"tree{number}"
        shutil.rmtree(tree, ignore_errors=True)
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
        trees.put(tree)
    if not passes(tree, sorted(durations, key=durations.__getitem__)[:MAX_TESTS]):
        raise click.ClickException("tests fail without a mutant")
    begin_s, num_done = time.monotonic(), 0

    def one(mutant: Mutant) -> str:
        nonlocal num_done
        tree = trees.get()
        try:
            found = outcome_of(mutant, tree, tests_of(mutant.path, mutant.line, durations, lines))
        finally:
            trees.put(tree)
        num_done += 1
        click.echo(
            f"{num_done:4} {time.monotonic() - begin_s:6.0f} s {found:9} {mutant.path}:{mutant.line} {mutant.operator}"
        )
        return found

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(chosen, pool.map(one, chosen), strict=True))


@click.command()
@click.option("--count", default=300, help="Mutants.")
@click.option("--seed", default=1, help="Of the sample.")
@click.option("--workers", default=2, help="Mutants at a time.")
@click.option("--traced", is_flag=True, help="Use the coverage of the last run.")
def main(count: int, seed: int, workers: int, traced: bool) -> None:
    """Draw a sample, run it and record the outcomes."""
    if not traced:
        trace()
    found = run(sample(count, seed), workers)
    rows = sorted([one.path, one.line, one.column, one.operator, outcome] for one, outcome in found.items())
    RECORD.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n")
    for package in (*PACKAGES, ""):
        counts = Counter(outcome for path, *_, outcome in rows if path.startswith(f"kfcomm/{package}"))
        shown = (f"{counts[outcome]} {outcome}" for outcome in ("killed", "survived", "untested"))
        click.echo(" ".join([f"{package or 'all':12}", *shown]))


if __name__ == "__main__":
    main()

"""The documentation does what it says: its programs run, and print what it shows.

Comments in the Markdown, invisible when rendered, say what to do with the block that follows:

- ``<!-- file: NAME -->``: the block is written to the file NAME.
- ``<!-- copy: NAME -->``, on its own: the folder NAME of the checkout is copied, and used from then on.
- ``<!-- change: NAME -->``: the block is a change of the file NAME: lines that it has, and lines that are added to it.
- ``<!-- run -->``: the lines that begin with ``$`` are run by a shell; what they print is the rest of the block, in
  any order, as ranks print when they do. A line ``...`` matches any lines, ``…`` within a line for any text. Port
  29600 is replaced by one that is free.
- ``<!-- ranks: N -->``: the block is run as a program of N ranks: it is the body of ``async with kfcomm.init() as
  comm``, with a float array ``x`` of four elements.
- ``<!-- rows: N -->``, before a table: what is code in the last cell of a row is run by a program of N ranks, one row
  after the other, in ``with kfcomm.sync.init() as comm``, with arrays ``x`` and ``y`` of four elements, and with what
  the block before it has made if that is marked ``<!-- before the rows -->``.
- ``<!-- not run: WHY -->``: it is not run; Python is compiled all the same.
- ``<!-- output: COMMAND -->``, on its own: built pages show what the command prints (`docs/outputs.py`).

Every block of Python and every console has one of these marks. The blocks of one page are run in order, in one folder,
by a Python that finds no other packages than kfcomm's own and those that the page has said to install by then: as if
``pip install`` had been given what the page says. A page with the comment ``<!-- needs: FRAMEWORK -->`` is run by the
tests of frameworks.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import CodeType

import pytest

from tests.examples.pages import ALL_PAGES, COPIED, Block, blocks, installed, name_of, tables
from tests.hiding import hiding
from tests.launch.launched import ROOT, environ
from tests.support import free_port

pytestmark = pytest.mark.slow

NEEDS = re.compile(r"^<!-- needs: \w+ -->$", re.MULTILINE)
PAGES_OF_FRAMEWORKS = [page for page in ALL_PAGES if NEEDS.search(page.read_text("utf-8"))]
PAGES = [page for page in ALL_PAGES if page not in PAGES_OF_FRAMEWORKS]
BEFORE_ROWS = "before the rows"

FRAGMENT = """\
import asyncio

import numpy as np

import kfcomm


async def main():
    async with kfcomm.init() as comm:
        x = np.ones(4, np.float32)
{body}

asyncio.run(main())
"""
ROWS = """\
import numpy as np

import kfcomm

with kfcomm.sync.init() as comm:
    x, y = np.ones(4, np.float32), np.ones(4, np.float32)
{body}
"""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def run_page(page: Path, folder: Path) -> None:
    before = ""
    for name in COPIED.findall(page.read_text("utf-8")):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks(page):
        kind, _, what = block.mark.partition(": ")
        if block.language == "python":
            compiled(block)
        match kind:
            case "file":
                (folder / what).write_text(block.text, "utf-8")
            case "change":
                change(folder / what, block.text)
            case "run":
                run_console(block.text, folder, block.above)
            case "ranks":
                run_ranks(FRAGMENT.format(body=textwrap.indent(block.text, " " * 8)), int(what), folder, block.above)
            case "not run":
                assert what
            case "before the rows":
                before = block.text
            case _:
                assert block.language == "text", f"a block of {name_of(page)} has no mark:\n{block.text}"

    for size, rows, above in tables(page):
        run_rows(before, rows, size, folder, above)


def change(path: Path, text: str) -> None:
    """Add the lines of a block that begin with "+" to a file that has its other lines."""
    there = "".join(line[1:] for line in text.splitlines(keepends=True) if line.startswith(" "))
    source = path.read_text("utf-8")
    assert source.count(there) == 1, f"{path.name} has these lines {source.count(there)} times:\n{there}"
    path.write_text(source.replace(there, "".join(line[1:] for line in text.splitlines(keepends=True))), "utf-8")


def run_rows(before: str, table: str, size: int, folder: Path, above: str) -> None:
    """Run each row's own code on every rank."""
    rows = [line.rstrip().rstrip("|").rpartition("|")[2] for line in table.splitlines()[2:]]
    codes = [re.findall(r"`([^`]+)`", row) for row in rows]
    assert all(codes), table
    body = "\n".join([before, *(one for row in codes for one in row)])
    run_ranks(ROWS.format(body=textwrap.indent(body, " " * 4)), size, folder, above)


def compiled(block: Block) -> CodeType:
    return compile(block.text, "the block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run_console(text: str, folder: Path, above: str) -> None:
    """Run each command, and compare what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        shell_line, _, expected = part.partition("\n")
        done = ended(shell_line.replace(":29600", f":{free_port()}"), folder, above)
        assert_prints(shell_line, expected.splitlines(), done.stdout.splitlines())


def run_ranks(program: str, size: int, folder: Path, above: str) -> None:
    """Run a program on so many ranks, which all end well."""
    (folder / "fragment.py").write_text(program, "utf-8")
    done = ended(f"kfcomm run -n {size} python fragment.py", folder, above)
    assert done.returncode == 0, f"{program}\n{done.stdout}"


def ended(shell_line: str, folder: Path, above: str) -> subprocess.CompletedProcess[str]:
    """Run a block in a shell with kfcomm and the packages that the page has named so far, and no others."""
    # The user's token is kept in the runtime folder. Without buffers print() writes the end of a line by itself,
    # and two processes' lines come mixed.
    path = f"{programs(folder)}:{os.environ['PATH']}"
    env = environ(PATH=path, XDG_RUNTIME_DIR=str(folder), COLUMNS="100", PYTHONUNBUFFERED="")
    env["XDG_CACHE_HOME"] = str(folder)
    env["PYTHONPATH"] = f"{hiding(folder, *installed(above))}:{ROOT}"
    return subprocess.run(
        ["bash", "-c", shell_line],
        cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def programs(folder: Path) -> Path:
    """A folder with ``kfcomm`` and ``python``, as an installation has them."""
    place = folder / ".bin"
    if not place.exists():
        place.mkdir()
        for name, arguments in (("kfcomm", "-m kfcomm "), ("python", "")):
            script = place / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
            script.chmod(0o755)
    return place


def assert_prints(shell_line: str, expected: list[str], printed: list[str]) -> None:
    """Each expected line was printed, and no other, unless one is ``...``."""
    left = list(printed)
    for line in expected:
        if line == "...":
            continue
        pattern = ".*".join(map(re.escape, line.split("…")))
        fitting = next((one for one in left if re.fullmatch(pattern, one)), None)
        assert fitting is not None, "\n".join([f"$ {shell_line}", *printed, "", "lacks:", line])
        left.remove(fitting)
    assert "..." in expected or not left, "\n".join([f"$ {shell_line}", *printed, "", "not in the page:", *left])


def test_a_page_that_shows_what_is_not_printed_is_found() -> None:
    assert_prints("x", ["[0] total …", "[1] b"], ["[1] b", "[0] total 4"])
    assert_prints("x", ["a", "..."], ["b", "a", "c"])
    for expected, printed in ((["a"], ["b"]), (["a"], ["a", "b"]), (["a", "a"], ["a"])):
        with pytest.raises(AssertionError):
            assert_prints("x", expected, printed)


def test_a_row_that_does_not_work_is_found(tmp_path: Path) -> None:
    head = "| theirs | ours |\n|---|---|\n"
    run_rows("z = 2", head + "| `a | b` | `comm.all_reduce(x, out=y)`, `assert (y == z).all()` |\n", 2, tmp_path, "")
    for row in ("| `a` | `comm.all_reduced(x)` |\n", "| `a` | nothing |\n"):
        with pytest.raises(AssertionError):
            run_rows("", head + row, 2, tmp_path, "")
    assert len(tables(ROOT / "docs" / "howto" / "from-mpi4py.md")) == 1


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<!-- ranks: 1 -->\n```python\nimport ml_dtypes\n```\n", "No module named 'ml_dtypes'"),
        (
            "<!-- ranks: 2 -->\n```python\nif comm.rank == 0:\n    await comm.all_reduce(x, 'a', timeout=60)\n```\n",
            "PeerLost",
        ),
        ('<!-- run -->\n```console\n$ python -c "import matplotlib"\n```\n', "not in the page"),
        ("```python\npass\n```\n", "has no mark"),
    ],
)
def test_a_page_that_does_not_work_as_printed_is_found(page: str, words: str, tmp_path: Path) -> None:
    found = tmp_path / "page.md"
    found.write_text(page, "utf-8")
    with pytest.raises(AssertionError, match=words):
        run_page(found, tmp_path)
    if "import" in page:
        found.write_text("`pip install 'kfcomm[bench,bfloat16]'`\n\n" + page, "utf-8")
        run_page(found, tmp_path)

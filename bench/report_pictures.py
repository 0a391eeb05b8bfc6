"""Pictures of report pages for the documentation, from jobs and simulations on this host.

    python -m bench.report_pictures docs/howto

Needs Chromium and the extra demo.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import chromium
from bench.dashboard import write

WIDTH = 1240
ROOT = Path(__file__).parent.parent
ELASTIC = ("run", "-n", "4", "--elastic", "2:6", "python", str(ROOT / "examples" / "elastic.py"))
WORKLOAD = "compute 5ms, 4MiB, compute 3ms, 16MiB"
PAGES: dict[str, tuple[Sequence[str], int]] = {
    "report-topologies.png": (("bench", "topologies", "-n", "4", "--sizes", "1KiB:16MiB", "--iterations", "20"), 600),
    "report-simulate.png": (
        ("simulate", "--strategy", "ring,star,double_tree", "--hosts", "16x4", "--sizes", "1KiB:64MiB"), 760,
    ),
    "report-workload.png": (
        ("simulate", "--strategy", "ring,star,double_tree", "--hosts", "16x1", "--workload", WORKLOAD), 760,
    ),
    "report-elastic.png": (ELASTIC, 1000),
}  # fmt: skip
"""By picture: what makes the page, and the height of the picture."""


def made(command: Sequence[str], page: Path) -> None:
    """Run a command of kfcomm that writes a page."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = (sys.executable, "-m", "kfcomm", *command, "--html", str(page))
    subprocess.run(words, check=True, env=environ, stdout=subprocess.DEVNULL)


async def draw(page: Path, height: int, picture: Path) -> None:
    """Write the picture of a page."""
    async with chromium.page(page.as_uri(), (WIDTH, height)) as shown:
        await shown.until("document.readyState === 'complete' && document.querySelector('footer')")
        await shown.value("document.documentElement.style.scrollbarWidth = 'none'")
        write(picture, await shown.picture())


def main(folder: str) -> None:
    """Run the command line."""
    with tempfile.TemporaryDirectory() as name:
        for picture, (command, height) in PAGES.items():
            page = Path(name) / "page.html"
            made(command, page)
            asyncio.run(draw(page, height, Path(folder) / picture))
            print(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])

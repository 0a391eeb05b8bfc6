"""The page of a job, as seen on a host: ``python -m tests.monitor.page_on_host JOB`` inside its network namespace.

Each line of the input is an expression in the page; its value is written once it is true. The last line of the output
has the errors of the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from bench import chromium
from kfcomm.monitor.dashboard.serving import Address, served
from kfcomm.monitor.dashboard.watching import JobObserver
from tests.launch.launched import environ


async def main(job: str) -> None:
    async with served(JobObserver(job), Address(port=0)) as url, chromium.page(url, (1180, 900)) as page:
        while line := await asyncio.to_thread(sys.stdin.readline):
            click.echo(json.dumps(await page.until(line)))
        click.echo(json.dumps(page.errors))


@contextlib.contextmanager
def page_inside(inside: Callable[..., list[str]], job: str) -> Iterator[Callable[[str], Any]]:
    """Return a function that waits until an expression in the page is true, for its value; no error may be logged."""
    line = inside(sys.executable, "-m", "tests.monitor.page_on_host", job)
    pipe = subprocess.PIPE
    with subprocess.Popen(line, env=environ(), stdin=pipe, stdout=pipe, text=True) as process:

        def until(expression: str) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{expression}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            yield until
        finally:
            output, _ = process.communicate()
    assert json.loads(output) == []


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

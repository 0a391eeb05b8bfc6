"""Elastic jobs and their stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import etcds
from tests.launch.jobs import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(ranks: tuple[int, ...], options: list[str], *program: object, starts: bool = True, **more: Any) -> Job:
        written = [json.dumps(one) for one in program]
        made.append(Job(tmp_path, ranks, options, written, **more))
        if starts:
            made[-1].start(*range(len(ranks)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=["folder", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    with etcds.running(tmp_path / "etcd") as one:
        yield one.store()

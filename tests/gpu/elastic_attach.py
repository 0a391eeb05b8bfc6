"""One rank of an elastic job with a model on a GPU: a third rank joins, and is killed; prints the sizes it has seen."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch  # noqa: TID253  run where there is torch, by nothing else
from torch import nn  # noqa: TID253

import kfcomm.sync
import kfcomm.torch
from kfcomm.elastic import ElasticSampler

LENGTH, BATCH, WIDTH, PAUSE_S = 1 << 20, 24, 16, 0.01
STEPS = 10
"""Steps of three ranks, and of those that are left."""


class Meeting:
    """Step in which there were three ranks first; a part of the state, so that joining ranks know it."""

    def __init__(self) -> None:
        self.at = -1

    def state_dict(self) -> dict[str, Any]:
        """Give the step."""
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the step."""
        self.at = int(state["at"])


def main(device: str) -> None:
    """Train until the third rank has come and gone."""
    with kfcomm.sync.init(elastic=True, timeout=15) as comm:
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        meeting, sizes = Meeting(), list[int]()
        elastic = {"sampler": ElasticSampler(LENGTH, batch=BATCH), "state": {"meeting": meeting}}
        attached = kfcomm.torch.attach(model, optimizer, comm, elastic=elastic)
        for step in attached.steps():
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step.number * 7 + comm.rank)
            x = torch.randn(len(step.indices), WIDTH, generator=generator).to(device)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            sizes += [] if sizes[-1:] == [comm.size] else [comm.size]
            if step.number == 3 and comm.rank == 0:
                comm.propose_size(3)
            if comm.size == 3 and meeting.at < 0:
                meeting.at = step.number
            if meeting.at < 0:
                time.sleep(PAUSE_S)
            elif step.number == meeting.at + STEPS and (comm.rank, comm.size) == (2, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            elif step.number == meeting.at + 2 * STEPS:
                break
        numbers = torch.cat([one.detach().flatten().cpu() for one in model.parameters()])
        rows = comm.all_gather(numbers, name="rows")
        are_equal = bool((rows == rows[0]).all()) and bool(rows.isfinite().all())
        sys.stdout.write(f"found {json.dumps([comm.rank, sizes, are_equal])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

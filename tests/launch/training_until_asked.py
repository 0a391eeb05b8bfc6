"""Program: elastic training that leaves after SIGTERM, and continues from its checkpoint; reports the steps it did.

Arguments: number of passes; the rank that kills itself in step 20, if any.
"""

import os
import signal
import sys
import time

import numpy as np

import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

SAMPLES = 200
passes, *killed = map(int, sys.argv[1:])
asked: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
state = State(used=np.zeros(SAMPLES))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


with kfcomm.sync.init(elastic=True) as comm:
    rank, steps = comm.rank, []
    say(f"rank {rank} of {comm.size} is {os.getpid()}")
    with Elastic(comm, state, checkpoint="train.npz", checkpoint_every=5) as elastic:
        for step in elastic.steps(ElasticSampler(SAMPLES, batch=4), passes=passes):
            if rank in killed and step.number == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = np.zeros(SAMPLES + 1)
            mine[step.indices] = 1
            mine[SAMPLES] = len(asked)
            total = comm.all_reduce(mine, name="used")
            state.used += total[:SAMPLES]
            steps.append(step.number)
            if total[SAMPLES]:  # all ranks leave in the same step
                break
            time.sleep(0.005)
    # Slurm signals a step more than once; an interpreter that ends has no handlers any more.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    uses = sorted(set(state.used.astype(int).tolist()))
    say(f"rank {rank} did steps {steps[0]} to {steps[-1]}, with {comm.size} ranks at the end: used {uses}")

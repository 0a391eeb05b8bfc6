"""Training that a cluster may interrupt at any time: the program of the manifests here, and of a job of SLURM.

It writes ``checkpoint.npz`` and ``model.npy`` to the folder ``OUTPUT``, which all hosts share. After SIGTERM all ranks
leave in the same step, with exit code 3; so they do when one is lost. Started again, it continues from the checkpoint.
Under ``kfcomm run --elastic`` the launcher replaces ranks instead, and the others go on.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

LEFT_EARLY = 3
OUTPUT = Path(os.environ.get("OUTPUT", "."))
PASSES = int(os.environ.get("PASSES", "20"))
IS_LAUNCHED = "KFCOMM_LAUNCHER" in os.environ  # by kfcomm run, which heeds SIGTERM itself

random = np.random.default_rng(0)
inputs = random.normal(size=(4000, 3))
outputs = inputs @ [1.0, -2.0, 3.0]
state = State(weights=np.zeros(3))
asked: list[int] = []


def train() -> bool:
    """Train to the end, or until a rank is asked to leave; returns whether it is the end."""
    with kfcomm.sync.init(elastic=True) as comm:
        on_loss = "finish" if IS_LAUNCHED else "raise"
        with Elastic(
            comm, state, on_loss=on_loss, checkpoint=OUTPUT / "checkpoint.npz", checkpoint_every=10
        ) as elastic:
            for step in elastic.steps(ElasticSampler(len(inputs), batch=100), passes=PASSES):
                x, y = inputs[step.indices], outputs[step.indices]
                gradient = x.T @ (x @ state.weights - y)
                total = comm.all_reduce(np.append(gradient, len(asked)), name="gradient")
                is_smaller = elastic.num_changes > 0 and not IS_LAUNCHED  # a rank was lost between two steps
                if total[3] or is_smaller:
                    return False
                state.weights -= 0.1 / len(step.batch) * total[:3]
                time.sleep(0.01)  # for the time that a model takes
        if comm.rank == 0 and not elastic.is_released:
            np.save(OUTPUT / "model.npy", state.weights)
            print("trained:", np.round(state.weights, 3).tolist())
    return True


if not IS_LAUNCHED:
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
try:
    is_trained = train()
except (kfcomm.EpochChanged, kfcomm.PeerLost) as error:
    print(f"left early: {error}", file=sys.stderr)
    is_trained = False
if not IS_LAUNCHED:  # a second SIGTERM would kill the interpreter as it ends, and the exit code would be another
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.exit(0 if is_trained else LEFT_EARLY)

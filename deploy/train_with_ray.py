"""Training in Ray's workers, as ``ray-job.yaml`` starts it: the driver of the job."""

import numpy as np
import ray

import kfcomm.ray
import kfcomm.sync


def train(comm: kfcomm.sync.Communicator) -> list[float]:
    """Train on one rank; returns the weights."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(4000, 3))
    outputs = inputs @ [1.0, -2.0, 3.0]
    weights = np.zeros(3)
    x, y = inputs[comm.rank :: comm.size], outputs[comm.rank :: comm.size]
    for _ in range(100):
        weights -= 0.1 * comm.all_reduce(x.T @ (x @ weights - y) / len(x), name="gradient", op="avg")
    return [round(weight, 3) for weight in weights.tolist()]


if __name__ == "__main__":
    ray.init(address="auto")
    print("trained:", kfcomm.ray.run(train, num_workers=4)[0])

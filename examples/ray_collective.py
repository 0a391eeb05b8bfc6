"""Collectives between Ray's actors, over kfcomm: ``ray.util.collective`` with a backend that is registered.

::

    python examples/ray_collective.py
"""

import numpy as np

try:
    import ray
    from ray.util import collective
except ModuleNotFoundError as error:
    raise SystemExit(f"this example needs {error.name}: pip install ray") from None

import kfcomm.ray


class Worker:
    """One rank."""

    def __init__(self, rank: int, size: int) -> None:
        kfcomm.ray.register()
        self.rank = rank
        collective.init_collective_group(size, rank, backend="kfcomm", group_name="all")

    def work(self) -> list[float]:
        """Results of the verbs."""
        total = np.full(4, self.rank + 1.0)
        collective.allreduce(total, "all")
        each = [np.zeros(1), np.zeros(1)]
        collective.allgather(each, np.full(1, float(self.rank)), "all")
        part = np.zeros(2)
        collective.reducescatter(part, [np.ones(2), np.full(2, 5.0)], "all")
        if self.rank == 0:
            collective.send(total, 1, "all")
        else:
            collective.recv(total, 0, "all")
        largest = np.full(1, float(self.rank))
        collective.reduce(largest, 1, "all", collective.types.ReduceOp.MAX)
        collective.broadcast(largest, 1, "all")
        collective.barrier("all")
        collective.destroy_collective_group("all")
        return [float(total[0]), float(each[1][0]), float(part[0]), float(largest[0])]


def main() -> None:
    """Two actors."""
    ray.init(num_cpus=2, include_dashboard=False)
    remote = ray.remote(Worker)
    workers = [remote.remote(rank, 2) for rank in range(2)]
    for rank, found in enumerate(ray.get([worker.work.remote() for worker in workers])):
        print(f"rank {rank}: {found}")


if __name__ == "__main__":
    main()

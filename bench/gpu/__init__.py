"""Cost of device memory with kfcomm, beside the bare machine's.

    python -m bench.gpu --output bench/results/gpu-DATE.json
    python -m bench.gpu --quick

One GPU is enough. Each of four rows has a floor, measured in the same run, in turns with what it is the floor of:

- a world of one reduces 64 MiB: NCCL, called directly on the same stream;
- it reduces the gradients of ResNet-50, each by its name, all at once: the same loop of direct calls of NCCL;
- four processes share the GPU, so that 64 MiB go through memory of the host: the slower of two things alone, pinned
  copies in both directions by all processes at once, and the same all_reduce of arrays on the host through shared
  memory;
- two processes reduce 64 MiB over TCP on this host: the slower of the pinned copies alone and TCP alone.

Of the modules, only `device`, `alone` and `shared` need CuPy to be imported.
"""

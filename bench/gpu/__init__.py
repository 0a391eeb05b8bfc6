"""Cost of device memory with kfcomm, beside NCCL called directly and torch.distributed, in turns in the same processes.

    python -m bench.gpu --output bench/results/gpu-DATE.json
    python -m bench.gpu --quick

One GPU is enough. A world of one reduces 1 KiB, 64 MiB and the gradients of ResNet-50, through NCCL; two and four
processes that share the GPU reduce 1 KiB to 64 MiB, by the route that kfcomm chooses and through memory of the host,
beside Gloo with CUDA tensors. Times are the host's, up to where the device is done. Without torch its columns are left
out.

Of the modules, only `device`, `alone` and `shared` need CuPy to be imported.
"""

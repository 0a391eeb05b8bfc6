"""Horovod's calls over kfcomm: ``import kfcomm.horovod.torch as hvd``."""

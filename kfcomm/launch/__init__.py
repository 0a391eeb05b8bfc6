"""Starting the processes of a job and watching over them: `kfcomm run`.

The launcher knows programs, signals and terminals; what the programs do with each other it does not know. It
needs Linux: process descriptors (pidfd_open(2)) and ``/proc``.
"""

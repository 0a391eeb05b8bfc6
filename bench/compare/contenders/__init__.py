"""Contenders in their worker processes, one file each; see `base`."""

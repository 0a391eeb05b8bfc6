"""Collectives of memory on devices: named, with deadlines and words as all others, carried out by another path.

A *call* is one of them on one rank. To the runtime it is a collective without chunks: it has a number, a deadline, and
fails everywhere if it fails anywhere. A *path* carries it out: whole on the devices, or through the host's memory.
"""

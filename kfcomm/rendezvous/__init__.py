"""Settings from the environment, the job's key-value store, and joining the world.

Only `store`, which one process serves, and the etcd backend import aiohttp.
"""

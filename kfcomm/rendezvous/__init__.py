"""Who am I, who are the others: the launcher's environment, the store, and joining the world.

Nothing here imports the library of HTTP but the store itself, which one process serves.
"""

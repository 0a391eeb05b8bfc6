"""Who am I, who are the others: the launcher's environment, the store, and joining the world.

Nothing here imports the HTTP library until a store is opened: a world of one needs none.
"""

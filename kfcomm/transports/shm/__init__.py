"""Links between processes of one host through memory that both have mapped.

A payload is written once, into a piece of the sender's *arena*, and read there by every receiver; what says so, and
small payloads with it, goes through a *ring* of each link. Who finds nothing to do spins for a moment, then parks on
the link's Unix socket, which carries no data: a byte on it wakes, and its end is the end of the peer.
"""

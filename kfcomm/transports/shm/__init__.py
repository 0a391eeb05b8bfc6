"""Links between processes of one host through memory that both have mapped.

A payload is written once, into a piece of the sender's *arena*, and read there by every receiver; the *ring* of each
link carries records that point to it, and small payloads. A side without work polls for a moment, then parks on the
link's Unix socket, which carries no data: a byte on it wakes, and its end is the end of the peer.

Read `endpoint` first, then `link`, `sender` and `receiver`; `slots` has collectives without messages.
"""

"""Transports: links that move framed chunks between two peers, and backends that run whole collectives on devices.

`registry` lists them, and says how to add one; `base` has the interfaces.
"""

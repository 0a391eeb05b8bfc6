"""The heart, without I/O: graphs, frames, machines and the router that matches by name.

Pure and deterministic: time and randomness are arguments, payload bytes never enter, nothing waits.
"""

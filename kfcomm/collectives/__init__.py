"""Verbs: they turn the caller's arrays into posted collectives, and completed collectives into results."""

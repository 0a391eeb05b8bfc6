"""Random programs: right by the documentation, run on every interface and link, compared with plain NumPy.

A *program* is a list of steps, made from a seed, that all ranks walk through in one order: blocking and begun calls
of all verbs, named and not, groups, changes of strategy, messages. What each call gives is known beforehand, as if the
calls had been made one after the other. `generator` makes programs, `walker` runs them on one rank, and
`python -m tests.programs` runs many of them in processes.

Why no program waits for itself: a rank that blocks at a step waits only for what other ranks do at that step or before
it. The rank that is furthest behind therefore always goes on.
"""

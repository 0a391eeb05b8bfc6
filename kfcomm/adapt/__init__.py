"""Adaptation: policies that watch a program's steps and change its communication while it runs.

::

    async with kfcomm.adapt.Adaptation(comm, [AutoStrategy(("ring", "binary_tree"))]) as adaptation:
        for batch in batches:
            async with adaptation.step():
                ...                                   # the collectives of a step

A policy runs on every rank and decides by what all ranks share. ``kfcomm.sync.Adaptation`` is the blocking form.
"""

from kfcomm.adapt.adaptation import Adaptation, Step
from kfcomm.adapt.auto_strategy import AutoStrategy, Trials
from kfcomm.adapt.detectors import Interference, Stragglers, Verdict
from kfcomm.adapt.host import Decision
from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.metrics import Reading, StepMeter, StepMetrics
from kfcomm.adapt.policy import Context, Policy, Request
from kfcomm.adapt.replay import replay
from kfcomm.adapt.resizing import MarginalUtility, ReplaceStragglers
from kfcomm.adapt.slow_links import AvoidSlowLinks

__all__ = [
    "Adaptation",
    "AutoStrategy",
    "AvoidSlowLinks",
    "Context",
    "Decision",
    "Hyperparameters",
    "Interference",
    "MarginalUtility",
    "Policy",
    "Reading",
    "ReplaceStragglers",
    "Request",
    "Step",
    "StepMeter",
    "StepMetrics",
    "Stragglers",
    "Trials",
    "Verdict",
    "replay",
]

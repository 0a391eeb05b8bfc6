"""Adaptation: policies that watch a program's steps and change its communication while it runs.

::

    async with kfcomm.adapt.Adaptation(comm, [AutoStrategy(("ring", "binary_tree"))]) as adaptation:
        for batch in batches:
            async with adaptation.step():
                ...                                   # the collectives of a step

A policy runs on every rank and decides by what all ranks share. ``kfcomm.sync.Adaptation`` is the blocking form.
"""

from kfcomm.adapt.adaptation import Adaptation
from kfcomm.adapt.change import Change, ChangeTest
from kfcomm.adapt.detectors import Interference, Stragglers, Trials, Verdict
from kfcomm.adapt.guard import GuardActions, GuardSteps, StepEvidence, Void
from kfcomm.adapt.hyperparameters import Free, Hyperparameters
from kfcomm.adapt.metrics import Reading, StepMeter, StepMetrics
from kfcomm.adapt.policy import Context, Decision, Policy, Request
from kfcomm.adapt.replaying import replay
from kfcomm.adapt.resizing import MarginalUtility, ReplaceStragglers
from kfcomm.adapt.schedule import Schedule, StopAt
from kfcomm.adapt.steps import Step
from kfcomm.adapt.strategy_policies import AutoStrategy, AvoidSlowLinks

__all__ = [
    "Adaptation",
    "AutoStrategy",
    "AvoidSlowLinks",
    "Change",
    "ChangeTest",
    "Context",
    "Decision",
    "Free",
    "GuardActions",
    "GuardSteps",
    "Hyperparameters",
    "Interference",
    "MarginalUtility",
    "Policy",
    "Reading",
    "ReplaceStragglers",
    "Request",
    "Schedule",
    "Step",
    "StepEvidence",
    "StepMeter",
    "StepMetrics",
    "StopAt",
    "Stragglers",
    "Trials",
    "Verdict",
    "Void",
    "replay",
]

"""Policies that act on gradients: batch, learning rate, agreement, wire dtype, and number of ranks.

They read what the program observes, ``local_norm`` and ``gradient_norm``, as a ``GradientMonitor`` measures them, each
measurement once, with the batch that it was made with::

    adaptation.observe(**monitor.observed())

A program that computes them itself observes the norms of the step under way, whose batch it is.

They are here and not in ``kfcomm.adapt``, which is a lower layer, because they need the formulas of this one.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used

if TYPE_CHECKING:
    from kfcomm.train.policies.batch import NoiseScaleBatch
    from kfcomm.train.policies.goodput import PolluxGoodput
    from kfcomm.train.policies.gradient_noise import AdaScaleRate, SwitchAgreement, WireByNoise
    from kfcomm.train.policies.measured import GradientNoise
else:  # type checkers would take any name for one that is there
    _HOMES = {
        "batch": ("NoiseScaleBatch",),
        "goodput": ("PolluxGoodput",),
        "gradient_noise": ("AdaScaleRate", "SwitchAgreement", "WireByNoise"),
        "measured": ("GradientNoise",),
    }
    __getattr__ = imported_when_used(
        __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
    )

__all__ = ["AdaScaleRate", "GradientNoise", "NoiseScaleBatch", "PolluxGoodput", "SwitchAgreement", "WireByNoise"]

"""Policies that act on gradients: batch, learning rate, agreement, wire dtype, and number of ranks.

They read what the program observes in each step, ``local_norm`` and ``gradient_norm``, as the ``values`` of a
``GradientMonitor`` have them::

    adaptation.observe(**monitor.values)

They are here and not in ``kfcomm.adapt``, which is a lower layer, because they need the formulas of this one.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used

if TYPE_CHECKING:
    from kfcomm.train.policies.goodput import PolluxGoodput
    from kfcomm.train.policies.gradient_noise import (
        AdaScaleRate,
        GradientNoise,
        NoiseScaleBatch,
        SwitchAgreement,
        WireByNoise,
    )
else:  # type checkers would take any name for one that is there
    _HOMES = {
        "goodput": ("PolluxGoodput",),
        "gradient_noise": ("AdaScaleRate", "GradientNoise", "NoiseScaleBatch", "SwitchAgreement", "WireByNoise"),
    }
    __getattr__ = imported_when_used(
        __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
    )

__all__ = ["AdaScaleRate", "GradientNoise", "NoiseScaleBatch", "PolluxGoodput", "SwitchAgreement", "WireByNoise"]

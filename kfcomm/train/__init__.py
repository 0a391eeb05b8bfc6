"""Ways to agree, monitors in the data path, and large batches: what adaptive training is made of.

Pure formulas have files of their own, arrays or floats in, arrays or floats out; what carries them over a communicator
is beside them.
"""

from typing import TYPE_CHECKING

from kfcomm.lazy import imported_when_used

if TYPE_CHECKING:
    from kfcomm.train.adascale import AdaScale
    from kfcomm.train.averages import MovingAverage
    from kfcomm.train.noise_scale import NoiseEstimate, NoiseScale, noise_estimate
    from kfcomm.train.pollux import (
        GradientStatistics,
        Observation,
        Shape,
        Throughput,
        best_shape,
        efficiency,
        fit,
        goodput,
    )
    from kfcomm.train.variance import gradient_variance, mean_cosine
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        {
            "AdaScale": "kfcomm.train.adascale",
            "GradientStatistics": "kfcomm.train.pollux",
            "MovingAverage": "kfcomm.train.averages",
            "NoiseEstimate": "kfcomm.train.noise_scale",
            "NoiseScale": "kfcomm.train.noise_scale",
            "Observation": "kfcomm.train.pollux",
            "Shape": "kfcomm.train.pollux",
            "Throughput": "kfcomm.train.pollux",
            "best_shape": "kfcomm.train.pollux",
            "efficiency": "kfcomm.train.pollux",
            "fit": "kfcomm.train.pollux",
            "goodput": "kfcomm.train.pollux",
            "gradient_variance": "kfcomm.train.variance",
            "mean_cosine": "kfcomm.train.variance",
            "noise_estimate": "kfcomm.train.noise_scale",
        },
    )

__all__ = [
    "AdaScale",
    "GradientStatistics",
    "MovingAverage",
    "NoiseEstimate",
    "NoiseScale",
    "Observation",
    "Shape",
    "Throughput",
    "best_shape",
    "efficiency",
    "fit",
    "goodput",
    "gradient_variance",
    "mean_cosine",
    "noise_estimate",
]

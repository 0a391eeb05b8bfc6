"""Algorithms of adaptive training: agreement between replicas, monitors in the data path, and large batches.

Pure formulas take and return arrays or floats; procedures carry them over a communicator. `Agreement` shows the loop
that serves every algorithm of agreement.
"""

from typing import TYPE_CHECKING

from kfcomm.common.lazy import imported_when_used

if TYPE_CHECKING:
    from kfcomm.train.agreement import Agreement
    from kfcomm.train.gradient_statistics import (
        MovingAverage,
        NoiseEstimate,
        NoiseScale,
        gradient_variance,
        mean_cosine,
        noise_estimate,
    )
    from kfcomm.train.large_batches import AdaScale, Lamb, LambState, Lars, LinearScaling, lars_rate
    from kfcomm.train.layer_ownership import Layer, LayerOwnership, owners, preconditioned
    from kfcomm.train.local import DiLoCo, LocalAdaAlter, LocalSGD
    from kfcomm.train.monitor import SUMS, GradientMonitor
    from kfcomm.train.pair_averaging import PairAveraging, Peers
    from kfcomm.train.parameter_server import ParameterServer, shards
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
    from kfcomm.train.procedure import Pending
    from kfcomm.train.sufficient_factors import (
        Factors,
        HybridGradients,
        all_reduce_numbers,
        factor_numbers,
        most_samples,
        takes_factors,
    )
    from kfcomm.train.synchronous import SMA, AdaSGD, ElasticAveraging, SynchronousSGD
else:  # type checkers would take any name for one that is there
    _HOMES = {
        "agreement": ("Agreement",),
        "gradient_statistics": (
            "MovingAverage", "NoiseEstimate", "NoiseScale", "gradient_variance", "mean_cosine", "noise_estimate",
        ),
        "large_batches": ("AdaScale", "Lamb", "LambState", "Lars", "LinearScaling", "lars_rate"),
        "layer_ownership": ("Layer", "LayerOwnership", "owners", "preconditioned"),
        "local": ("DiLoCo", "LocalAdaAlter", "LocalSGD"),
        "monitor": ("SUMS", "GradientMonitor"),
        "pair_averaging": ("PairAveraging", "Peers"),
        "parameter_server": ("ParameterServer", "shards"),
        "pollux": (
            "GradientStatistics", "Observation", "Shape", "Throughput", "best_shape", "efficiency", "fit", "goodput",
        ),
        "procedure": ("Pending",),
        "sufficient_factors": (
            "Factors", "HybridGradients", "all_reduce_numbers", "factor_numbers", "most_samples", "takes_factors",
        ),
        "synchronous": ("SMA", "AdaSGD", "ElasticAveraging", "SynchronousSGD"),
    }  # fmt: skip
    __getattr__ = imported_when_used(
        __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
    )

__all__ = [
    "SMA", "SUMS", "AdaSGD", "AdaScale", "Agreement", "DiLoCo", "ElasticAveraging", "Factors", "GradientMonitor",
    "GradientStatistics", "HybridGradients", "Lamb", "LambState", "Lars", "Layer", "LayerOwnership",
    "LinearScaling", "LocalAdaAlter", "LocalSGD", "MovingAverage", "NoiseEstimate", "NoiseScale", "Observation",
    "PairAveraging", "ParameterServer", "Peers", "Pending", "Shape", "SynchronousSGD", "Throughput",
    "all_reduce_numbers", "best_shape", "efficiency", "factor_numbers", "fit", "goodput", "gradient_variance",
    "lars_rate", "mean_cosine", "most_samples", "noise_estimate", "owners", "preconditioned", "shards",
    "takes_factors",
]  # fmt: skip

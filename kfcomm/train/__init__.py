"""Algorithms of adaptive training: agreement between replicas, monitors in the data path, and large batches.

Pure formulas take and return arrays or floats; procedures carry them over a communicator. `Agreement` shows the loop
that serves every algorithm of agreement.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used

if TYPE_CHECKING:
    from kfcomm.train.adaalter import LocalAdaAlter
    from kfcomm.train.adasgd import AdaSGD
    from kfcomm.train.agreement import Agreement
    from kfcomm.train.algorithms import Algorithm
    from kfcomm.train.asynchronous import PairAveraging
    from kfcomm.train.averages import SMA, DiLoCo, ElasticAveraging, LocalSGD, SynchronousSGD
    from kfcomm.train.factors import (
        Factors,
        HybridGradients,
        all_reduce_numbers,
        factor_numbers,
        most_samples,
        takes_factors,
    )
    from kfcomm.train.gradient_monitor import SUMS, GradientMonitor
    from kfcomm.train.gradient_statistics import (
        GradientStatistics,
        MovingAverage,
        efficiency,
        gradient_variance,
        mean_cosine,
    )
    from kfcomm.train.kfac import KFAC, Layer, LayerOwnership, owners, preconditioned
    from kfcomm.train.large_batches import AdaScale, Lamb, LambState, Lars, LinearScaling, lars_rate
    from kfcomm.train.noise_scale import NoiseEstimate, NoiseScale, noise_estimate
    from kfcomm.train.packing import swapped
    from kfcomm.train.parameter_server import ParameterServer, shards
    from kfcomm.train.peers import Peers, RoundRobin
    from kfcomm.train.pollux import Observation, Shape, Throughput, best_shape, fit, goodput
    from kfcomm.train.procedure import Pending, Procedure, call, carried, report
    from kfcomm.train.rules import towards
    from kfcomm.train.training import Training
    from kfcomm.train.trees import Tree, copied, leaves, mapped, rebuilt
else:  # type checkers would take any name for one that is there
    _HOMES = {
        "agreement": ("Agreement",),
        "algorithms": ("Algorithm",),
        "adaalter": ("LocalAdaAlter",),
        "adasgd": ("AdaSGD",),
        "asynchronous": ("PairAveraging",),
        "averages": ("SMA", "DiLoCo", "ElasticAveraging", "LocalSGD", "SynchronousSGD"),
        "factors": (
            "Factors", "HybridGradients", "all_reduce_numbers", "factor_numbers", "most_samples", "takes_factors",
        ),
        "gradient_monitor": ("SUMS", "GradientMonitor"),
        "gradient_statistics": (
            "GradientStatistics", "MovingAverage", "efficiency", "gradient_variance", "mean_cosine",
        ),
        "kfac": ("KFAC", "Layer", "LayerOwnership", "owners", "preconditioned"),
        "large_batches": ("AdaScale", "Lamb", "LambState", "Lars", "LinearScaling", "lars_rate"),
        "noise_scale": ("NoiseEstimate", "NoiseScale", "noise_estimate"),
        "packing": ("swapped",),
        "parameter_server": ("ParameterServer", "shards"),
        "peers": ("Peers", "RoundRobin"),
        "pollux": ("Observation", "Shape", "Throughput", "best_shape", "fit", "goodput"),
        "procedure": ("Pending", "Procedure", "call", "carried", "report"),
        "training": ("Training",),
        "rules": ("towards",),
        "trees": ("Tree", "copied", "leaves", "mapped", "rebuilt"),
    }  # fmt: skip
    __getattr__ = imported_when_used(
        __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
    )

__all__ = [
    "KFAC", "SMA", "SUMS", "AdaSGD", "AdaScale", "Agreement", "Algorithm", "DiLoCo", "ElasticAveraging", "Factors",
    "GradientMonitor", "GradientStatistics", "HybridGradients", "Lamb", "LambState", "Lars", "Layer",
    "LayerOwnership", "LinearScaling", "LocalAdaAlter", "LocalSGD", "MovingAverage", "NoiseEstimate", "NoiseScale",
    "Observation", "PairAveraging", "ParameterServer", "Peers", "Pending", "Procedure", "RoundRobin", "Shape",
    "SynchronousSGD", "Throughput", "Training", "Tree", "all_reduce_numbers", "best_shape", "call", "carried",
    "copied", "efficiency", "factor_numbers", "fit", "goodput", "gradient_variance", "lars_rate", "leaves", "mapped",
    "mean_cosine", "most_samples", "noise_estimate", "owners", "preconditioned", "rebuilt", "report", "shards",
    "swapped", "takes_factors", "towards",
]  # fmt: skip

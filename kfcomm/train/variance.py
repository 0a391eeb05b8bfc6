"""How much the gradients of the ranks differ, from sums that are known anyway. Floats in, floats out.

Everything follows from two numbers: the mean over the n ranks of |g_i|², which travels as one scalar, and |ḡ|² of the
mean gradient, which every rank has.
"""

from __future__ import annotations

from kfcomm.errors import ConfigError


def gradient_variance(local_sq_norm: float, global_sq_norm: float) -> float:
    """Σ|g_i|² / n − |ḡ|²: the squared distance of a rank's gradient from the mean, on average over the ranks.

    Rounding can make it negative where all gradients are alike: then it is 0.

    Args:
        local_sq_norm: Σ|g_i|² / n.
        global_sq_norm: |ḡ|².
    """
    return max(local_sq_norm - global_sq_norm, 0.0)


def mean_cosine(local_sq_norm: float, global_sq_norm: float, size: int) -> float | None:
    """The cosine between the gradients of two ranks, over all pairs: Σ g_i·g_j / Σ |g_i||g_j| where norms are alike.

    (n|ḡ|² − Σ|g_i|²/n) / ((n − 1) Σ|g_i|²/n): 1 for equal gradients, 0 for orthogonal ones, at least −1/(n − 1). It is
    exactly the mean of the pairs' cosines where all |g_i| are equal, and else their inner products over the mean of
    |g_i|².

    Args:
        local_sq_norm: Σ|g_i|² / n.
        global_sq_norm: |ḡ|².
        size: n.

    Returns:
        None for one rank, or where all gradients are zero.

    Raises:
        ConfigError: ``size`` is not at least 1.
    """
    if size < 1:
        raise ConfigError(f"there is at least one rank, not {size!r}")
    if size == 1 or local_sq_norm <= 0:
        return None
    return (size * global_sq_norm - local_sq_norm) / ((size - 1) * local_sq_norm)

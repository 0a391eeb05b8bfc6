"""Averages of gradients in fewer bytes than the gradients have: PowerSGD and top-k, with error feedback.

Each rank adds the error of its compressed gradient to its next gradient, so that nothing is lost, only delayed. Both
work on NumPy arrays, or arrays that NumPy reads in place, over any blocking communicator. (For half of the bytes,
without a state, use ``wire_dtype`` of ``all_reduce``.)
"""

from typing import TYPE_CHECKING

from kfcomm.common.lazy import imported_when_used

if TYPE_CHECKING:
    from kfcomm.compression.power_sgd import PowerSGD
    from kfcomm.compression.top_k import TopK
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__, {"PowerSGD": "kfcomm.compression.power_sgd", "TopK": "kfcomm.compression.top_k"}
    )

__all__ = ["PowerSGD", "TopK"]

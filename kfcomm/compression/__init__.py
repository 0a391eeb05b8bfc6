"""Averages of gradients in fewer bytes than the gradients have: PowerSGD and top-k, with error feedback.

What an average leaves out is kept by the rank that gave it, and added to what it gives next: nothing is lost, it comes
later. Both work on NumPy arrays, or what NumPy reads where it is, over any communicator that blocks. (For half of the
bytes, without a state: ``wire_dtype`` of ``all_reduce``.)
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

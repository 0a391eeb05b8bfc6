"""For programs written with torch: gradients that are averaged while the program computes, and state for all ranks.

Everything is imported when it is first used, torch with it.
"""

from typing import TYPE_CHECKING

from kfcomm.lazy import imported_when_used

if TYPE_CHECKING:
    from kfcomm.torch.attached import Attached, attach
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        {
            "Attached": "kfcomm.torch.attached",
            "attach": "kfcomm.torch.attached",
        },
    )

__all__ = ["Attached", "attach"]

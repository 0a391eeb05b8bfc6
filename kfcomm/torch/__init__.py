"""Training with torch: gradient averaging during the backward pass, and a backend of ``torch.distributed``.

``init_process_group("kfcomm")`` needs no import: torch finds the backend by the entry point group
``torch.distributed.backends``. A name here is imported, and torch with it, when it is first used.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used, require

require("kfcomm.torch", "torch")

if TYPE_CHECKING:
    from kfcomm.torch import optimizers
    from kfcomm.torch.attached import Attached, attach
    from kfcomm.torch.compression import Compression
    from kfcomm.torch.ddp import CompressionState, compression_hook
    from kfcomm.torch.flight_record import dump_flight_record
    from kfcomm.torch.kfac import KFAC
    from kfcomm.torch.naming import named
    from kfcomm.torch.registration import communicator, get_reconfigure_handle, reconfigure, register, shrink
    from kfcomm.torch.state import all_gather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
else:  # type checkers would take any name for one that is there
    _HOMES = {
        "attached": ("Attached", "attach"),
        "compression": ("Compression",),
        "ddp": ("CompressionState", "compression_hook"),
        "flight_record": ("dump_flight_record",),
        "kfac": ("KFAC",),
        "naming": ("named",),
        "optimizers": ("optimizers",),
        "registration": ("communicator", "get_reconfigure_handle", "reconfigure", "register", "shrink"),
        "state": ("all_gather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"),
    }
    __getattr__ = imported_when_used(
        __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
    )

__all__ = [
    "KFAC", "Attached", "Compression", "CompressionState", "all_gather_object", "attach", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "communicator", "compression_hook", "dump_flight_record",
    "get_reconfigure_handle", "named", "optimizers", "reconfigure", "register", "shrink",
]  # fmt: skip


def __dir__() -> list[str]:
    """All public names, imported or not."""
    return __all__

"""Members of blocking objects that only call those of the asyncio objects that they wrap.

Type checkers, editors and the reference pages read ``members.pyi``, which ``python -m tests.sync.stub`` writes. The
modules of the blocking classes fill these, so that a program imports what it uses.
"""

from typing import Any

from kfcomm.sync.adapter import Adapter


class AdaptationMembers(Adapter[Any]):
    """Members of ``kfcomm.adapt.Adaptation``."""


class ElasticMembers:
    """Members of ``kfcomm.elastic.Elastic``."""

"""Diagnosis of a hang from the dumps of several ranks, for ``kfcomm doctor``.

Dumps are read and checked in ``records``, put together in ``diagnosis``, judged in ``findings``, and put into words
in ``report``. Nothing here talks to a process: a dump of yesterday is as good as one of now.
"""

from kfcomm.monitor.doctor.diagnosis import Diagnosis, diagnose
from kfcomm.monitor.doctor.records import read
from kfcomm.monitor.doctor.report import as_text

__all__ = ["Diagnosis", "as_text", "diagnose", "read"]

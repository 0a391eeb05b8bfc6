"""Who waits for whom, from the dumps of several ranks: what ``kfcomm doctor`` says.

Dumps are read and checked in ``records``, put together in ``diagnosis``, judged in ``findings``, and put into words
in ``report``. Nothing here talks to a process: a dump of yesterday is as good as one of now.
"""

from kfcomm.doctor.diagnosis import Diagnosis, diagnose
from kfcomm.doctor.records import read
from kfcomm.doctor.report import as_text

__all__ = ["Diagnosis", "as_text", "diagnose", "read"]

"""The timeline of a job: what each rank did when, in files that Perfetto and chrome://tracing open.

``Timeline`` records one rank's while it runs; ``merge`` makes one file of those of all ranks, on one clock;
``summarize`` says what took long and who was waited for. `translation` describes the files.
"""

from kfcomm.monitor.timeline.files import TraceFile, find_files, read_files
from kfcomm.monitor.timeline.merge import Merged, Summary, as_text, merge, summarize
from kfcomm.monitor.timeline.recording import Timeline, check_folder

__all__ = [
    "Merged",
    "Summary",
    "Timeline",
    "TraceFile",
    "as_text",
    "check_folder",
    "find_files",
    "merge",
    "read_files",
    "summarize",
]

"""kfcomm and other libraries side by side: the same work, in one run, taking turns.

``make compare`` sets everything up and runs ``python -m bench.compare``. One world of processes for each contender
lives through the whole run. In each round every contender does the work once while the others sleep in a blocking
read, and the order of the turns moves on by one from round to round. What counts is the median of the rounds, and
the ratios of medians; the times themselves are this machine's on this day.

- `works`: what is done, and with what.
- `rows`: what is compared with what, and what must be reached.
- `contenders`: one file for each library, run in the worker processes (`worker`).
- `launch`: how the processes of each library are started, with the settings that suit it best.
- `world`, `rounds`: processes, turns, medians. `table`, `record`: what is printed and written.

The worker's side (`worker`, `contenders`, `data`, `works`) needs NumPy and the contender's own library alone:
MPI's workers live in virtual environments without kfcomm's dependencies (they import `kfcomm.bench.workloads`).
"""

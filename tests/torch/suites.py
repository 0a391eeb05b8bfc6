"""Runs tests of torch's source tree over Gloo, and over kfcomm in Gloo's place.

    python -m tests.torch.suites ~/pytorch [test_device_mesh.py ...]

The folder is a checkout of torch's source at the version that is installed; nothing of it is copied. Files are below
its ``test/distributed``; by default those that do not depend on the backend. No file is edited: Gloo's place is taken
by ``KFCOMM_TORCH_DEFAULT=gloo``. Prints for each file how many tests pass over each, then the tests that only Gloo
passes, and exits with 1 if there are any but those of `NOT_OURS`. Most tests start interpreters that import torch, so
each takes some ten seconds. torch's tests need ``expecttest``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch  # noqa: F401  before kfcomm's own module, which it loads

from kfcomm.torch.bases import IS_GROUP

FILES = (
    "test_c10d_backend_collectives.py", "test_c10d_collectives.py", "test_c10d_fault_tolerance.py",
    "test_c10d_object_collectives.py", "test_c10d_p2p.py", "test_c10d_process_group.py", "algorithms/test_join.py",
    "optim/test_zero_redundancy_optimizer.py", "_composable/test_replicate.py", "tensor/test_dtensor.py",
    "tensor/test_redistribute.py", "tensor/test_init.py", "tensor/test_api.py", "tensor/test_optimizers.py",
    "tensor/test_utils.py", "checkpoint/test_pg_transport.py", "checkpoint/test_file_system_checkpoint_cpu.py",
)  # fmt: skip
"""Not every version of torch has all of them."""
OTHER_RANKS = (
    "test_reconfigure_late_join", "test_reconfigure_merge_split", "test_reconfigure_rejects_reused_uuid",
    "test_reconfigure_scale_down_up", "test_reconfigure_single_to_all", "test_shrink_exclude_last_rank",
    "test_shrink_exclude_middle_rank",
)  # fmt: skip
NOT_OURS = {
    "test_noncontiguous_all_to_all_error": "kfcomm copies tensors that are not contiguous, which Gloo refuses",
    **dict.fromkeys(OTHER_RANKS, "_reconfigure to other ranks or another size: kfcomm.torch.reconfigure does that"),
}
"""Tests that Gloo alone passes, by their names without the file and the class, and why."""
if IS_GROUP:
    NOT_OURS["test_wait_unregisters_work"] = (
        "before torch 2.14 a group made in Python is not asked to register its works"
    )
BACKENDS = {"gloo": "0", "kfcomm": "gloo"}
"""Value of ``KFCOMM_TORCH_DEFAULT`` for each."""
STAND_IN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD._get_backend(torch.device("cpu"))))
dist.destroy_process_group()
"""
FILE_WITHIN_S = 3600.0


def outcomes(file: Path, backend: str) -> dict[str, str]:
    """``passed``, ``skipped`` or ``failed`` by test."""
    env = os.environ | {"KFCOMM_TORCH_DEFAULT": BACKENDS[backend], "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", os.devnull,
            f"--junitxml={report}", str(file),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=file.parent, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                timeout=FILE_WITHIN_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{file.name} takes more than {FILE_WITHIN_S:g} s over {backend}")
            return {}
        cases = ElementTree.parse(report).findall(".//testcase") if report.exists() else []
    found = {f"{case.get('classname')}.{case.get('name')}": _word(case) for case in cases}
    if "passed" not in found.values():
        print(done.stdout[-2000:], done.stderr[-2000:])
    return found


def _word(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def compared(source: Path, file: str) -> set[str]:
    """Run one file over both, and print how many tests pass; return those that only Gloo passes."""
    theirs, ours = (outcomes(source / "test/distributed" / file, backend) for backend in ("gloo", "kfcomm"))
    counts = [sum(word == "passed" for word in each.values()) for each in (theirs, ours)]
    print(f"{file:50} Gloo passes {counts[0]:4}, kfcomm {counts[1]:4} of {len(theirs):4}", flush=True)
    if not counts[0]:
        raise SystemExit(f"{file}: no test passes over Gloo, so this says nothing; see above")
    return {name for name, word in theirs.items() if word == "passed" and ours.get(name) != "passed"}


def check_stand_in() -> None:
    """Exit unless a group over Gloo is one of kfcomm in an interpreter of its own."""
    env = os.environ | {"KFCOMM_TORCH_DEFAULT": BACKENDS["kfcomm"]}
    done = subprocess.run([sys.executable, "-c", STAND_IN], env=env, capture_output=True, text=True)
    if "KfcommBackend" not in done.stdout:
        raise SystemExit(f"a group over Gloo is not one of kfcomm: {done.stdout}{done.stderr}")


def only_gloos(source: Path, files: tuple[str, ...] = FILES) -> set[str]:
    """Tests that only Gloo passes, of all files that this version of torch has, without those of `NOT_OURS`."""
    if not (source / "test" / "distributed").is_dir():
        raise SystemExit(f"expected a checkout of torch's source; {source} has no folder test/distributed")
    there = [file for file in files if (source / "test/distributed" / file).exists()]
    for file in files:
        if file not in there:
            print(f"{file:50} is not there")
    if not there:
        raise SystemExit(f"expected some of {', '.join(files)} in {source}; found none")
    check_stand_in()
    found: set[str] = set().union(*(compared(source, file) for file in there))
    known = {name for name in found if name.rpartition(".")[2] in NOT_OURS}
    for name in sorted(known):
        print(f"known: {name}: {NOT_OURS[name.rpartition('.')[2]]}")
    return found - known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a checkout of torch's source")
    parser.add_argument("files", nargs="*", default=FILES, help="below test/distributed")
    arguments = parser.parse_args()
    found = sorted(only_gloos(arguments.source.resolve(), tuple(arguments.files)))
    print(*(f"only Gloo passes {name}" for name in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

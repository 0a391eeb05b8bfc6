"""The tests that torch ships in its wheel, on three ranks: what Gloo passes passes here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

NAMES_BACKENDS = "makes its model only for a fixed list of backends"
NOT_OURS = {
    "test_SyncBatchNorm_process_group": "needs torchvision; fails with Gloo, too",
    "test_accumulate_gradients_no_sync": NAMES_BACKENDS,
    "test_accumulate_gradients_no_sync_allreduce_hook": NAMES_BACKENDS,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": NAMES_BACKENDS,
    "test_accumulate_gradients_no_sync_grad_is_view": NAMES_BACKENDS,
    "test_batch_isend_irecv_mixed_backend_err": "needs GPUs; fails with Gloo, too",
    "test_batch_isend_irecv_op_err": "needs GPUs; fails with Gloo, too",
    "test_ddp_logging_data_cpu": "torch itself calls every backend that is not its own 'custom' there",
    "test_new_subgroups_with_group_param": "needs four ranks; fails with Gloo, too",
}
"""Tests that fail here, each with the reason."""


def test_torchs_own_distributed_tests(tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.shipped", "--verbose"], cwd=ROOT, env=env, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = re.findall(r"^(ok|skipped|failed) +[\d.]+ s  (test_\w+)$", done.stdout, re.MULTILINE)
    failed = {name for word, name in found if word == "failed"}
    assert failed == set(NOT_OURS), done.stdout
    assert sum(word == "ok" for word, _ in found) >= 90

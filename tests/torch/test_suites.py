"""Tests of torch's source tree: what passes over Gloo passes over kfcomm in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.torch.suites import only_gloos

SOURCE = "TORCH_SOURCE"


@pytest.mark.skipif(SOURCE not in os.environ, reason=f"{SOURCE} does not name a checkout of torch's source")
def test_kfcomm_passes_in_the_place_of_gloo() -> None:
    assert only_gloos(Path(os.environ[SOURCE])) == set()

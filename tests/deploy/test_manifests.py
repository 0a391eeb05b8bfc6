"""Manifests and programs of deploy/: valid, and they do what they say, as far as that needs no cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kfcomm.rendezvous.settings import OTHER_VARIABLES, Arguments
from tests.examples.test_docs_commands import wrong
from tests.launch.launched import ROOT, environ
from tests.support import free_port

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VALIDATOR = ROOT / "build" / "venv" / "manifests" / "bin" / "python"
WRONG = {
    "indexed-job.yaml": ("completionMode", "completionsMode"),
    "jobset.yaml": ("replicatedJobs", "replicatedJob"),
    "ray-job.yaml": ("secretKeyRef", "secretRef"),
}


def validated(*files: Path) -> subprocess.CompletedProcess[str]:
    if not VALIDATOR.exists():
        pytest.skip("needs kubernetes-validate (make build/venv/manifests/.ready)")
    program = str(ROOT / "tests" / "deploy" / "validate.py")
    return subprocess.run([str(VALIDATOR), program, *map(str, files)], capture_output=True, text=True, check=False)


def test_manifests_are_valid() -> None:
    done = validated(*MANIFESTS)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(MANIFESTS)


@pytest.mark.parametrize("name", WRONG)
def test_misspelt_field_is_refused(name: str, tmp_path: Path) -> None:
    field, misspelt = WRONG[name]
    text = (DEPLOY / "kubernetes" / name).read_text("utf-8")
    (tmp_path / name).write_text(text.replace(f"{field}:", f"{misspelt}:"))
    done = validated(tmp_path / name)
    assert done.returncode == 1
    assert misspelt in done.stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_variables_commands_and_files_of_a_manifest_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    known = {f"KFCOMM_{name.upper()}" for name in Arguments.__annotations__} | OTHER_VARIABLES
    assert set(re.findall(r"- name: (KFCOMM_\w+)", text)) <= known
    for program in re.findall(r"\b(train\w*\.py)", text):
        assert (DEPLOY / program).exists()
    if "token" in text and "kind: Secret" not in text:
        assert re.search(r"name: kfcomm\n\s+key: token", text)
    for command in re.findall(r"command:\n((?:\s+- .*\n)+)", text):
        words = re.findall(r"- (.*)", command)
        if words[0] == "kfcomm":
            assert wrong(words[1:]) is None


def test_image_is_built_from_what_is_there_and_without_a_compiler() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    assert "--only-binary=:all:" in text
    assert not re.search(r"apt-get|gcc|build-essential", text)


PODS = """
ip link set lo up
kfcomm ready && exit 1
JOB_COMPLETION_INDEX=0 python {train} & first=$!
JOB_COMPLETION_INDEX=1 python {train} & second=$!
until kfcomm ready -n 2 2>/dev/null; do sleep 0.1; done
until [ -f checkpoint.npz ]; do sleep 0.1; done
kill -s {signal} $second
wait $first && code=0 || code=$?; echo first $code
wait $second && code=0 || code=$?; echo second $code
kfcomm ready && exit 1
JOB_COMPLETION_INDEX=0 python {train} & JOB_COMPLETION_INDEX=1 python {train}; wait $!
"""
"""Two pods of an Indexed Job, which share a network here; one of them ends, and both are started again."""


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize(("signal", "code"), [("TERM", 3), ("KILL", 137)])
def test_interrupted_pods_continue_from_the_checkpoint(signal: str, code: int, tmp_path: Path) -> None:
    script = PODS.format(train=DEPLOY / "train.py", signal=signal)
    env = environ(
        KFCOMM_SIZE="2", KFCOMM_STORE=f"http://127.0.0.1:{free_port()}", KFCOMM_TOKEN="1f" * 8 + "c05a7e" * 8,
        KUBERNETES_SERVICE_HOST="10.0.0.1", PASSES="6", OUTPUT=str(tmp_path),
    )  # fmt: skip
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-ec", script], env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "first 3" in done.stdout
    assert f"second {code}" in done.stdout
    assert re.search(r"ranks 0-1 of job \S+ have joined", done.stdout)
    assert "0 of 1 ranks of this host have joined" in done.stderr
    assert "trained: [1.0, -2.0, 3.0]" in done.stdout
    assert (tmp_path / "model.npy").exists()

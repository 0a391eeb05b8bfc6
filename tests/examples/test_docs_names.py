"""Names in the documentation exist: settings, modules, attributes, classes, metrics, extras, files, targets.

Nothing here imports a framework: names in packages of `FRAMEWORKS` are looked for in their source.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kfcomm
import kfcomm.sync
from kfcomm.elastic import Elastic, ElasticCommunicator, State
from kfcomm.monitor.metrics import METRICS
from tests.examples.pages import ALL_PAGES, FENCE, PAGES_OF_PACKAGE, lines, name_of, spans
from tests.launch.launched import ROOT
from tests.monitor.test_metrics import collected

PAGES = [*PAGES_OF_PACKAGE, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
FRAMEWORKS = ("kfcomm.torch", "kfcomm.jax", "kfcomm.ray", "kfcomm.dask", "kfcomm.horovod")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_exist(page: Path) -> None:
    named = set(re.findall(r"\bKFCOMM_[A-Z0-9_]*[A-Z0-9]\b", page.read_text("utf-8"))) - {"KFCOMM_TRANSPROT"}
    assert named <= variables()


@cache
def variables() -> set[str]:
    """Environment variables that the source knows, those of settings by the setting's name."""
    from kfcomm.rendezvous.settings import Arguments

    folders = (ROOT / "kfcomm", ROOT / "tests")
    source = "\n".join(path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py"))
    return {*re.findall(r"KFCOMM_[A-Z0-9_]+", source), *(f"KFCOMM_{one.upper()}" for one in Arguments.__annotations__)}


# ---------------------------------------------------------------- names of Python


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_modules_and_attributes_resolve(page: Path) -> None:
    text = page.read_text("utf-8")
    found = {one for span in spans(page) for one in re.findall(r"(?<![\w./@:-])kfcomm(?:\.[A-Za-z_]\w*)+", span)}
    found |= set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert {one for one in found if not resolves(one)} == set()


def resolves(name: str) -> bool:
    """Whether there is such a module, or something in one."""
    if name.startswith(FRAMEWORKS):
        return _in_source(name)
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def _in_source(name: str) -> bool:
    parts = name.split(".")
    folder = ROOT.joinpath(*parts[:2])
    if len(parts) == 2:
        return True
    module = folder / f"{parts[2]}.py"
    exported = _strings_of(folder / "__init__.py", "__all__")
    if len(parts) == 3:
        return module.exists() or parts[2] in exported
    if not module.exists():
        return False
    return bool(re.search(rf"\b{parts[3]}\b", module.read_text("utf-8")))


def _strings_of(path: Path, name: str) -> set[str]:
    for one in ast.parse(path.read_text("utf-8")).body:
        if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in one.targets):
            return set(ast.literal_eval(one.value))
    return set()


OBJECTS: dict[str, tuple[Any, ...]] = {
    "comm": (
        kfcomm.Communicator, kfcomm.sync.Communicator, ElasticCommunicator, kfcomm.sync.ElasticCommunicator,
        kfcomm.testing.MemoryWorld,
    ),
    "comms": (kfcomm.testing.MemoryWorld, kfcomm.testing.SyncWorld),
    "elastic": (Elastic, kfcomm.sync.Elastic),
    "adaptation": (kfcomm.adapt.Adaptation, kfcomm.sync.Adaptation),
    "ctx": (kfcomm.adapt.Context,),
    "handle": (kfcomm.Handle, kfcomm.sync.Handle),
    "state": (State,),
}  # fmt: skip
"""What variables of these names are on the pages."""
MPI = re.compile(r"comm\.[A-Z]\w*|comm\.(bcast|allgather|allreduce)\b")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_attributes_of_objects_exist(page: Path) -> None:
    code = [*spans(page), *(text for language, text in FENCE.findall(page.read_text("utf-8")) if language == "python")]
    lacking = set()
    for one in code:
        for variable, attribute in re.findall(r"(?<![\w.])(\w+)\.(?!html|json)([A-Za-z]\w*)", one):
            kinds = OBJECTS.get(variable)
            if kinds is None or MPI.fullmatch(f"{variable}.{attribute}") or variable == "state":
                continue
            if not any(hasattr(kind, attribute) or attribute in _attributes(kind) for kind in kinds):
                lacking.add(f"{variable}.{attribute}")
    assert lacking == set()


@cache
def _attributes(kind: type) -> set[str]:
    """Attributes set on instances, which the class lacks."""
    import inspect

    sources = [inspect.getsource(one) for one in kind.__mro__ if one.__module__.startswith("kfcomm")]
    return {name for source in sources for name in re.findall(r"\bself\.(\w+)\b", source)}


@cache
def classes() -> set[str]:
    """Names of all classes, type aliases and enums of kfcomm."""
    found = set()
    for path in (ROOT / "kfcomm").rglob("*.py"):
        for one in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(one, ast.ClassDef):
                found.add(one.name)
    return found


OTHERS_CLASSES = {
    "KillOnBadExit", "ReadWriteMany",
    "Accelerator", "AdaGrad", "CancelledError", "CommunicationHook", "DDP", "DTensor", "DistBackendError",
    "DistributedDataParallel", "DistributedOptimizer", "GiB", "GradScaler", "InitProcessGroupKwargs",
    "IntEnum", "JaxRuntimeError", "KeyboardInterrupt", "KiB", "LBFGS", "LocalCluster", "MiB", "PartialState",
    "ProcessGroup", "StrEnum", "TaskGroup", "TorchConfig", "TorchTrainer",
}  # fmt: skip
"""Of other libraries."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_classes_exist(page: Path) -> None:
    named = {
        one for span in spans(page) for one in re.findall(r"(?<![\w.\"'/-])[A-Z][a-z]\w*[A-Z]\w*\b", span)
        if "(" not in span.partition(one)[0] and not span.startswith(("dist.", "MPI", "comm."))
    }  # fmt: skip
    assert named - classes() - OTHERS_CLASSES - set(dir(builtins)) == set()


# ---------------------------------------------------------------- what is to be installed

NEEDED = {
    r"kfcomm tls make": "tls",
    r"--html\b": "bench",
    r"--checksum\b": "checksum",
    r"--metrics-port\b": "metrics",
    r"wire_dtype=.bfloat16|\"bfloat16\"": "bfloat16",
    r"PolluxGoodput\b": "train",
}
"""Extras of what may be on a page."""
EXTRA = re.compile(r"(?:kfcomm|\.)\[([\w,]+)\]")
EXAMPLE = re.compile(r"(?<!make )\bexamples/(\w+)\.py")


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_a_page_names_the_extras_of_what_it_shows(page: Path) -> None:
    text = page.read_text("utf-8")
    named = {extra for one in EXTRA.findall(text) for extra in one.split(",")}
    code = [*lines(page), *spans(page), *(block for language, block in FENCE.findall(text) if language == "python")]
    shown = "\n".join(line for line in code if not line.startswith(("make ", "--")))
    needed = {extra for pattern, extra in NEEDED.items() if re.search(pattern, shown)}
    brings = {"torch": {"bfloat16"}}  # the extra of the one has the other
    for extra in named:
        needed -= brings.get(extra, set())
    run = [line for line in [*lines(page), *spans(page)] if re.search(r"\b(python|torchrun)\b", line)]
    for example in {one for line in run for one in EXAMPLE.findall(line)}:
        needed |= extras_of_example(example)
    assert needed <= named


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_a_page_names_its_extras_above_its_first_block_or_in_it(page: Path) -> None:
    text = page.read_text("utf-8")
    first = FENCE.search(text)
    head = text if first is None else text[: first.end()]
    assert set(EXTRA.findall(text)) <= set(EXTRA.findall(head))


def extras_of_example(name: str) -> set[str]:
    """Extras of kfcomm that an example says it needs, and those of other examples that it imports."""
    path = ROOT / "examples" / f"{name}.py"
    text = path.read_text("utf-8")
    found = set(re.findall(r"kfcomm\[(\w+)\]", text))
    for other in re.findall(r"^from (\w+) import", text, re.MULTILINE):
        if (path.parent / f"{other}.py").exists():
            found |= extras_of_example(other)
    return found


# ---------------------------------------------------------------- metrics, files, targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_exist(page: Path) -> None:
    named = set(re.findall(r"\bkfcomm_[a-z_]+", page.read_text("utf-8")))
    assert named - {"kfcomm_world"} - metrics() == set()


def test_all_metrics_are_in_the_table() -> None:
    text = (ROOT / "docs" / "howto" / "monitor.md").read_text("utf-8")
    listed = {one.removesuffix("_total") for one in re.findall(r"\bkfcomm_[a-z_]+", text)}
    assert {re.sub("_(total|count|sum|bucket)$", "", one) for one in metrics()} - {"kfcomm"} == listed


@cache
def metrics() -> set[str]:
    """Names of metrics and samples that a rank shows to Prometheus when all of them have a value."""
    with kfcomm.testing.sync_world(2) as comms:

        def rank(comm: kfcomm.sync.Communicator) -> None:
            comm.monitored_all_reduce([1.0], "x")
            comm._session.engine.meter.gauges["noise_scale"] = 1.0

        kfcomm.testing.run_threads(comms, rank)
        found = {name for name, _ in collected(comms[0])}
    # of links that these ranks do not have
    found |= {f"kfcomm_{one.name}" + "_total" * one.grows for one in METRICS if one.is_optional}
    return found | {re.sub("_(count|sum|bucket)$", "", name) for name in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_modules_and_targets_exist(page: Path) -> None:
    code = [*lines(page), *spans(page)]
    paths = {
        one for line in code for one in re.findall(r"(?<![\w./])(?:examples|tests|bench|docs|kfcomm)/[\w./-]+", line)
    }
    paths = {one for one in paths if not re.search(r"\b[A-Z]{3,}\b", Path(one).stem)}  # stands for a name
    assert {one for one in paths if not (ROOT / one.rstrip("/")).exists()} == set()
    modules = {one for line in code for one in re.findall(r"python3? -m ((?:bench|tests)[\w.]*)", line)}
    modules |= {one for line in code for one in re.findall(r"(?<![\w./-])bench(?:\.\w+)+", line)}
    assert {one for one in modules if not _is_module(one)} == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {one for line in code for one in re.findall(r"(?:^|[&|] )make ([a-z][a-z-]*)", line)}
    assert named <= targets


def _is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists() or (place / "__main__.py").exists()


def test_a_name_that_does_not_exist_is_found() -> None:
    assert resolves("kfcomm.sync.init")
    assert resolves("kfcomm.torch.optimizers.sma")
    for name in ("kfcomm.nothing", "kfcomm.sync.initt", "kfcomm.torch.atach", "kfcomm.torch.optimizers.smaa"):
        assert not resolves(name)

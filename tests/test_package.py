"""The distribution: what is in it, how often, and what importing it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

import kfcomm

ROOT = Path(__file__).parent.parent
LINKED_FOLDERS = ("strategies", "transports")


def python(*words: str | Path, executable: str | Path = sys.executable, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([executable, *words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built here without fetching anything."""
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


def modules() -> set[PurePosixPath]:
    """Every module of the package, relative to the top of the project."""
    return {PurePosixPath(path.relative_to(ROOT)) for path in (ROOT / "kfcomm").rglob("*.py")}


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_doors_lead_into_the_package() -> None:
    for folder in LINKED_FOLDERS:
        assert os.readlink(ROOT / folder) == f"kfcomm/{folder}"


def test_the_wheel_holds_the_package_once(built: Path) -> None:
    names = [PurePosixPath(name) for name in zipfile.ZipFile(only(built, "*.whl")).namelist()]
    assert {name.parts[0] for name in names} == {"kfcomm", f"kfcomm-{kfcomm.__version__}.dist-info"}
    assert Counter(name for name in names if name.suffix == ".py") == Counter(modules())
    assert {PurePosixPath("kfcomm/py.typed"), PurePosixPath("kfcomm/common/report.html")} <= set(names)
    assert PurePosixPath("kfcomm/monitor/dashboard/static/vendor/LICENSE") in names


def test_the_sdist_holds_the_package_once(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = [PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()]
    assert not {name.parts[0] for name in names} & {*LINKED_FOLDERS, "build", ".venv"}
    inside = [name for name in names if name.suffix == ".py" and name.parts[0] == "kfcomm"]
    assert Counter(inside) == Counter(modules())
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {str(name) for name in names}


def test_builds_in_other_folders_have_the_same_bytes(built: Path, tmp_path: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    for path in (tmp_path / "source").rglob("*"):
        os.utime(path, (10**9, 10**9))
    python("-m", "hatchling", "build", "-d", tmp_path / "dist", cwd=only(tmp_path / "source", "kfcomm-*"))
    for path in built.iterdir():
        assert (tmp_path / "dist" / path.name).read_bytes() == path.read_bytes(), path.name


def test_changelog_and_citation_have_the_version() -> None:
    released = re.findall(r"(?m)^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text())
    citation = dict(re.findall(r'(?m)^([\w-]+): "?([^"\n]+)"?$', (ROOT / "CITATION.cff").read_text()))
    assert released[0] == (kfcomm.__version__, citation["date-released"])
    assert citation["version"] == kfcomm.__version__
    assert {"cff-version", "message", "title", "license"} <= citation.keys()


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has the wheel; what it needs is lent by the present environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    inside = folder / "bin" / "python"
    wheel = only(built, "*.whl")
    python("-m", "pip", "--python", inside, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    (purelib(inside) / "needed.pth").write_text(sysconfig.get_path("purelib"))
    return inside


def purelib(interpreter: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(python("-c", code, executable=interpreter, cwd=interpreter.parent).strip())


def test_an_installed_wheel_imports_from_where_it_was_installed(installed: Path, tmp_path: Path) -> None:
    code = "import kfcomm; print(kfcomm.__file__, kfcomm.__version__)"
    where, version = python("-c", code, executable=installed, cwd=tmp_path).split()
    assert Path(where).is_relative_to(purelib(installed))
    assert version == kfcomm.__version__


def test_importing_needs_numpy_msgpack_and_uvloop_alone(installed: Path, tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import kfcomm; print(*sorted(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in python("-c", code, executable=installed, cwd=tmp_path).split()}
    foreign = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_")}
    foreign.discard("cython_runtime")  # no package: msgpack's compiled part is made by Cython, which keeps this
    assert foreign <= {"kfcomm", "msgpack", "numpy", "uvloop"}

"""The package that is installed: its list of packages, and a wheel that works in a folder without the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "lossyspec": "lossyspec",
    "tuner": "lossyspec.tuner",
    "reports": "lossyspec.reports",
    "hardware_profiles": "lossyspec.hardware_profiles",
}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_folders() -> dict[str, Path]:
    """Every package of the tree by its installed name, with its folder."""
    found = {}
    for folder, name in FOLDERS.items():
        for place in sorted({path.parent for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts}):
            found[".".join([name, *place.relative_to(ROOT / folder).parts])] = place.relative_to(ROOT)
    return found


def data_files(package: str, folder: Path) -> list[str]:
    """Files of a package that are no modules; folders that are packages themselves are left out."""
    inner = [other for name, other in package_folders().items() if name != package and other.is_relative_to(folder)]
    return [
        str(path.relative_to(ROOT / folder))
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and not any(path.relative_to(ROOT).is_relative_to(other) for other in inner)
    ]


def test_the_package_list_is_the_tree() -> None:
    listed = project()["tool"]["setuptools"]
    tree = package_folders()
    assert sorted(listed["packages"]) == sorted(tree)
    assert {name: Path(folder) for name, folder in listed["package-dir"].items()} == tree


def test_every_package_has_an_init_file() -> None:
    assert [name for name, folder in package_folders().items() if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_data_file_is_declared() -> None:
    declared = project()["tool"]["setuptools"]["package-data"]
    missing = [
        f"{package}: {name}"
        for package, folder in package_folders().items()
        for name in data_files(package, folder)
        if not any(fnmatch(name, pattern) for pattern in declared.get(package, []))
    ]
    assert missing == []


def test_the_version_is_the_installed_one() -> None:
    from lossyspec.versions import versions

    assert versions()["lossytune"] == project()["project"]["version"]


@dataclass(frozen=True)
class Installed:
    """A wheel, and a folder that holds nothing but what it installed."""

    wheel: Path
    site: Path

    def python(self, *args: str, cwd: Path) -> str:
        """Runs Python on the installed files, in a folder without the repository; returns its stdout."""
        env = {**os.environ, "PYTHONPATH": str(self.site), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        result = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, cwd=cwd, env=env)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy, so that no earlier build folder gets into the wheel, and none is left in the repository."""
    source, dist, site = (tmp_path_factory.mktemp("wheel") / name for name in ("source", "dist", "site"))
    source.mkdir()
    for folder in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(dist), str(source)]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    (wheel,) = dist.glob("*.whl")
    put = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    done = subprocess.run(put, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return Installed(wheel, site)


def test_the_wheel_holds_the_packages_and_their_data_and_no_tests(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
        entry = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    files = {name for name in names if ".dist-info/" not in name}
    wanted = set()
    for package, folder in package_folders().items():
        place = package.replace(".", "/")
        wanted |= {f"{place}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        wanted |= {f"{place}/{name}" for name in data_files(package, folder)}
    assert files == wanted
    assert {"lossyspec/py.typed", "lossyspec/tuner/data/dialogue.jsonl"} <= files
    assert [name for name in names if Path(name).name.startswith(("test_", "conftest")) or "tests" in Path(name).parts] == []
    assert any(name.endswith("LICENSE") for name in names)
    assert "lossytune = lossyspec.tuner.cli:main" in entry


_IMPORT_ALL = """
import importlib, json, pkgutil, lossyspec
places = {"lossyspec": lossyspec.__file__}
for found in pkgutil.walk_packages(lossyspec.__path__, "lossyspec."):
    if not found.name.endswith(".__main__"):
        places[found.name] = importlib.import_module(found.name).__file__
from lossyspec.tuner.workloads import TASKS, load_workload
halves = {name: len(load_workload(name).confirm) for name, task in TASKS.items() if task.files}
print(json.dumps([places, halves]))
"""


def test_all_modules_and_workloads_load_without_the_repository(installed: Installed, tmp_path: Path) -> None:
    places, halves = json.loads(installed.python("-c", _IMPORT_ALL, cwd=tmp_path))
    assert {name for name, place in places.items() if not Path(place).is_relative_to(installed.site)} == set()
    assert set(package_folders()) <= set(places)
    assert set(halves) == {"dialogue", "multiturn", "code", "summarization", "longdoc"}
    assert min(halves.values()) >= 8


def test_the_command_runs_without_the_repository(installed: Installed, tmp_path: Path) -> None:
    said = installed.python("-m", "lossyspec.tuner", "--help", cwd=tmp_path)
    assert said.startswith("Usage: ") and "search" in said and "generate" in said
    assert list(tmp_path.iterdir()) == []

"""Who may import whom: walks the syntax tree of every file, and looks at what an import really loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: folder: the package that it installs as
PACKAGES = {
    "lossyspec": "lossyspec",
    "tuner": "lossyspec.tuner",
    "reports": "lossyspec.reports",
    "hardware_profiles": "lossyspec.hardware_profiles",
}
HEAVY = ("torch", "transformers", "optuna")


@dataclass(frozen=True)
class Import:
    """One imported module by its absolute name. lazy: inside a function. dynamic: through `import_module`."""

    name: str
    line: int
    lazy: bool = False
    dynamic: bool = False


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def package_of(path: Path) -> str:
    """The package that a relative import in this file starts from."""
    parts = path.relative_to(ROOT).parent.parts
    return ".".join([PACKAGES.get(parts[0], parts[0]), *parts[1:]])


def imports_of(source: str, package: str) -> list[Import]:
    """All imports of a module, `from` imports with each name that may be a module itself."""
    return list(_walk(ast.parse(source), package, lazy=False))


def _walk(node: ast.AST, package: str, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*above, *([child.module] if child.module else [])])
            yield Import(base, child.lineno, lazy)
            yield from (Import(f"{base}.{alias.name}", child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.Call) and _called(child) in ("import_module", "__import__", "find_spec"):
            first = child.args[0] if child.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, child.lineno, lazy, dynamic=True)
        yield from _walk(child, package, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def within(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def found_in(path: Path, *roots: str) -> list[Import]:
    return [item for item in imports_of(path.read_text(encoding="utf-8"), package_of(path)) if within(item.name, *roots)]


def loaded_by(statement: str, *packages: str) -> list[str]:
    """Which of `packages` are loaded after a statement in a new Python."""
    code = f"import sys, json\n{statement}\nprint(json.dumps([name for name in {packages!r} if name in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return list(json.loads(result.stdout))


def test_the_walk_sees_relative_lazy_and_dynamic_imports() -> None:
    source = (
        "import os.path\n"
        "from . import runner\n"
        "from ..records import dump\n"
        "def work():\n"
        "    from .decoder import Decoder\n"
        "    importlib.import_module('lossyspec.reports.build')\n"
        "class A:\n"
        "    import json\n"
    )
    found = {(item.name, item.lazy, item.dynamic) for item in imports_of(source, "lossyspec.tuner")}
    assert {
        ("os.path", False, False),
        ("lossyspec.tuner.runner", False, False),
        ("lossyspec.records", False, False),
        ("lossyspec.tuner.decoder", True, False),
        ("lossyspec.reports.build", True, True),
        ("json", False, False),
    } <= found


def test_every_folder_of_the_rules_has_modules() -> None:
    assert all(modules(folder) for folder in PACKAGES)


@pytest.mark.parametrize("path", modules("lossyspec"), ids=named)
def test_the_runtime_imports_nothing_of_the_search_or_the_reports(path: Path) -> None:
    banned = ("lossyspec.tuner", "lossyspec.reports", "tuner", "reports", "optuna", "datasets", "click", "matplotlib")
    assert found_in(path, *banned) == []


@pytest.mark.parametrize("path", modules("reports"), ids=named)
def test_reports_read_stored_records_only(path: Path) -> None:
    assert found_in(path, *HEAVY, "lossyspec.tuner", "tuner", "datasets") == []
    runtime = {f"lossyspec.{module.stem}" for module in modules("lossyspec")} | {"lossyspec.reports"}
    foreign = [item for item in found_in(path, "lossyspec") if not within(item.name, *runtime)]
    assert [item for item in foreign if item.name != "lossyspec"] == []


@pytest.mark.parametrize("path", modules("tuner"), ids=named)
def test_the_search_knows_the_reports_in_its_command_line_alone_and_lazily(path: Path) -> None:
    found = found_in(path, "lossyspec.reports")
    allowed = path.parent == ROOT / "tuner" and path.name.startswith("cli")
    assert [item for item in found if not (allowed and item.lazy and item.dynamic)] == []


def test_the_command_line_does_use_the_reports() -> None:
    """Else the rule above holds for nothing."""
    assert any(found_in(path, "lossyspec.reports") for path in modules("tuner"))


@pytest.mark.parametrize("path", modules(*PACKAGES, "tests", "benchmarks"), ids=named)
def test_nobody_imports_a_folder_by_its_name_in_the_repository(path: Path) -> None:
    assert found_in(path, "tuner", "reports", "hardware_profiles") == []


def test_transformers_cache_api_is_known_to_one_file() -> None:
    users = [named(path) for path in modules(*PACKAGES) if "cache_utils" in path.read_text(encoding="utf-8")]
    assert users == ["lossyspec/kv_cache.py"]


@pytest.mark.parametrize(
    "module",
    ["", ".errors", ".hardware", ".profile", ".records", ".settings", ".stopping", ".versions"],
)
def test_importing_pure_data_does_not_import_torch(module: str) -> None:
    assert loaded_by(f"import lossyspec{module}", *HEAVY) == []


def test_importing_the_reports_does_not_import_torch() -> None:
    names = [f"lossyspec.reports.{path.stem}" for path in modules("reports") if path.stem != "__init__"]
    assert loaded_by(f"import {', '.join(names)}", *HEAVY) == []


def test_the_command_line_imports_torch_only_when_a_command_needs_it() -> None:
    """So that help, refusals and commands over stored files answer at once."""
    assert loaded_by("import lossyspec.tuner.cli", *HEAVY) == []


def test_the_public_names_are_all_there_and_load_on_first_use() -> None:
    import lossyspec

    assert loaded_by("import lossyspec; lossyspec.Settings, lossyspec.Sampling, lossyspec.Profile", *HEAVY) == []
    assert all(getattr(lossyspec, name).__name__ == name for name in lossyspec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Decodr'"):
        lossyspec.Decodr  # noqa: B018

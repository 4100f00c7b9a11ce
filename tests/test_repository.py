"""What keeps the repository whole: its packages are its own, and it says only what is so."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("nestpipe", "sim", "executor", "topologies", "traces", "reports")


def test_no_other_distribution_provides_one_of_our_packages() -> None:
    provided = packages_distributions()
    for name in PACKAGES:
        assert set(provided.get(name, [])) <= {"nestpipe"}


def test_every_folder_of_modules_is_a_package_that_says_what_lives_there() -> None:
    for top in PACKAGES:
        for folder in {path.parent for path in (ROOT / top).rglob("*.py")}:
            assert (folder / "__init__.py").is_file(), folder
            assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))), folder


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in names} | {
        (node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }


def test_only_the_executor_imports_torch() -> None:
    for top in ("nestpipe", "sim", "topologies", "traces", "reports"):
        for path in (ROOT / top).rglob("*.py"):
            assert "torch" not in _imports(path), path


def test_matplotlib_is_imported_inside_the_function_that_draws() -> None:
    for path in (path for top in PACKAGES for path in (ROOT / top).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("matplotlib") for name in names), path


def test_the_import_contract_names_every_shared_package() -> None:
    layers = " ".join(PROJECT["tool"]["importlinter"]["contracts"][0]["layers"])
    found = {path.parent.name for path in (ROOT / "nestpipe").glob("*/__init__.py")}
    assert {name for name in found if f"nestpipe.{name}" not in layers} == set()


def test_nobody_imports_a_private_module_or_name_of_another_package() -> None:
    for path in (path for top in PACKAGES for path in (ROOT / top).rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                private = [part for part in (node.module or "").split(".") if part.startswith("_")]
                private += [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private or (node.module or "").startswith(package), f"{path}:{node.lineno}"

"""What keeps the repository whole: its packages are its own, and it says only what is so."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]


def test_no_other_distribution_provides_one_of_our_packages() -> None:
    provided = packages_distributions()
    for name in {package.split(".")[0] for package in PACKAGES}:
        assert set(provided.get(name, [])) <= {"nestpipe"}


def test_every_package_is_listed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("nestpipe", "sim", "executor", "topologies", "traces", "reports")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert found == set(PACKAGES)


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
    for path in ROOT.glob("*/*.py"):
        if path.parent.name in ("tests", "benchmarks"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("matplotlib") for name in names), path


def test_the_import_contract_names_every_shared_module() -> None:
    contract = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "forbidden")
    above = {"cli", "api", "__init__", "__main__"}
    found = {path.stem for path in (ROOT / "nestpipe").iterdir() if path.suffix == ".py" or path.is_dir()}
    found = {name for name in found if (ROOT / "nestpipe" / name).is_dir() or (ROOT / f"nestpipe/{name}.py").is_file()}
    assert set(contract["source_modules"]) == {f"nestpipe.{name}" for name in found - above - {"__pycache__"}}

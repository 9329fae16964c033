"""The rooms of the house and the directions between them, read off the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import offramp

PACKAGE = Path(offramp.__file__).parent
SEES = {  # what each room may import, beside itself
    "common": set(),
    "runs": {"common"},
    "data": {"common", "runs"},
    "models": {"common", "runs", "data"},
    "measuring": {"common", "runs", "data", "models"},
    "training": {"common", "runs", "data", "models", "measuring"},
    "running": {"common", "runs", "data", "models", "measuring"},
    "serve": {"common", "runs", "data", "models", "measuring", "running"},
    "scaling": {"common", "runs", "data", "models", "measuring", "running"},
    "reporting": {"common", "runs", "measuring"},
}
ON_TOP = {"bench", "fitting", "cli"}
WITHOUT_TORCH = ("measuring", "reporting", "runs")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} has a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = {name: (imported(path) & FILES.keys()) - {name, "offramp"} for name, path in FILES.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_nothing_but_folders_stands_at_the_top_level() -> None:
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}
    assert {room(name) for name in FILES} - {"", "__main__"} == {*SEES, *ON_TOP}


@pytest.mark.parametrize("name", SEES)
def test_imports_point_one_way(name: str) -> None:
    wrong = {
        f"{module} -> {other}"
        for module, others in IMPORTS.items()
        if room(module) == name
        for other in others
        if room(other) not in {name, *SEES[name]}
    }
    assert not wrong


def test_there_is_no_import_cycle() -> None:
    TopologicalSorter(IMPORTS).prepare()  # raises and names the cycle


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_rooms_that_need_no_torch(name: str) -> None:
    """Neither they nor what they import when they are imported ask for it."""
    modules = [module for module in FILES if room(module) == name]
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from importlib import import_module\n"
        f"for name in {modules}: import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_registry_imports_no_network() -> None:
    assert not {"offramp.models.msdnet", "offramp.models.ranet"} & IMPORTS["offramp.models.registry"]


def test_importing_changes_nobodys_warning_filters() -> None:
    script = (
        "import warnings; before = list(warnings.filters)\n"
        "import offramp\n"
        "for name in offramp.__all__: getattr(offramp, name)\n"
        "changed = [f for f in warnings.filters if f not in before and 'offramp' in repr(f) or 'PIL' in repr(f)]\n"
        "assert not changed, changed\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_tests_lie_in_folders_named_as_the_rooms() -> None:
    tests = Path(__file__).parent
    folders = {path.name for path in tests.iterdir() if path.is_dir() and path.name[0] not in "_."}
    assert folders - {"helpers", "fixtures"} == {*SEES, *ON_TOP}

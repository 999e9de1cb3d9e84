"""What may import what: the library never imports the lab, and the lab has no cycles."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports(file: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: name the package in full, not by dots"
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def packages_of_the_lab() -> dict[str, set[str]]:
    """Each package or module directly in the lab → those of the lab that it imports."""
    graph: dict[str, set[str]] = {}
    for file in (ROOT / "ripple_lab").rglob("*.py"):
        own = file.relative_to(ROOT / "ripple_lab").parts[0].removesuffix(".py")
        found = {x.split(".")[1] for x in imports(file) if x.startswith("ripple_lab.")}
        graph.setdefault(own, set()).update(found - {own})
    return graph


def test_the_library_never_imports_the_lab():
    for file in (ROOT / "ripple_attention").rglob("*.py"):
        assert "ripple_lab" not in file.read_text(), file  # nor by importlib


def test_back_ends_never_import_what_calls_them():
    for file in (ROOT / "ripple_attention/ops").rglob("*.py"):
        callers = {f"ripple_attention.{x}" for x in ("functional", "modules", "dispatch")}
        assert not callers & imports(file), file


def test_packages_of_the_lab_import_each_other_in_one_direction():
    graph = packages_of_the_lab()
    order: list[str] = []
    while len(order) < len(graph):
        ready = [x for x in graph if x not in order and graph[x] & graph.keys() <= {*order}]
        assert ready, {x: graph[x] - {*order} for x in graph if x not in order}
        order += ready

"""The arrows between modules: down the layers, never in a circle, never into what is private."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("everburn", "activities", "workflows", "workers")
"""From the bottom up."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """What a file imports of this repository, anywhere in it, for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else str(node.module)


GRAPH = {
    module: {name for name in imported(path) if name in FILES} for module, path in FILES.items()
}


def test_layers_point_downward() -> None:
    def height(module: str) -> int:
        return LAYERS.index(module.partition(".")[0])

    upward = [(a, b) for a, others in GRAPH.items() for b in others if height(b) > height(a)]
    assert upward == []


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_what_is_private_stays_in_its_package() -> None:
    foreign = [
        (module, name)
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in (f"{node.module}.{alias.name}" for alias in node.names)
        if name.startswith(LAYERS) and is_private(name) and not is_beside(module, name)
    ]
    assert foreign == []


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def is_beside(module: str, name: str) -> bool:
    """Whether the private part of a name is of the module's own package."""
    parts = name.split(".")
    first = next(i for i, part in enumerate(parts) if part.startswith("_"))
    return module.startswith(".".join(parts[:first]).rpartition(".")[0] + ".")

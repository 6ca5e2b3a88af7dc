"""docs/guarantees.md names tests that exist, for every promise and every case."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
MARKED = re.findall(r"`([\w/]+\.py)::(\w+)`( †)?", PAGE)


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_test_that_the_page_names_exists() -> None:
    assert NAMED
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if not (ROOT / "tests" / file).is_file() or name not in functions(ROOT / "tests" / file)
    ]
    assert missing == []


def test_every_row_says_what_shows_it() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row for row in cells if len(row) != 3 or not all(row)] == []


def only_in_chaos(path: Path) -> set[str]:
    """The tests of a file that `make test` leaves out: marked `chaos`, or in a file that is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and "mark.chaos" in ast.unparse(node.value)
        for node in tree.body
    )
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (whole or "pytest.mark.chaos" in map(ast.unparse, node.decorator_list))
    }


def test_the_dagger_is_where_make_test_leaves_a_test_out() -> None:
    wrong = [
        f"{file}::{name}"
        for file, name, dagger in MARKED
        if bool(dagger) != (name in only_in_chaos(ROOT / "tests" / file))
    ]
    assert wrong == []

"""docs/guarantees.md and docs/failures-elsewhere.md name tests that exist, for every promise and
every case."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARANTEES, ELSEWHERE = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("guarantees.md", "failures-elsewhere.md")
)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`( †)?")
MAX_WORDS = 25
"""Limit for a mechanism, so that the table fits on one screen."""

PAGES = pytest.mark.parametrize("page", [GUARANTEES, ELSEWHERE], ids=["guarantees", "elsewhere"])


def promises() -> list[list[str]]:
    """The rows of the page's tables: promise, mechanism, tests."""
    lines = [line for line in GUARANTEES.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] != "promise" and set(row[0]) != {"-"}]


def lists_of_tests() -> dict[str, int]:
    """How many tests each heading below "Tests" lists, by its anchor on GitHub."""
    _, *sections = GUARANTEES.partition("\n## Tests\n")[2].split("\n### ")
    titles = [section.splitlines()[0] for section in sections]
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(set(anchors)) == len(anchors)
    return {
        anchor: len(TEST.findall(section))
        for anchor, section in zip(anchors, sections, strict=True)
    }


def cases() -> list[str]:
    """The reports of the page, each with what stands below it."""
    return ELSEWHERE.split("\n- **")[1:]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@PAGES
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = TEST.findall(page)
    assert named
    missing = [
        f"{file}::{name}"
        for file, name, _ in named
        if not (ROOT / "tests" / file).is_file() or name not in functions(ROOT / "tests" / file)
    ]
    assert missing == []


def test_every_promise_has_a_short_mechanism_and_its_own_list_of_tests() -> None:
    assert [row for row in promises() if len(row) != 3 or not all(row)] == []
    assert [row[1] for row in promises() if len(row[1].split()) > MAX_WORDS] == []
    linked = [re.fullmatch(r"\[(\d+)\]\(#([\w-]+)\)", row[2]) for row in promises()]
    assert [(link[2], int(link[1])) for link in linked if link] == list(lists_of_tests().items())
    assert None not in linked and 0 not in lists_of_tests().values()


def test_every_case_says_what_shows_it() -> None:
    assert len(cases()) > 30
    shown = re.compile(TEST.pattern + r"|`python -m benchmarks\.\w+`")
    assert [case for case in cases() if "<br>Here: " not in case or not shown.search(case)] == []


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


@PAGES
def test_the_dagger_is_where_make_test_leaves_a_test_out(page: str) -> None:
    wrong = [
        f"{file}::{name}"
        for file, name, dagger in TEST.findall(page)
        if bool(dagger) != (name in only_in_chaos(ROOT / "tests" / file))
    ]
    assert wrong == []

"""Entry points: names of Python code in a run's configuration, resolved where a worker runs."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from everburn.config import Entrypoint
from everburn.usercode.entrypoints import EntrypointError, call, resolve, worker_name

Write = Callable[[str], None]


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the module `user_task` to a folder on the import path."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "user_task.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("user_task", None)


def complaint(name: str) -> str:
    with pytest.raises(EntrypointError) as caught:
        resolve(Entrypoint(name=name))
    return str(caught.value)


def test_a_function_is_found_in_its_module(user_code: Write):
    user_code("def rows(): return [1, 2]")
    assert resolve(Entrypoint(name="user_task:rows"))() == [1, 2]


def test_an_attribute_may_be_nested(user_code: Write):
    user_code("class Task:\n    class Inner:\n        make = staticmethod(lambda: 'made')")
    assert resolve(Entrypoint(name="user_task:Task.Inner.make"))() == "made"


def test_a_module_may_be_in_a_package():
    assert resolve(Entrypoint(name="os.path:join")) is os.path.join


def test_a_call_adds_the_arguments_of_the_entry_point(user_code: Write):
    user_code("def make(setup, *, style, count=1): return (setup, style, count)")
    entrypoint = Entrypoint(name="user_task:make", kwargs={"style": "short", "count": 3})
    assert call(entrypoint, "setup") == ("setup", "short", 3)


def test_an_error_of_the_called_code_is_passed_on(user_code: Write):
    user_code("def make(): raise KeyError('reward')")
    with pytest.raises(KeyError, match="reward"):
        call(Entrypoint(name="user_task:make"))


def test_a_missing_module_is_reported_with_the_worker_and_the_places():
    text = complaint("no_such_task:make")
    assert text.startswith(
        f"worker {worker_name()} can't import 'no_such_task' for 'no_such_task:make': "
        "ModuleNotFoundError: No module named 'no_such_task'. It searches "
    )
    assert all((place or ".") in text for place in sys.path[:3])
    assert "start the workers where the module can be imported, or set PYTHONPATH" in text


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit('usage: task FILE')", "SystemExit: usage: task FILE"),
    ],
)
def test_any_error_while_importing_a_module_is_reported_with_its_cause(
    user_code: Write, code: str, why: str
):
    user_code(code)
    with pytest.raises(EntrypointError, match="can't import 'user_task'") as caught:
        resolve(Entrypoint(name="user_task:make"))
    assert why in str(caught.value)
    assert type(caught.value.__cause__).__name__ in why


def test_a_missing_attribute_is_named(user_code: Write):
    user_code("class Task: pass")
    assert complaint("user_task:make") == (
        f"worker {worker_name()}: module 'user_task' has no 'make' (named by 'user_task:make')"
    )
    assert "has no 'Task.make'" in complaint("user_task:Task.make")


def test_something_that_cant_be_called_is_refused(user_code: Write):
    user_code("rows = [1, 2]")
    assert complaint("user_task:rows") == "'user_task:rows' is a list, not callable"


def test_a_worker_is_named_by_process_and_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "everburn.usercode.entrypoints.platform", SimpleNamespace(node=lambda: "gpu-7")
    )
    assert worker_name() == f"{os.getpid()}@gpu-7"

"""`import potok` is light: the engine process must not pay for what it does not use."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import potok


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = modules_after("import potok")
    assert not loaded & {"numpy", "msgspec", "zmq", "tokenizers", "jinja2", "rich", "asyncio"}


def test_importing_the_engine_process_imports_no_text_side() -> None:
    loaded = modules_after("import potok.engine.process")
    assert not loaded & {"tokenizers", "jinja2", "rich", "typer", "fastapi", "potok.text.tokenizer", "potok.frontend"}


@pytest.mark.parametrize("name", [name for name in potok.__all__ if name != "__version__"])
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(potok, name).__name__ == name


def test_type_checkers_see_the_same_names() -> None:
    stub = Path(potok.__file__).with_suffix(".pyi").read_text()
    assert {line.split()[-1] for line in stub.splitlines() if " import " in line} == {*potok.__all__} - {"__version__"}


def test_the_version_is_that_of_the_distribution() -> None:
    assert potok.__version__ == version("potok")


def test_other_names_are_not() -> None:
    assert not hasattr(potok, "Llm")

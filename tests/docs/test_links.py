"""What the documents name exists: files, and symbols written as `path::symbol`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"])
SYMBOL = re.compile(r"`([\w./-]+\.(?:py|cpp|h|inl))::([\w.]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def symbols(path: Path) -> frozenset[str]:
    text = path.read_text()
    return python_symbols(ast.parse(text).body, "") if path.suffix == ".py" else cpp_symbols(text)


def python_symbols(body: list[ast.stmt], prefix: str) -> frozenset[str]:
    """Classes, functions, methods and fields (`Class.name`), and names assigned at the top."""
    found = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {prefix + node.name} | python_symbols(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(prefix + node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(prefix + node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {prefix + target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def cpp_symbols(text: str) -> frozenset[str]:
    """Types, and functions that have a body or are declared; methods as `Class.name`."""
    text = re.sub(r"__attribute__\(\(\w+\)\) ", "", text)
    types = re.findall(r"^\s*(?:struct|class|enum class) (?:alignas\(\d+\) )?(\w+)", text, re.M)
    functions = re.findall(
        r"^ *(?!return\b|else\b|throw\b)[\w:<>*&][\w:<>,*& ]*?[ *&](?:(\w+)::)?(\w+)\([^;{]*\)[^;{()]*[;{]", text, re.M
    )
    return frozenset(types) | {f"{owner}.{f}" if owner else f for owner, f in functions}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_symbols_exist(document: Path) -> None:
    named = SYMBOL.findall(document.read_text())
    missing = [
        f"{path}::{symbol}"
        for path, symbol in named
        if not (ROOT / path).is_file() or symbol not in symbols(ROOT / path)
    ]
    assert missing == []


def test_the_tour_names_the_way_of_a_request() -> None:
    paths = {path for path, _ in SYMBOL.findall((ROOT / "docs/tour.md").read_text())}
    packages = ("server", "text", "engine", "core", "backends/native", "sampling", "model", "weights")
    assert [p for p in packages if not any(path.startswith(f"src/potok/{p}/") for path in paths)] == []
    assert any(path.startswith("csrc/") for path in paths)


@pytest.mark.parametrize(
    ("source", "there", "absent"),
    [
        ("class A:\n    x: int = 1\n    def f(self): ...\nB = 2\n", {"A", "A.x", "A.f", "B"}, {"f", "x", "A.g"}),
        ("async def g(): ...\n", {"g"}, {"A"}),
    ],
)
def test_python_symbols(source: str, there: set[str], absent: set[str]) -> None:
    found = python_symbols(ast.parse(source).body, "")
    assert there <= found
    assert not absent & found


def test_cpp_symbols() -> None:
    text = """
struct A {
    int n;
};
static void f(int a) {
    return g(a);
}
int A::h(int b) const {
    return b;
}
"""
    assert cpp_symbols(text) == {"A", "f", "A.h"}


def test_documents_stay_short() -> None:
    lines = {document: len(document.read_text().splitlines()) for document in DOCUMENTS}
    assert lines[ROOT / "docs/architecture.md"] <= 80
    assert lines[ROOT / "CONTRIBUTING.md"] <= 60
    assert [name(d) for d in DOCUMENTS if d.parent.name == "adr" and lines[d] > 50] == []


def test_decisions_are_numbered_without_gaps_and_complete() -> None:
    records = sorted((ROOT / "docs/adr").glob("*.md"))
    assert [int(r.name[:4]) for r in records] == list(range(1, len(records) + 1))
    for record in records:
        text = record.read_text()
        assert text.startswith(f"# {record.name[:4]} ")
        for part in ("**Context.**", "**Decision.**", "**Consequences.**", "**What would change our mind.**"):
            assert part in text, f"{record.name} has no {part}"

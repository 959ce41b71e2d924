"""Chat templates as model files carry them: Jinja, in a sandbox, with the names and habits that they count on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 (declared by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """An environment like the one that the authors of templates test them in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML. Noncharacters stay as they are even in ASCII, being marks."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub(r"[^\x00-\x7f\ufdd0-\ufdef]", _escape, text) if ensure_ascii else text


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    return char if ord(char) & 0xFFFE == 0xFFFE else json.dumps(char)[1:-1]


def raise_exception(message: str) -> NoReturn:
    """What a template calls to refuse a dialogue."""
    raise TemplateError(message)


class TemplateFacts:
    """What the text of a template says about it, before it is run.

    printed: the text between its tags. constants: the strings inside its tags, to be printed or compared with. names:
    the attributes that it reads. knows_null: it asks whether something is none.
    """

    def __init__(self, tree: nodes.Template) -> None:
        constants = [node.value for node in tree.find_all(nodes.Const)]
        self.printed = frozenset(node.data for node in tree.find_all(nodes.TemplateData))
        self.constants = frozenset(value for value in constants if isinstance(value, str))
        self.names = frozenset(node.attr for node in tree.find_all(nodes.Getattr))
        self.knows_null = None in constants or any(node.name == "none" for node in tree.find_all(nodes.Test))

"""ChatTemplate: a dialogue to ids, such that only the template can produce control tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from potok.errors import ClientError
from potok.text.guard import NONCHARACTERS, Guard, strings
from potok.text.messages import normalise
from potok.text.spellings import Spellings
from potok.text.template import TemplateFacts, make_environment
from potok.text.tokenizer import Tokenizer

#: Variables that the server sets; arguments of a request may not. "self" is what the template's renderer is called.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "self"}
    | {"raise_exception", "strftime_now"}
)


class ChatTemplate:
    """The chat template of one model file. Whether a begin id stands in front is the template's business alone.

    A template that cannot be used is no error until a chat needs it: completions work without.
    """

    def __init__(self, template: str | None, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        """template: Jinja source, or None when the file has none. now: the clock of `strftime_now`."""
        self._tokenizer = tokenizer
        self._source = template or ""
        # A spelling of one character has no inside to put a mark in; as such it stays text.
        self._spellings = Spellings({text: i for text, i in tokenizer.control.ids.items() if len(text) > 1})
        environment = make_environment(now)
        tree = nodes.Template([])
        self._template: Template | None = None
        self._problem = "has no chat template"
        if template:
            try:
                tree = environment.parse(template)
                self._template = environment.from_string(template)
            except (TemplateSyntaxError, RecursionError) as error:
                self._problem = f"has a chat template that is not valid ({error})"
        self._facts = facts = TemplateFacts(tree)
        self._guard = Guard(self._spellings.ids, facts.printed, facts.constants, facts.names)
        self._special = {
            name: tokenizer.token_bytes(token).decode("utf-8", "replace")
            for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
            if token is not None
        }

    def encode(
        self,
        messages: list[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a dialogue, ready for the assistant's turn when add_generation_prompt is set.

        kwargs: further variables of the template. Raises ClientError for messages that are not well formed or that the
        template refuses (with its own words), and when the model has no template that works.
        """
        if self._template is None:
            raise ClientError(
                f"this model {self._problem}; use completions, or a model file with a template that works.",
                "messages",
                "no_chat_template",
            )
        check_arguments(kwargs)
        plain = normalise(
            messages, knows_developer="developer" in self._facts.constants, knows_null=self._facts.knows_null
        )
        try:
            mark = self._mark([plain, tools, kwargs])
            guarded = [{**self._guard.protect(one, mark), "role": one["role"]} for one in plain]
            tools, kwargs = self._guard.protect(tools, mark), self._guard.protect(kwargs, mark)
        except RecursionError:
            raise ClientError("messages or tools are nested too deep.", "messages", "out_of_range") from None
        rendered = _render(
            self._template,
            mark,
            {
                **self._special,
                **kwargs,
                "messages": guarded,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        pieces = (
            piece if isinstance(piece, int) else piece.replace(mark, "") for piece in self._spellings.split(rendered)
        )
        return self._tokenizer.encode_pieces(pieces, "messages")

    def _mark(self, everything: Any) -> str:
        text = "".join([*strings(everything), self._source])
        for char in NONCHARACTERS:
            if char not in text:
                return char
        raise ClientError("messages use every noncharacter of Unicode; remove one.", "messages", "invalid_text")


def _render(template: Template, mark: str, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(**variables)
    except TemplateError as error:
        reason = error.message or type(error).__name__
    except Exception as error:  # the template is a program of someone else's: anything may be raised in it
        reason = f"{type(error).__name__}: {error}"
    raise ClientError(
        f"the chat template refuses these messages: {reason.replace(mark, '')}", "messages", "template_error"
    )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ClientError for variables of a request that would hide the server's own."""
    for name in arguments:
        if name in RESERVED:
            raise ClientError(
                f"chat_template_kwargs may not set {name!r}; leave it out.", "chat_template_kwargs", "reserved"
            )

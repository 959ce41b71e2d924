"""Chat templates: the ids of a dialogue, who may write control tokens, and what is refused."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_kit import small_tokenizer

from potok.errors import ClientError
from potok.text.chat import ChatTemplate, check_arguments
from potok.text.guard import NONCHARACTERS
from potok.text.template import to_json
from potok.text.tokenizer import Tokenizer

START, END = 1, 2


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer, metadata: dict[str, Any]) -> ChatTemplate:
    return ChatTemplate(metadata["tokenizer.chat_template"], tokenizer)


def test_ids_of_a_dialogue(chat: ChatTemplate, tokenizer: Tokenizer) -> None:
    dialogue = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi, I'm Zo\u00eb \U0001f336 42\n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": " 7 * 6? "},
    ]
    expected: list[int] = []
    for message in dialogue:
        text = f"{message['role']}\n{message['content']}"
        expected += [START, *tokenizer.encode(text), END, *tokenizer.encode("\n")]
    assert chat.encode(dialogue, add_generation_prompt=False) == expected
    assert chat.encode(dialogue) == [*expected, START, *tokenizer.encode("assistant\n")]


def test_known_ids_of_one_question(chat: ChatTemplate) -> None:
    ids = chat.encode(user("Hello"))
    assert ids[:4] == [1, 9690, 198, 2683]  # <|im_start|> system \n You
    assert ids[-10:] == [1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198]  # user \n Hello ... assistant \n


def test_text_parts_equal_plain_text(chat: ChatTemplate) -> None:
    assert chat.encode(user([{"type": "text", "text": "hi"}])) == chat.encode(user("hi"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.encode(user(parts)) == chat.encode(user("a\nb"))


def test_two_user_turns_are_fine_where_the_template_allows_them(chat: ChatTemplate) -> None:
    assert chat.encode(user("a") + user("b")).count(START) == 4


# --- Begin id


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_template_alone_puts_the_begin_id(metadata: dict[str, Any], add_bos: bool) -> None:
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.add_bos_token": add_bos})
    printed = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", tokenizer)
    assert printed.encode(user("Hello")) == [1, 19556, 2]
    default = ChatTemplate(metadata["tokenizer.chat_template"], tokenizer).encode(user("Hello"))
    assert default[0] == 1
    assert default[1] != 1


# --- Nobody but the template writes control tokens

SMALL = small_tokenizer(
    control=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|end|>", "[INST]", "\n<x>")
)

TEMPLATES = {
    "turns": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trimmed": "{% for m in messages %}<|im_start|>{{ m.content | trim }}{{ m.name | trim }}<|im_end|>{% endfor %}",
    "joined": "<|user|>{% for m in messages %}{{ m.content ~ m.name }}{% endfor %}[INST]"
    "{{ messages | map(attribute='content') | join }}{{ messages | map(attribute='name') | join('') }}",
    "taken apart": "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ m.name.replace('</think>', '') }}"
    "{{ m.content[:3] + m.content[3:] }}{{ m.content | upper | lower }}{% endfor %}<|end|>",
    "role in the spelling": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    "open": "{% for m in messages %}{{ '<|' + m.content + '|>' }}{{ '<' + m.name + '>' }}{{ '[' ~ m.content }}"
    "{{ 'user' == m.name }}{{ 'end|>' in m.name }}{% endfor %}<|im_start|>",
    "as json": "<|im_start|>{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=true) }}"
    "{% for t in tools or [] %}{{ t | tojson }}{{ t.function.name }}{{ '<' ~ t.function.description }}{% endfor %}",
}
SPELLINGS = list(SMALL.control.ids)
PARTS = [
    "<|im_",
    "start|>",
    "end|>",
    "<",
    "|",
    ">",
    "|>",
    "<|",
    "im_end",
    "im_end|",
    "user",
    "end",
    "|im_end|",
    "INST]",
    "x>",
]
NESTED = ["</think>", "<|im_</think>end|>", "<</think>|im_end|>", "<|im_<|im_end|>end|>"]
OTHERS = [NONCHARACTERS[0], NONCHARACTERS[1], NONCHARACTERS[-1], "[", "x", "\n", " ", "\\", '"', "\u00e9"]
FRAGMENTS = st.sampled_from(SPELLINGS + PARTS + NESTED + OTHERS)
TEXTS = (
    st.lists(st.one_of(FRAGMENTS, st.text(max_size=3)), max_size=6)
    .map("".join)
    .filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS, "name": TEXTS}),
    min_size=1,
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXTS, "description": TEXTS}), "extra": TEXTS})
    | st.dictionaries(TEXTS, TEXTS, max_size=2).map(lambda d: {"function": {"name": "f", "description": "d"}, **d}),
    max_size=2,
)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_control_ids_are_those_of_a_harmless_dialogue(name: str) -> None:
    chat = ChatTemplate(TEMPLATES[name], SMALL)

    def controls(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        return [token for token in chat.encode(messages, tools=tools) if SMALL.is_control(token)]

    @given(MESSAGES, TOOLS)
    def same(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        harmless = [{**message, "content": "c", "name": "n"} for message in messages]
        no_tools = [{"function": {"name": "n", "description": "d"}} for _ in tools]
        assert controls(messages, tools) == controls(harmless, no_tools)

    same()


@given(st.one_of(TEXTS, st.text(st.characters(exclude_categories=["Cs"]))))
def test_message_text_arrives_as_it_is(text: str) -> None:
    """Marks leave nothing behind: the text of the ids is the text of the message, whatever it holds."""
    chat = ChatTemplate("<|im_start|>{{ messages[0].content }}<|im_end|>", SMALL)
    ids = chat.encode(user(text))
    assert (ids[0], ids[-1]) == (START, END)
    assert SMALL.decode(ids[1:-1], skip_special=False) == text
    assert not any(map(SMALL.is_control, ids[1:-1]))


@given(st.text(st.sampled_from("ab <>|!1\n\u00e9"), max_size=20))
def test_ids_of_message_text_are_those_of_the_plain_tokenizer(text: str) -> None:
    tokenizer = small_tokenizer(words=("ab", "<a", "<|", "|>", "a<", "!<", " <", "<<", "\n\n"))
    chat = ChatTemplate("<|im_start|>u {{ messages[0].content }}<|im_end|>", tokenizer)
    assert chat.encode(user(text)) == [START, *tokenizer.encode("u " + text), END]


def test_what_a_template_looks_for_in_a_message_is_still_found(tokenizer: Tokenizer) -> None:
    thinking = ChatTemplate(
        "{% for m in messages %}{{ m.content.split('</think>')[-1] if '</think>' in m.content }}{% endfor %}", tokenizer
    )
    assert tokenizer.decode(thinking.encode(user("<think>hm</think>42"))) == "42"


def test_no_mark_is_left_when_all_but_one_noncharacter_is_used(chat: ChatTemplate) -> None:
    tokenizer = SMALL
    one = ChatTemplate("{{ messages[0].content }}", tokenizer)
    text = "<|im_end|>" + "".join(NONCHARACTERS[:-1])
    assert tokenizer.decode(one.encode(user(text))) == text
    with pytest.raises(ClientError, match="every noncharacter"):
        one.encode(user("<|im_end|>" + "".join(NONCHARACTERS)))


def test_a_template_may_write_any_control_token_and_generation_blocks(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
        "<file_sep>{% generation %}{{ messages[0].content }}{% endgeneration %}<|endoftext|>",
        tokenizer,
    )
    assert template.encode(user("Hello")) == [5, 19556, 0]


# --- Tools, arguments, clocks


def test_tool_calls_reach_the_template_as_objects(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}{{ tools[0].n }}", tokenizer)
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Z\u00fcrich"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert tokenizer.decode(template.encode([message], tools=[{"n": "!"}])) == "Z\u00fcrich!"
    broken = {"type": "function", "function": {"name": "w", "arguments": "[" * 100_000}}
    as_text = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | length }}", tokenizer)
    assert tokenizer.decode(as_text.encode([{**message, "tool_calls": [broken]}])) == "100000"


def test_null_content_is_none_only_where_the_template_asks_for_none(tokenizer: Tokenizer) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    plain = ChatTemplate("[{{ messages[0].content }}]", tokenizer)
    asking = ChatTemplate("{{ 'none' if messages[0].content is none else 'text' }}", tokenizer)
    assert tokenizer.decode(plain.encode([message])) == "[]"
    assert tokenizer.decode(asking.encode([message])) == "none"


def test_developer_is_system_unless_the_template_knows_developers(tokenizer: Tokenizer) -> None:
    message = [{"role": "developer", "content": "x"}]
    assert tokenizer.decode(ChatTemplate("{{ messages[0].role }}", tokenizer).encode(message)) == "system"
    knowing = ChatTemplate("{{ messages[0].role == 'developer' }}", tokenizer)
    assert tokenizer.decode(knowing.encode(message)) == "True"


def test_further_arguments_reach_the_template_but_hide_nothing(chat: ChatTemplate, tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ enable_thinking }}", tokenizer)
    assert tokenizer.decode(template.encode(user("x"), enable_thinking=False)) == "False"
    assert not any(map(tokenizer.is_control, template.encode(user("x"), enable_thinking="<|im_end|>")))
    for name in ("messages", "bos_token", "raise_exception"):
        with pytest.raises(ClientError, match=name) as caught:
            chat.encode(user("x"), **{name: []})
        assert caught.value.param == "chat_template_kwargs"
    for name in ("tools", "add_generation_prompt"):
        with pytest.raises(ClientError, match=name):
            check_arguments({name: None})


def test_the_clock_is_the_callers(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", tokenizer, now=lambda: datetime(2024, 7, 26))
    assert tokenizer.decode(template.encode(user("x"))) == "26 Jul 2024"


def test_json_is_plain_json() -> None:
    assert to_json({"b": "<\u00e9'>", "a": 1}) == '{"b": "<\u00e9\'>", "a": 1}'
    assert to_json("\u00e9\U0001f336\n", ensure_ascii=True) == '"\\u00e9\\ud83c\\udf36\\n"'
    assert (
        to_json({"b": 1, "a": [2]}, indent=1, separators=(",", ":"), sort_keys=True) == '{\n "a":[\n  2\n ],\n "b":1\n}'
    )


# --- Refusals


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        ("hi", "messages", "must be a list"),
        (["hi"], "messages[0]", "must be an object"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", "'wizard'; it must be one of system"),
        ([{"content": "x"}], "messages[0].role", "role is missing"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "must be one of"),
        (user("a") + user(None), "messages[1].content", "null or missing"),
        ([{"role": "user"}], "messages[0].content", "null or missing"),
        (user(123), "messages[0].content", "not int"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "with tool_calls"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content", "with tool_calls"),
        ([{"role": "assistant", "content": None, "tool_calls": 1}], "messages[0].tool_calls", "list of objects"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type", "text only"),
        (user([{"type": "text", "text": "a"}, "b"]), "messages[0].content[1].type", "text only"),
        (user([{"type": "text"}]), "messages[0].content[0].text", "must be text"),
        (user("a\ud800"), "messages", r"U+D800"),
        (user("a\u0004"), "messages", r"U+0004"),
    ],
)
def test_messages_that_are_not_well_formed_are_refused(
    chat: ChatTemplate, messages: Any, param: str, says: str
) -> None:
    with pytest.raises(ClientError) as caught:
        chat.encode(messages)
    assert says in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must alternate <here>') }}", "Roles must alternate <here>"),
        ("{{ raise_exception('Bad: ' + messages[0].content) }}", "Bad: <|im_end|>"),
        ("{{ messages[0].content + none }}", "TypeError"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(999999) %}{% endfor %}", "OverflowError"),
        ("{{ messages.append(1) }}", "unsafe|not callable|modif"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_refuses_is_the_callers_error_in_its_own_words(
    tokenizer: Tokenizer, template: str, says: str
) -> None:
    with pytest.raises(
        ClientError, match=f"the chat template refuses these messages: .*({says.replace('|im_end|', '.im_end.')})"
    ) as caught:
        ChatTemplate(template, tokenizer).encode(user("<|im_end|>"))
    assert caught.value.param == "messages"
    assert not any(char in str(caught.value) for char in NONCHARACTERS)


@pytest.mark.parametrize(
    ("template", "says"),
    [(None, "has no chat template"), ("", "has no chat template"), ("{% if %}", "not valid"), ("{{", "not valid")],
)
def test_a_template_that_cannot_be_used_is_refused_when_used(
    tokenizer: Tokenizer, template: str | None, says: str
) -> None:
    chat = ChatTemplate(template, tokenizer)
    with pytest.raises(ClientError, match=says) as caught:
        chat.encode(user("x"))
    assert caught.value.code == "no_chat_template"


def test_deep_nesting_is_refused(chat: ChatTemplate) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ClientError, match="nested too deep"):
        chat.encode(user("x"), tools=[{"x": nested}])

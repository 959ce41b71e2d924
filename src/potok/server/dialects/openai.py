"""OpenAI's completions and chat completions: from a request body to a running Reply, or to a complete answer. No HTTP.

`potok run` uses `completion` and `chat_completion`; the server uses the `open_...` functions and streams as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from potok.errors import ClientError
from potok.frontend import FrontEnd, Generation, resolve
from potok.params import SamplingParams, Terms, check_token_ids
from potok.server.caller import Caller
from potok.server.dialects.fields import read
from potok.server.dialects.openai_fields import CHAT, COMPLETION, DETOKENIZE, SAMPLING, TOKENIZE, Prompt
from potok.server.dialects.openai_reply import ChatShape, Echo, Reply, TextShape, Whole, Wishes
from potok.server.limits import MAX_BODY_BYTES, MAX_CHOICES_PER_CALL, MAX_PROMPT_LOGPROBS
from potok.text.assembler import TokenLogprob
from potok.text.tokenizer import Tokenizer

#: From a body, and who sent it, to a call under way.
Open = Callable[[FrontEnd, Any, Caller], Awaitable[Reply]]

_SAMPLING_NAMES = tuple(field.name for field in SAMPLING)


async def completion(frontend: FrontEnd, body: Any) -> dict[str, Any]:
    """The complete answer of /v1/completions. Raises ClientError, or ServerError when the engine failed."""
    return await _whole(await open_completion(frontend, body, Caller()))


async def chat_completion(frontend: FrontEnd, body: Any) -> dict[str, Any]:
    """The complete answer of /v1/chat/completions. Raises as `completion` does."""
    return await _whole(await open_chat(frontend, body, Caller()))


async def _whole(reply: Reply) -> dict[str, Any]:
    try:
        if reply.wishes.stream:
            raise ClientError("stream is not supported here; remove it.", "stream", "not_supported")
        whole = Whole(reply)
        async for batch in reply.batches():
            whole.take(batch)
        return whole.message()
    finally:
        reply.cancel()


async def open_completion(frontend: FrontEnd, body: Any, caller: Caller) -> Reply:
    """Starts a completions call. Raises ClientError, with nothing started, when anything about it is wrong."""
    values = read(body, COMPLETION)
    check_model(frontend, values["model"])
    prompts: list[Prompt] = values["prompt"]
    if len(prompts) * values["n"] > MAX_CHOICES_PER_CALL:
        raise ClientError(
            f"{len(prompts)} prompts with n {values['n']} are more than {MAX_CHOICES_PER_CALL} choices; lower n.",
            "n",
            "out_of_range",
        )
    wishes = _wishes(values, values["logprobs"] is not None)
    rated = values["prompt_logprobs"]
    if values["echo"] and values["logprobs"] is not None:
        rated = max(values["logprobs"], rated or 0)
    params = _params(values, values["max_tokens"], values["logprobs"], rated)
    terms = caller.terms(values)
    caller.door.ask(len(prompts) * params.n)
    encoded = {}
    for i, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            frontend.check_size(len(prompt), field)
        encoded[field] = await frontend.encode_prompt(prompt, field) if isinstance(prompt, str) else prompt
        await asyncio.sleep(0)
    caller.door.weigh([len(ids) for ids in encoded.values() for _ in range(params.n)])
    generations = await _start(frontend, encoded, params, terms)
    echoes = []
    if values["echo"]:
        top = values["logprobs"] or 0
        echoes = [_echo(frontend.tokenizer, *pair, top) for pair in zip(prompts, encoded.values(), strict=True)]
    return Reply(TextShape(), frontend.model_name, generations, params.n, wishes, echoes)


def _echo(tokenizer: Tokenizer, prompt: Prompt, ids: list[int], top: int) -> Echo:
    """Of the ids and not of the text as it came: what the model was given, and what the tokens add up to.

    A begin token that the caller did not write is a token of the prompt and no part of its text.
    """
    first = ids[0]
    added = isinstance(prompt, str) and first == tokenizer.bos_id and not prompt.startswith(tokenizer.token_text(first))
    data = b"" if added else tokenizer.token_bytes(first)
    text = tokenizer.decode(ids[added:], skip_special=False)
    return Echo(text, TokenLogprob(first, tokenizer.token_text(first), data, 0.0), top)


async def open_chat(frontend: FrontEnd, body: Any, caller: Caller) -> Reply:
    """Starts a chat completions call. Raises ClientError, with nothing started, when anything about it is wrong."""
    values = read(body, CHAT)
    check_model(frontend, values["model"])
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise ClientError("top_logprobs needs logprobs: true.", "top_logprobs", "needs_logprobs")
    wishes = _wishes(values, values["logprobs"])
    logprobs = (values["top_logprobs"] or 0) if values["logprobs"] else None
    params = _params(values, _max_tokens(values), logprobs, values["prompt_logprobs"])
    terms = caller.terms(values)
    caller.door.ask(params.n)
    frontend.check_size(sum(len(message["content"]) for message in values["messages"]), "messages")
    ids = await frontend.encode_chat(
        values["messages"], add_generation_prompt=values["add_generation_prompt"], **values["chat_template_kwargs"]
    )
    caller.door.weigh([len(ids)] * params.n)
    generations = await _start(frontend, {"messages": ids}, params, terms)
    return Reply(ChatShape(), frontend.model_name, generations, params.n, wishes)


def _wishes(values: dict[str, Any], logprobs: bool) -> Wishes:
    if values["stream_options"] is not None and not values["stream"]:
        raise ClientError("stream_options needs stream: true.", "stream_options", "needs_stream")
    if values["prompt_logprobs"] is not None and values["stream"]:
        raise ClientError(
            "prompt_logprobs with stream: true is not supported; ask for the whole answer.",
            "prompt_logprobs",
            "not_supported",
        )
    return Wishes(
        stream=values["stream"],
        usage_chunk=bool(values["stream_options"]),
        token_ids=values["return_token_ids"],
        logprobs=logprobs,
        prompt_logprobs=values["prompt_logprobs"],
    )


def _params(
    values: dict[str, Any], max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    given = {name: values[name] for name in _SAMPLING_NAMES}
    given |= {"stop": list(values["stop"]), "stop_token_ids": list(values["stop_token_ids"])}
    return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _max_tokens(values: dict[str, Any]) -> int | None:
    """Chat has two names for it; None is the rest of the context."""
    new, old = values["max_completion_tokens"], values["max_tokens"]
    if new is not None and old is not None and new != old:
        raise ClientError(
            f"max_completion_tokens is {new} but max_tokens, its older name, is {old}; send one of them.",
            "max_tokens",
            "conflict",
        )
    found: int | None = old if new is None else new
    return found


async def _start(
    frontend: FrontEnd, prompts: dict[str, list[int]], params: SamplingParams, terms: Terms
) -> list[Generation]:
    """prompts: by what the caller calls each of them."""
    if params.prompt_logprobs is not None:
        asked = sum(map(len, prompts.values())) * (params.prompt_logprobs + 1) * params.n
        if asked > MAX_PROMPT_LOGPROBS:
            raise ClientError(
                f"this asks for {asked} log-probabilities of prompts, and a call may have {MAX_PROMPT_LOGPROBS}; "
                "send shorter or fewer prompts, or ask for fewer at each token.",
                "prompt",
                "out_of_range",
            )
    if len(prompts) > 1:  # nothing starts before all are known to be good
        for field, ids in prompts.items():
            resolve(ids, params, frontend.engine.info, frontend.tokenizer.end_ids, field)
            await asyncio.sleep(0)  # other streams go on between the prompts of a large call
    generations: list[Generation] = []
    try:
        for field, ids in prompts.items():
            generations.append(frontend.generate(ids, params, field, terms))
            await asyncio.sleep(0)
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    return generations


def check_model(frontend: FrontEnd, name: str | None) -> None:
    if name is not None and name != frontend.model_name:
        raise ClientError(
            f"the model {name[:100]!r} does not exist; this server has {frontend.model_name!r}.",
            "model",
            "model_not_found",
        )


async def tokenize(frontend: FrontEnd, body: Any) -> dict[str, Any]:
    """vLLM's /tokenize, with a prompt or with messages."""
    values = read(body, TOKENIZE)
    check_model(frontend, values["model"])
    tokenizer = frontend.tokenizer
    if (values["prompt"] is None) == (values["messages"] is None):
        raise ClientError("give either prompt or messages.", "prompt", "missing")
    if values["messages"] is not None:
        if values["add_special_tokens"]:
            raise ClientError(
                "add_special_tokens with messages is not supported: the template adds them; remove it.",
                "add_special_tokens",
                "not_supported",
            )
        ids = await frontend.encode_chat(
            values["messages"], add_generation_prompt=values["add_generation_prompt"], **values["chat_template_kwargs"]
        )
    else:
        ids = await frontend.encode_prompt(values["prompt"])
        if values["add_special_tokens"] is False and tokenizer.add_bos:
            ids = ids[1:]
    return {
        "count": len(ids),
        "max_model_len": frontend.engine.info.max_model_len,
        "tokens": ids,
        "token_strs": await asyncio.to_thread(_strings, tokenizer, ids) if values["return_token_strs"] else None,
    }


def _strings(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_text(id) for id in ids]


async def detokenize(frontend: FrontEnd, body: Any) -> dict[str, Any]:
    """vLLM's /detokenize."""
    values = read(body, DETOKENIZE)
    check_model(frontend, values["model"])
    # On a thread: a body may hold millions of ids, and other streams go on meanwhile.
    return {"prompt": await asyncio.to_thread(_text, frontend.tokenizer, values["tokens"])}


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    check_token_ids("tokens", ids, tokenizer.vocab_size, MAX_BODY_BYTES)
    return tokenizer.decode(ids, skip_special=False)


def model_card(frontend: FrontEnd, created: int) -> dict[str, Any]:
    return {
        "id": frontend.model_name,
        "object": "model",
        "created": created,
        "owned_by": "potok",
        "root": frontend.model_name,
        "parent": None,
        "max_model_len": frontend.engine.info.max_model_len,
        "permission": [],
    }

"""How much a client may ask of the server, apart from the bounds of single fields."""

from __future__ import annotations

#: Longest request body in bytes. About 2 million tokens of text.
MAX_BODY_BYTES = 8 * 2**20

#: Longest request line with headers, in bytes.
MAX_HEAD_BYTES = 64 * 2**10

#: Longest time between two parts of a request body, in seconds.
BODY_PATIENCE_S = 30.0

#: Prompts of one completions call.
MAX_PROMPTS = 1024

#: Choices of one call: prompts times n.
MAX_CHOICES_PER_CALL = 1024

#: Log-probabilities of prompts in one call: each prompt's tokens, times what was asked for at each, times n. The
#: answer takes about 40 bytes for each of them.
MAX_PROMPT_LOGPROBS = 2**21

#: Messages of one dialogue.
MAX_MESSAGES = 4096

#: Characters and items of chat_template_kwargs.
MAX_TEMPLATE_ARGUMENTS = 16384

#: Calls that are open at once. Each may hold its body, its text and the tokens that its client has not read yet, which
#: are never more than its choices times the context: this is what bounds the memory of the process.
MAX_CALLS = 2048

#: `live` turns to 503 when the engine was silent for longer, in seconds. A step takes well under one.
HEARTBEAT_S = 30.0

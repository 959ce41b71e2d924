"""potok as a library: `LLM` for scripts and notebooks, `AsyncLLM` inside an event loop."""

from potok.llm.asynchronous import AsyncLLM
from potok.llm.offline import LLM
from potok.llm.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestOutput"]

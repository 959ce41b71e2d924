"""potok: a language-model server in which many share one machine and each gets the answer they would have got alone.

The names below are imported when they are first used, so that the engine process, which needs none of them,
starts without tokenizers, templates and asyncio clients.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potok.errors import ClientError, EngineDead, LoadError, PotokError, ServerError
    from potok.llm import LLM, AsyncLLM, CompletionOutput, RequestOutput
    from potok.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClientError",
    "CompletionOutput",
    "EngineDead",
    "LoadError",
    "PotokError",
    "RequestOutput",
    "SamplingParams",
    "ServerError",
    "__version__",
]

_HOMES = {
    "LLM": "potok.llm",
    "AsyncLLM": "potok.llm",
    "CompletionOutput": "potok.llm",
    "RequestOutput": "potok.llm",
    "SamplingParams": "potok.params",
    "ClientError": "potok.errors",
    "EngineDead": "potok.errors",
    "LoadError": "potok.errors",
    "PotokError": "potok.errors",
    "ServerError": "potok.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'potok' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__

"""potok: a language-model server in which many share one machine and each gets the answer they would have got alone.

The names below are imported when they are first used, so that the engine process, which needs none of them,
starts without tokenizers, templates and asyncio clients. Type checkers read __init__.pyi instead.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_HOMES = {
    "LLM": "potok.llm",
    "AsyncLLM": "potok.llm",
    "ClientError": "potok.errors",
    "CompletionOutput": "potok.llm",
    "DeadlineExceeded": "potok.errors",
    "DynamicBatcher": "potok.batching",
    "EngineDead": "potok.errors",
    "LoadError": "potok.errors",
    "PotokError": "potok.errors",
    "RequestOutput": "potok.llm",
    "SamplingParams": "potok.params",
    "ServerError": "potok.errors",
    "Unavailable": "potok.errors",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'potok' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__

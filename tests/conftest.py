"""What tests of all folders may use."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

# A shell that starts a command in the background lets it ignore Ctrl-C, and tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _lines_run(function: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture(scope="session")
def lines_run() -> Callable[[Callable[[], object]], int]:
    """How many lines of Python a call runs, of all functions together: its cost, and the same on every machine."""
    return _lines_run

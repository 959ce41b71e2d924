"""How compare.py talks to an engine in another process, perhaps of another Python: a line of JSON each way.

Loads come on stdin; answers go to a file descriptor of their own, because libraries like to print to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def answer(descriptor: str, about: dict[str, Any], generate: Callable[[list[list[int]], int], int]) -> None:
    """Says `about`, then runs loads until stdin ends.

    generate: takes prompts and the number of tokens to add to each, and returns how many it added in all.
    """
    with os.fdopen(int(descriptor), "w", buffering=1) as answers:
        print(json.dumps(about), file=answers)
        for line in sys.stdin:
            load = json.loads(line)
            started = time.perf_counter()
            tokens = generate(load["prompts"], load["output_tokens"])
            print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), file=answers)

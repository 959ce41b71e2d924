"""Keeps results for programs and for later."""

from __future__ import annotations

from pathlib import Path

import msgspec


def keep(result: object, path: Path) -> None:
    """Writes all figures as one JSON document; a file whose name ends in .jsonl gets them as one line more."""
    encoded = msgspec.json.encode(result)
    if path.suffix == ".jsonl":
        with path.open("ab") as lines:
            lines.write(encoded + b"\n")
    else:
        path.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")

"""--api-key of `potok serve`. Messages name the owner of a key at most, never a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

DEFAULT_NAME = "default"

#: A key that is base64 may end in "=", so what has nothing but that after a "=" is a key without a name.
_NAMED = re.compile(r"([A-Za-z0-9._-]{1,64})=([^=].*)")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


def parse_keys(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(name, key) of each NAME=KEY or KEY. A name may have several keys, but no key two names."""
    owners: dict[str, str] = {}
    for number, text in enumerate(given, start=1):
        named = _NAMED.fullmatch(text)
        name, key = (named[1], named[2]) if named else (DEFAULT_NAME, text)
        if not _KEY.fullmatch(key):
            raise typer.BadParameter(
                f"--api-key number {number}: a key has 1 to 512 printable ASCII characters and no spaces."
            )
        if owners.setdefault(key, name) != name:
            raise typer.BadParameter(f"--api-key: {owners[key]} and {name} have the same key; give each its own.")
    return tuple((name, key) for key, name in owners.items())

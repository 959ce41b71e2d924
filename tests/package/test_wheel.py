"""The wheel installs and serves where there is no compiler, and does not fill the disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from potok.weights.default_model import find_default_model

ROOT = Path(__file__).parents[2]
MOST_BYTES = 200_000_000


def run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds the wheel and what it needs; its bin folder."""
    folder = tmp_path_factory.mktemp("wheel")
    quiet = ("--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *quiet, "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ".")
    [wheel] = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "env")
    run(folder / "env/bin/python", "-m", "pip", "install", *quiet, "--only-binary", ":all:", wheel)
    return folder / "env/bin"


def test_it_is_small(installed: Path) -> None:
    size = sum(path.lstat().st_size for path in installed.parent.rglob("*"))
    print(f"{size / 1e6:.0f} MB")
    assert size <= MOST_BYTES


def url_of(server: subprocess.Popen[str]) -> str:
    """Waits until it is ready."""
    assert server.stderr is not None
    told = ""
    while not (ready := re.search(r"ready on (http://\S+)", told)):
        line = server.stderr.readline()
        assert line, told
        told += line
    return ready[1]


def complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def test_it_serves_without_a_compiler(installed: Path) -> None:
    command = [installed / "potok", "serve", find_default_model(), "--port", "0"]
    env = {"PATH": "", "HOME": os.environ.get("HOME", "/")}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        try:
            answer = complete(url_of(server), {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0})
            assert answer["choices"][0]["text"].strip()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0

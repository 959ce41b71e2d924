"""Pytest plugin: tests run with the extension that lies in the folder POTOK_NATIVE, not with the installed one."""

import importlib.util
import os
import sys
from pathlib import Path

path = next(Path(os.environ["POTOK_NATIVE"]).glob("_native*"))
spec = importlib.util.spec_from_file_location("potok._native", path)
assert spec is not None and spec.loader is not None
sys.modules["potok._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["potok._native"])

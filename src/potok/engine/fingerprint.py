"""What makes KV of one start usable in another: the same model, computed and stored in the same way."""

from __future__ import annotations

import hashlib
import sys
import threading

from potok.config import EngineConfig
from potok.errors import LoadError
from potok.model.precision import NUMERICS_VERSION

_CHUNK = 1 << 24


class Fingerprint:
    """Reads the whole model file, about 1 s a GB, on a thread of its own while the weights are loaded."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._error: OSError | None = None
        self._hash = hashlib.blake2b(digest_size=16)
        self._thread = threading.Thread(target=self._read, name="potok-fingerprint", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Raises LoadError when the file cannot be read."""
        self._thread.join()
        if self._error is not None:
            raise LoadError(f"the model file {self._config.model} cannot be read: {self._error.strerror}.")
        c = self._config
        parts = (NUMERICS_VERSION, sys.byteorder, c.kv_cache_dtype, c.block_size, c.activation_bits)
        whole = self._hash.copy()
        whole.update(repr(parts).encode())
        return whole.hexdigest()

    def _read(self) -> None:
        try:
            with open(self._config.model, "rb", buffering=0) as file:
                while chunk := file.read(_CHUNK):
                    self._hash.update(chunk)
        except OSError as error:
            self._error = error

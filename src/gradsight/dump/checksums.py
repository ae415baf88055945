"""Checksums computed beside the writing, one part ahead of the disk."""

import queue
import threading
import zlib
from collections.abc import Sequence


class Checksums:
    """The crc32 of each part, in order, from a thread of its own."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._sums: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="gradsight-crc", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            self._run()

    def next(self) -> int:
        """The checksum of the next part."""
        return self._sums.get()

    def close(self) -> None:
        """Stop, and return when no part is read any more."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for part in self._parts:
            if self._stopped:
                return
            self._sums.put(zlib.crc32(part))

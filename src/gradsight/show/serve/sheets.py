"""Tables of numbers that only grow, in files: the picture of a long run does not fit in memory."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt


class Sheet:
    """Rows of numbers, all of one width and kind; appended, read by position, cut off."""

    def __init__(self, file: Path, width: int, kind: npt.DTypeLike, rows: int = 0) -> None:
        """Open a sheet that is known to have so many rows; what follows them is not trusted."""
        self._width = width
        self._kind = np.dtype(kind)
        self._row = width * self._kind.itemsize
        self._handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.rows = min(rows, os.fstat(self._handle).st_size // max(1, self._row))
        self.cut(self.rows)

    def append(self, values: npt.NDArray[np.generic]) -> None:
        """Add rows at the end."""
        data = memoryview(np.ascontiguousarray(values, self._kind).tobytes())
        position = self.rows * self._row
        while data:
            written = os.pwrite(self._handle, data, position)
            position += written
            data = data[written:]
        self.rows += len(values)

    def read(self, first: int, last: int) -> npt.NDArray[np.generic]:
        """The rows from `first` up to `last`, which is not included."""
        last = min(last, self.rows)
        first = min(first, last)
        # Read, not mapped: a file that somebody cuts off would end the process.
        data = os.pread(self._handle, (last - first) * self._row, first * self._row)
        return np.frombuffer(data, self._kind).reshape(last - first, self._width)

    def cut(self, rows: int) -> None:
        """Forget all rows from this one on."""
        os.ftruncate(self._handle, rows * self._row)
        self.rows = rows

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

"""A run's tail, open for appending by one process. No torch."""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from gradsight.core import limits, rundir
from gradsight.core.file_locks import lock_alone, unlock_and_close
from gradsight.core.places import NO_LINK, ONLY_HERE, open_file, open_folder
from gradsight.errors import RunError, WrongPlace
from gradsight.store.tail_file import TailReader, pack_frame, pack_header

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | ONLY_HERE


class TailWriter:
    """Appends frames, each whole or not at all; its lock keeps other processes out."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file = run_dir / rundir.TAIL
        handle, is_locked = self._open_locked()
        self.handle = handle
        self.is_locked = is_locked
        """False where the file system has no locks."""
        self._run = 0
        # One attribute for both: an interrupt between two would give a number twice.
        self._at = (0, 0)
        self._before = 0
        """The number of the frame before the first."""

    @property
    def at(self) -> tuple[int, int]:
        """The bytes of the tail, and the number of its last frame."""
        return self._at

    def is_due(self, size: int, frames: int) -> bool:
        """Whether it has so many bytes, or so many frames."""
        end, number = self._at
        return end >= size or number - self._before >= frames

    def continue_from(self, run: int, last_frame: int) -> None:
        """Go on behind the last whole frame, or begin a tail where there is none.

        run, last_frame: what the record says.
        """
        self._run = run
        reader = self.reader()
        for _ in reader.frames():
            pass
        if reader.run is None:
            self._begin(last_frame)
            return
        if reader.run != run or (reader.first or 0) > last_frame + 1:
            raise RunError(f"{self._file} is not the tail of the record beside it")
        # What a killed writer left of its last frame would hide those that follow.
        os.ftruncate(self.handle, reader.position)
        self._before = (reader.first or 1) - 1
        self._at = (reader.position, max(reader.last, last_frame))

    def reader(self) -> TailReader:
        """The tail from its beginning."""
        return TailReader(self.handle, str(self._file))

    def append(self, kind: int, payload: bytes) -> None:
        """Append a frame; an OSError where it cannot be."""
        end, number = self._at
        frame = pack_frame(number + 1, kind, payload)
        is_long = number - self._before >= limits.TAIL_FRAMES
        if is_long or end + len(frame) > limits.TAIL_BYTES:
            raise OSError(errno.EFBIG, "the record beside it cannot be published")
        written = os.pwrite(self.handle, frame, end)
        if written < len(frame):
            os.ftruncate(self.handle, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._at = (end + written, number + 1)

    def begin_anew(self, published: tuple[int, int]) -> None:
        """Put a new tail into the place of this one, with the frames behind those of `published`.

        published: what `at` was when the frames were read that the record has now. Those who read
        the old tail keep it.
        """
        position, last = published
        end, number = self._at
        rest = os.pread(self.handle, end - position, position)
        with open_folder(self._run_dir) as folder:
            name = f".{rundir.TAIL}.{secrets.token_hex(4)}.partial"
            handle = os.open(name, _NEW, 0o666, dir_fd=folder)
            try:
                # Locked before it has its name: nobody can come in between.
                lock_alone(handle)
                content = pack_header(self._run, last + 1) + rest
                if os.write(handle, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.replace(name, rundir.TAIL, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.close(handle)
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise
        old = self.handle
        self.handle = handle
        self._before = last
        self._at = (len(content), number)
        unlock_and_close(old)

    def close(self) -> None:
        """Let others write."""
        unlock_and_close(self.handle)

    def _begin(self, last_frame: int) -> None:
        header = pack_header(self._run, last_frame + 1)
        os.ftruncate(self.handle, 0)
        if os.pwrite(self.handle, header, 0) < len(header):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._before = last_frame
        self._at = (len(header), last_frame)

    def _open_locked(self) -> tuple[int, bool]:
        """The tail, and whether it could be locked."""
        while True:
            try:
                handle = open_file(self._run_dir, rundir.TAIL, os.O_RDWR | os.O_CREAT)
            except PermissionError as error:
                raise WrongPlace(
                    f"run_dir {self._run_dir} is not writable: {error.strerror}"
                ) from error
            try:
                is_locked = lock_alone(handle)
                # Whoever had it may have put a new one into its place meanwhile.
                if os.path.samestat(os.fstat(handle), os.lstat(self._file)):
                    return handle, is_locked
            except BlockingIOError as error:
                os.close(handle)
                raise WrongPlace(
                    f"another process is recording into {self._run_dir}; "
                    "give this run a directory of its own"
                ) from error
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

"""A lock on an open file that goes with its process, so that a killed one leaves none. No torch."""

import contextlib
import errno
import os

_NOT_SUPPORTED = {
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EINVAL,
    errno.EBADF,
}
"""What file systems without locks answer; NFS also where its lock daemon does not run."""


def lock_alone(handle: int) -> bool:
    """Lock a file against everybody else; False where the file system has no locks.

    Raises BlockingIOError where somebody else has it locked.
    """
    # Not at import: Windows has no such module, and reading must work there all the same.
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        return False
    return True


def lock_when_free(handle: int) -> None:
    """Lock a file as soon as nobody else has; where there are no locks, go on without."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)


def unlock_and_close(handle: int) -> None:
    """Let others lock it, also where a forked child still has a copy of the descriptor."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_UN)
    except OSError:
        pass  # a file system without locks
    finally:
        os.close(handle)

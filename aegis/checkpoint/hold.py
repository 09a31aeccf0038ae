"""A store that is open is held, so that nobody deletes it meanwhile.

By a shared lock on its folder, which ends with the process. Where a file system has no locks
nothing is held: deleting an open store harms no process there, since its files stay until it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from aegis.errors import StoreError


class Hold:
    """A store's folder is held, shared with others or alone, from here to ``close``."""

    def __init__(self, folder: Path, alone: bool = False) -> None:
        """Take it. Who looks whether it is held holds it alone for a moment: that is waited for.

        Raises:
            StoreError: it was deleted just now, or, where it is to be held alone, it is in use.
        """
        self._fd = -1
        try:
            self._fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
            gone = os.fstat(self._fd).st_ino != folder.stat().st_ino
        except BlockingIOError:
            self.close()
            raise StoreError(f"{folder} is in use by a running process; end that first") from None
        except FileNotFoundError:
            gone = True
        except OSError:
            gone = False
        except BaseException:
            self.close()
            raise
        if gone:
            self.close()
            raise StoreError(f"{folder} was deleted just now; run the command again")

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()

    def close(self) -> None:
        """Let it go; what a forked child closes stays held by its parent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_held(folder: Path) -> bool:
    """Whether a running process has a store open."""
    with contextlib.suppress(StoreError), Hold(folder, alone=True):
        return False
    return True

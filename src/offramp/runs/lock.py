"""One training at a time in a run folder: a lock that names its process and that ends with it, however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offramp.common.files import naming
from offramp.runs.folder import LOCK

log = logging.getLogger("offramp")
_held: set[int] = set()


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep other trainings out of the folder, which is made if it is not there; raise if one is under way."""
    if run.is_file():
        raise ValueError(f"{run} is a file; choose another --out")
    run.mkdir(parents=True, exist_ok=True)
    path, process = run / LOCK, os.getpid()
    file = _take(path, run)
    _held.add(file)
    try:
        with naming(path):
            os.ftruncate(file, 0)
            os.pwrite(file, str(process).encode(), 0)
        yield
    finally:
        if os.getpid() == process:  # not in a child that was forked meanwhile
            _held.discard(file)
            if _is_at(file, path):
                path.unlink()
            os.close(file)


def _take(path: Path, run: Path) -> int:
    """The open file, locked; where another process has just removed it, the next one."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except BlockingIOError as error:
            holder = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            who = f"process {holder}" if holder else "another process"
            raise ValueError(f"{run} is being trained by {who}; wait for it or choose another --out") from error
        except OSError as error:
            log.warning("%s cannot be locked (%s); see to it that nothing else trains into it", run, error.strerror)
            return file
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _let_go() -> None:
    """Processes that load data must not hold the lock of a training that was killed."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)

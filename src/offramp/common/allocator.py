"""Let the C library keep freed memory, so that PyTorch on the CPU does not pay for the same pages at every step.

glibc gives every block of more than 32 MiB back to the system when it is freed, and a step frees all its activations:
the next one takes as many pages again, each of which the kernel clears first. Kept, they are simply used again.
"""

from __future__ import annotations

import ctypes
import platform

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """For this process, from now on. False where the C library is not glibc: nothing is changed there."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, -1))  # -1: never

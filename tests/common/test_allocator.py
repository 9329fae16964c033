"""Memory that is freed is used again without asking the system for it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, numpy as np
if sys.argv[1] == "kept":
    from offramp.common.allocator import keep_freed_memory
    assert keep_freed_memory()
def use():
    np.empty(16 << 20).fill(1.0)  # 128 MiB, every page of it
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _page_faults(how: str) -> int:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_kept() -> None:
    given_back, kept = _page_faults("given back"), _page_faults("kept")
    assert given_back > 200 and kept < given_back / 10  # huge pages make it hundreds, small ones 130,000

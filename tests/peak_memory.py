"""The peak memory of a process itself.

`getrusage` would not do: a process that a larger one starts inherits its peak, so a bound on it
depends on the tests that ran before.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def peak_kilobytes() -> int:
    """Most resident kilobytes that this process has had since its program started (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, "no VmHWM in /proc/self/status"
    return int(found[1])

"""Main memory of this process itself.

`getrusage` alone would not do on Linux: a process that a larger one starts inherits its peak.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Most resident bytes that this process has had since its program started."""
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Resident bytes of this process now (Linux)."""
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
    assert found is not None, f"{_STATUS} has no {name}"
    return int(found[1]) * 1024

"""Where the peak of a process's memory can be bounded: see `conceptmoe_vl.resident_memory`."""

from __future__ import annotations

import sys

import pytest

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

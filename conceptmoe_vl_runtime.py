"""Process settings that must be made before torch is imported. Imports no torch itself.

Every program of the project calls `setup()` as its first statement:

    import conceptmoe_vl_runtime
    conceptmoe_vl_runtime.setup()
    import torch

Why (measured on two x86-64 cores, see docs/training.md):
- glibc gives every large block back to the kernel and faults it in again at the next use: an
  elementwise product ran at 3.8 GB/s by default and at 12.3 GB/s with blocks kept;
- OpenMP threads spin at barriers: with any other process on one of two cores, a loop of small
  operations went from 1,128 ms to 2,808 ms, and to 1,437 ms with threads that sleep instead.
"""

from __future__ import annotations

import ctypes
import os
import sys

# mallopt(3) parameter numbers from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_GIB, _TOP_PAD_BYTES = 2**30, 2**28
_NO_TRIM = -1  # mallopt takes an int; as size_t this is "never give memory back"

# A short spin before sleeping. Training the quickstart model on two free cores, 40 conversations a
# step: no spin 0.37 s, 20,000 turns 0.24 s, endless 0.31 s, one thread 0.32 s.
_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
_ENVIRONMENT_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")

_done = False


def _has_nvidia_gpu() -> bool:
    return (
        os.path.exists("/proc/driver/nvidia/version")
        and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    )


def _keep_freed_memory() -> bool:
    """Tells glibc to keep large freed blocks in the process;
    False where the C library has no mallopt.
    """
    if any(name in os.environ for name in _ENVIRONMENT_NAMES) or "jemalloc" in os.environ.get(
        "LD_PRELOAD", ""
    ):
        return False  # the user has chosen the allocator's settings
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    # Old glibc refuses a threshold above 32 MiB; forbidding mmapped blocks has the same effect
    # there.
    kept = mallopt(_M_MMAP_THRESHOLD, _GIB) == 1 or mallopt(_M_MMAP_MAX, 0) == 1
    return (
        kept
        and mallopt(_M_TRIM_THRESHOLD, _NO_TRIM) == 1
        and mallopt(_M_TOP_PAD, _TOP_PAD_BYTES) == 1
    )


def setup(quiet: bool = False) -> str | None:
    """Sets the allocator and the OpenMP threads of this process up for CPU work, and says so in one
    line.

    Does nothing on other systems than Linux, on machines with an NVIDIA GPU, and at a second call.
    Values already in the environment are kept. `CONCEPTMOE_VL_RUNTIME=off` switches it off.

    Args:
        quiet: print nothing. Otherwise the line goes to stderr, on rank 0 alone.

    Returns:
        The line, or None when nothing was set.
    """
    global _done
    if _done or os.environ.get("CONCEPTMOE_VL_RUNTIME") == "off":
        return None
    if not sys.platform.startswith("linux") or _has_nvidia_gpu():
        return None
    _done = True
    parts = []
    if _keep_freed_memory():
        parts.append("glibc keeps freed memory")
    added = [name for name in _THREADS if name not in os.environ]
    for name in added:
        os.environ[name] = _THREADS[name]
    if added and "torch" not in sys.modules:
        parts.append("OpenMP threads sleep at barriers")
    if not parts:
        return None
    line = (
        f"runtime: {', '.join(parts)} (CPU settings; CONCEPTMOE_VL_RUNTIME=off leaves them alone)"
    )
    if not quiet and os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
    return line


def command_line() -> int:
    """The console script `conceptmoe-vl`: the settings first, then what may import torch."""
    setup(quiet=True)
    from conceptmoe_vl.cli import main

    return main()

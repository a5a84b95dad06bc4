"""FLOP/s that a process's device could do: what the utilisation is a share of."""

from __future__ import annotations

import dataclasses
import functools
import time

import torch

# Dense products by the vendors' data sheets, TFLOP/s: bfloat16, float32 without TensorFloat-32.
# The first name that the device's contains counts.
_GPUS = {
    "GB200": (2450.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "GH200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H800": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "A40": (150.0, 37.4),
    "A30": (165.0, 10.3),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX 6000 Ada": (364.0, 91.1),
    "RTX 4090": (165.0, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.0, 163.4),
    "MI250X": (383.0, 47.9),
}
_SIZE = 768  # rows and columns of the matrices that are multiplied
_SECONDS, _LEAST = 0.1, 4


@dataclasses.dataclass(frozen=True)
class Peak:
    """FLOP/s of one process's device, and how it is known."""

    flops: float
    how: str

    def __str__(self) -> str:
        return f"peak of one device: {self.flops / 1e12:.3g} TFLOP/s, {self.how}"


def find_peak(device: torch.device, precision: str, given: float | None) -> Peak:
    """The peak of a device at bfloat16 or float32.

    Args:
        given: `training.peak_flops`, which goes first.
    """
    if given is not None:
        return Peak(given, "training.peak_flops")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (low, full) in _GPUS.items():
            if known in name:
                peak = (low if precision == "bfloat16" else full) * 1e12
                return Peak(peak, f"the data sheet of {known}")
    measured = _measure(str(device), precision, torch.get_num_threads())
    return Peak(measured, f"measured by products of {_SIZE} x {_SIZE} matrices")


@functools.cache
def _measure(device: str, precision: str, threads: int) -> float:
    """Best rate of a few products, in a tenth of a second.

    On a CPU by the time that its threads worked, so that other processes on its cores do not count.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)  # draws no random number
    is_cpu = device == "cpu"
    clock = time.process_time if is_cpu else time.perf_counter
    best, end, runs = float("inf"), time.perf_counter() + _SECONDS, 0
    while runs < _LEAST or time.perf_counter() < end:
        started = clock()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, (clock() - started) / (threads if is_cpu else 1))
        runs += 1
    return 2 * _SIZE**3 / best

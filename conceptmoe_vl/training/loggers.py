"""Other places for a run's metrics: TensorBoard, Weights & Biases, trackio.

metrics.jsonl is always written, by the trainer itself. What is here runs in threads of rank 0
behind bounded queues: a logger that fails, blocks or is slow costs the run nothing but its own
lines, and is warned of once.
"""

from __future__ import annotations

import atexit
import importlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from conceptmoe_vl.errors import UserError

LOGGERS = ("tensorboard", "wandb", "trackio")
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
_QUEUE_LINES = 1000
_CLOSING_SECONDS = 30.0


class Backend(Protocol):
    """One place; both methods are called in the thread of its logger alone."""

    def log(self, step: int, values: dict[str, float], warnings: list[str]) -> None: ...

    def close(self) -> None: ...


def flat_numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested mappings by slash-separated names; what is no number is left out."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def require_loggers(names: list[str]) -> None:
    """Raises `UserError` with the extra to install when a logger's package is missing."""
    for name in names:
        try:
            importlib.import_module(_MODULES[name])
        except ImportError as error:
            raise UserError(
                f"training.loggers names {name}, which cannot be imported ({error}); "
                f"pip install conceptmoe-vl[{name}], or leave it out"
            ) from error


class _TensorBoard:
    def __init__(self, run_dir: Path, first_step: int, options: dict) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Of a run that was resumed, what came after its checkpoint is hidden.
        common = {"log_dir": str(run_dir / "tensorboard"), "purge_step": first_step}
        self._writer = SummaryWriter(**{**common, **options})

    def log(self, step: int, values: dict[str, float], warnings: list[str]) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        for text in warnings:
            self._writer.add_text("warnings", text, step)

    def close(self) -> None:
        self._writer.close()


class _Client:
    """Weights & Biases, or trackio, whose calls are nearly the same."""

    def __init__(self, module: Any, options: dict) -> None:
        self._module = module
        module.init(**options)
        # W&B takes no lower step than before, as a roll-back has: there it is a value of its own.
        self._has_axis = hasattr(module, "define_metric")
        if self._has_axis:
            module.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float], warnings: list[str]) -> None:
        told: dict[str, Any] = {"warning": "; ".join(warnings)} if warnings else {}
        if self._has_axis:
            self._module.log({**values, **told})
        else:
            values = {name: value for name, value in values.items() if name != "step"}
            self._module.log({**values, **told}, step=step)

    def close(self) -> None:
        self._module.finish()


def _open(name: str, run_dir: Path, first_step: int, options: dict) -> Backend:
    if name == "tensorboard":
        return _TensorBoard(run_dir, first_step, options)
    common: dict[str, Any] = {"project": "conceptmoe-vl", "name": run_dir.name}
    module = importlib.import_module(_MODULES[name])
    if name == "trackio":
        return _Client(module, {**common, "resume": "allow", **options})
    common |= {"dir": str(run_dir), "settings": {"console": "off", "silent": True}}
    if "WANDB_MODE" not in os.environ:
        common["mode"] = "offline"  # without an account it would ask for one on the terminal
    return _Client(module, {**common, **options})


class Logger:
    """One backend in a thread of its own.

    Args:
        name: for messages. make: opens the backend, in the thread.
        warn: takes the one line about a failure; may be called in the thread.
        capacity: lines that may wait.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Backend],
        warn: Callable[[str], None],
        capacity: int = _QUEUE_LINES,
    ) -> None:
        self._name, self._make, self._warn = name, make, warn
        self._lines: queue.Queue = queue.Queue(capacity)
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Never waits and never raises."""
        if self._failed.is_set():
            return
        try:
            self._lines.put_nowait((step, values))
        except queue.Full:
            self._fail(f"it is {self._lines.maxsize} lines behind")

    def close(self, seconds: float = _CLOSING_SECONDS) -> None:
        """Writes what waits, for some seconds at most."""
        if not self._failed.is_set():
            try:
                self._lines.put(None, timeout=seconds)
            except queue.Full:
                self._fail("it is stuck")
                return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"it did not end within {seconds:g} s")

    def _fail(self, what: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._warn(
                f"warning: {self._name} logs no further: {what}; metrics.jsonl has every line"
            )

    def _run(self) -> None:
        try:
            backend = self._make()
            while (line := self._lines.get()) is not None and not self._failed.is_set():
                step, values = line
                backend.log(step, dict(flat_numbers(values)), values.get("warnings", []))
            backend.close()
        except Exception as error:  # of another's package: it may raise anything, the run goes on
            self._fail(" ".join(f"{type(error).__name__}: {error}".split()))


class Loggers:
    """All loggers of a run; nothing on ranks other than 0.

    Args:
        names: of `LOGGERS`. options: keyword arguments of each, by name.
        run_dir: folder of the run. warn: prints a line.
    """

    def __init__(
        self,
        names: list[str],
        options: dict[str, dict],
        run_dir: Path,
        warn: Callable[[str], None],
    ) -> None:
        self._names, self._options, self._run_dir, self._warn = names, options, run_dir, warn
        self._open: list[Logger] | None = None

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hands numbers and warnings of a step to all; opens them at the first one."""
        if self._open is None:
            self._open = [
                Logger(name, self._opener(name, step), self._warn) for name in self._names
            ]
            atexit.register(self.close)  # whoever drives a trainer step by step need not close
        for logger in self._open:
            logger.log(step, values)

    def close(self) -> None:
        for logger in self._open or []:
            logger.close()
        self._open = None
        atexit.unregister(self.close)

    def _opener(self, name: str, step: int) -> Callable[[], Backend]:
        return lambda: _open(name, self._run_dir, step, self._options.get(name, {}))

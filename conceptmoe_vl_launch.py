"""torchrun with quiet endings: the same arguments, and the status of the first process that failed.

    python -m conceptmoe_vl_launch --nproc_per_node 2 train.py --config configs/easy_vqa.yaml

Of itself torchrun ends with 1 and a traceback of its own, whatever its processes' statuses, so that
a scheduler cannot tell a preempted run that has saved itself from one that failed;
it kills processes 30 seconds after Ctrl-C or SIGTERM, less than the checkpoint of a large model
takes; and where the network between machines goes away it waits for the kernel's own time limit
(a quarter of an hour) after its processes have ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

_SHUTDOWN_SECONDS = "600"
_STUCK_SECONDS = 30.0  # torchrun asks for its processes' statuses ten times a second


def status_of(code: int) -> int:
    """A process's exit status from its return code, which is -N for one killed by signal N."""
    return 128 - code if code < 0 else code


def _children() -> dict[int, str]:
    """States of this process's children by their numbers, from Linux's /proc; Z: ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(after_name[1]) == os.getpid():
            found[int(path.parent.name)] = after_name[0]
    return found


def end_when_stuck(seconds: float = _STUCK_SECONDS) -> None:
    """Ends this process when all its children have ended and nobody has asked for so long.

    The launcher then waits for another machine that it cannot reach. Does not return.
    """
    since = time.monotonic()
    while True:
        time.sleep(seconds / 10)
        children = _children()
        if not children or set(children.values()) != {"Z"}:
            since = time.monotonic()
        elif time.monotonic() - since > seconds:
            ended = os.waitid(os.P_PID, min(children), os.WEXITED | os.WNOWAIT)
            assert ended is not None  # without WNOHANG
            was_killed = ended.si_code != os.CLD_EXITED
            os._exit(status_of(-ended.si_status if was_killed else ended.si_status) or 1)


def main(arguments: list[str] | None = None) -> int:
    """Starts the processes; returns 0, or the status of the first that failed.

    After a signal to the launcher itself, which it has handed on: 128 and the signal's number.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    # Of the processes: C++ stacks of connections that others have closed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # It logs, as an error with the path of python, that a process has ended with a status.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    parsed = run.parse_args(arguments)
    if sys.platform.startswith("linux"):
        threading.Thread(target=end_when_stuck, daemon=True).start()
    try:
        run.run(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was killed by {name}", file=sys.stderr)
        return status_of(failure.exitcode)
    except SignalException as error:
        return status_of(-int(error.sigval))
    except RendezvousError as error:
        where = parsed.rdzv_endpoint or "the first machine"
        text = str(error).split(". ")[0]
        print(f"error: no meeting with the other machines at {where}: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

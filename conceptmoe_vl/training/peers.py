"""What happened to the other ranks when a run fails: one line, on every machine, in seconds.

A rank that raises writes its error to the store in which the ranks met. A thread of every rank
looks there every other second, and answers: so it is known who raised what and who answers no
longer, although main threads wait in a collective. A rank that waits for one that has failed is
ended by its thread, long before the collective's own timeout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from conceptmoe_vl.errors import UserError

INTERVAL = 2.0  # seconds between two looks
_ANSWER = 5 * INTERVAL  # seconds that a rank may take to answer
_ENDING = 10.0  # seconds that a main thread may take to end after a failure
_KEY = "answers"
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "no route to host")
_RESUME = "the same command resumes from the newest checkpoint"
LOST_STATUS = 1


@dataclasses.dataclass(frozen=True)
class Answer:
    """A rank that still runs. `error`: what it raised of its own; None: it waits for others."""

    rank: int
    error: str | None = None


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that other ranks went away or did not come to a collective."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _LOST)


def one_line(error: BaseException) -> str:
    """The message of an error, without further lines and what gloo guesses about it; its kind
    before it unless a user can mend it.
    """
    text = (str(error).strip() or "no message").splitlines()[0]
    text = re.sub(r"^\[\S+:\d+\]\s*", "", text).split(". This is typically")[0].rstrip(".")
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def name_ranks(ranks: list[int], places: list[str]) -> str:
    """`rank 1 (host a)`, `ranks 2, 3 (host b) and 4 (host c)`."""
    by_place: dict[str, list[int]] = {}
    for rank in ranks:
        by_place.setdefault(places[rank], []).append(rank)
    groups = [f"{', '.join(map(str, each))} ({place})" for place, each in by_place.items()]
    joined = groups[0] if len(groups) == 1 else f"{', '.join(groups[:-1])} and {groups[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {joined}"


def _are_gone(ranks: list[int], places: list[str]) -> str:
    verb, their = ("is", "its") if len(ranks) == 1 else ("are", "their")
    return (
        f"{name_ranks(ranks, places)} {verb} gone: killed, or {their} machine or the network "
        "to it is down"
    )


def verdict(
    rank: int, places: list[str], answers: list[Answer], ending: str, timeout: float
) -> str:
    """One line about a failed run, as one of its ranks sees it.

    Args:
        rank: of this process. places: of every rank, in rank order.
        answers: of the ranks that still run. ending: what this rank's collective ended with, or
            empty. timeout: of collectives, in seconds.
    """
    raised = [answer for answer in answers if answer.error is not None]
    if raised:
        same = sorted({answer.rank for answer in raised if answer.error == raised[0].error})
        return f"{name_ranks(same, places)} failed: {raised[0].error}"
    missing = sorted(set(range(len(places))) - {answer.rank for answer in answers} - {rank})
    if missing:
        return f"{_are_gone(missing, places)}{ending}; {_RESUME}"
    return (
        f"a collective did not end within {timeout:g} s (training.timeout_minutes), although every "
        f"rank answers{ending}: one is slower than that, or they took different ways"
    )


class Peers:
    """Watches over the other ranks of a run from a thread of its own.

    Args:
        store: that all ranks share; used by that thread alone. host: address of the machine that
            keeps it; None: rank 0 keeps it itself.
        rank: of this process. places: of every rank, in rank order: what messages call its machine.
        timeout: of collectives, in seconds.
    """

    def __init__(
        self, store: Any, host: str | None, rank: int, places: list[str], timeout: float
    ) -> None:
        self._store, self._host = store, host
        self._rank, self._places, self._timeout = rank, places, timeout
        self._wake, self._known = threading.Event(), threading.Event()
        self._is_over = self._is_store_lost = False
        self._own: BaseException | None = None
        self._answers: list[Answer] = []
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> str | None:
        """Tells the others what this rank ended with, and hears what became of them.

        From then on the process ends within seconds, whatever it waits for.

        Returns:
            The line to print. None: another rank of this machine prints it.
        """
        self._own = error
        self._wake.set()
        if not self._known.wait(2 * _ANSWER):
            self._is_store_lost = True  # its socket does not even fail
        _end_soon()
        line = self._line()
        if self._rank == 0:
            time.sleep(INTERVAL / 4)  # it may keep the store, where others still read
        return line

    def stop(self) -> None:
        """Ends the watch: this rank has done its part."""
        if self._own is None:
            self._is_over = True
            self._wake.set()
            self._thread.join(INTERVAL)

    def _line(self) -> str | None:
        raised = self._raised()
        if raised is not None:
            same = [answer.rank for answer in self._answers if answer.error == raised]
            return raised if self._is_first(same) else None
        if not self._is_first([each.rank for each in self._answers if each.error is None]):
            return None
        ending = "" if self._own is None else f" ({one_line(self._own)})"
        if self._is_store_lost and all(answer.error is None for answer in self._answers):
            return f"{self._without_store()}{ending}; {_RESUME}"
        return verdict(self._rank, self._places, self._answers, ending, self._timeout)

    def _without_store(self) -> str:
        """Who must be gone when the store is."""
        if self._host is None:
            return _are_gone([0], self._places)
        here = self._places[self._rank]
        there = [
            rank for rank, place in enumerate(self._places) if self._host in place and place != here
        ]
        if there:
            return _are_gone(there, self._places)
        return f"the launcher on {self._host}, where the ranks meet, answers no longer"

    def _raised(self) -> str | None:
        """This rank's own error: not that of a collective, which others' failure ended."""
        own = self._own
        return None if own is None or is_lost_connection(own) else one_line(own)

    def _is_first(self, ranks: list[int]) -> bool:
        """Whether this is the lowest of `ranks` on its machine."""
        here = self._places[self._rank]
        return all(rank >= self._rank for rank in ranks if self._places[rank] == here)

    def _watch(self) -> None:
        try:
            while not self._store.check([_KEY]) and self._own is None:
                self._wake.wait(INTERVAL)
                if self._is_over:
                    return
            self._ask()
        except (RuntimeError, OSError):  # who keeps the store has ended, or the network
            self._is_store_lost = True
        if self._is_over:
            return
        self._known.set()
        time.sleep(_ENDING)
        if self._own is None and not self._is_over:
            # The main thread waits in a collective for ranks that will not come.
            line = self._line()
            if line is not None:
                print(f"error: {line}", file=sys.stderr, flush=True)
            os._exit(LOST_STATUS)

    def _ask(self) -> None:
        """Answers, and collects the others' answers for some seconds."""
        has_said = self._say()
        deadline = time.monotonic() + _ANSWER
        while True:
            answers: dict[int, Answer] = {}
            for line in self._store.get(_KEY).decode().splitlines():
                answer = Answer(**json.loads(line))
                if answer.error is not None or answer.rank not in answers:
                    answers[answer.rank] = answer
            self._answers = list(answers.values())
            if len(answers) == len(self._places) or time.monotonic() > deadline:
                return
            time.sleep(INTERVAL / 20)
            has_said = has_said or (self._raised() is not None and self._say())

    def _say(self) -> bool:
        """Writes this rank's answer; returns whether it held an error."""
        raised = self._raised()
        line = json.dumps(dataclasses.asdict(Answer(self._rank, raised)))
        self._store.append(_KEY, line + "\n")
        return raised is not None


def _end_soon() -> None:
    """Ends the process if leaving it takes too long: its sockets may wait for what is gone."""
    timer = threading.Timer(_ENDING, os._exit, [LOST_STATUS])
    timer.daemon = True
    timer.start()

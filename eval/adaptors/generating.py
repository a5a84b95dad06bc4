"""What all adaptors share: arguments of a command line, and answers under a task's settings."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from conceptmoe_vl.asking import Answer, check_reachable, load_pretrained
from conceptmoe_vl.continuous_batching import LogLikelihood, generate_all, log_likelihoods
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prefixes import PrefixCache
from conceptmoe_vl.requests import Prompt

NAME = "conceptmoe_vl"
DEFAULT_BATCH = 16
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def refuse_unknown(unknown: dict[str, Any], known: str) -> None:
    """Raises `UserError` where `--model_args` names what the model does not take."""
    if unknown:
        raise UserError(f"--model_args: {NAME} takes no {sorted(unknown)[0]!r}; it takes {known}")


def pretrained_of(given: str | None) -> str:
    """Raises `UserError` where `--model_args` names no model."""
    if not given:
        raise UserError(f"--model_args names no model for {NAME}; give pretrained=RUN/model")
    return str(given)


def number_of(given: Any, name: str, kind: type[int] | type[float]) -> Any:
    """An argument of `--model_args` as a number, None where it is not given.

    Raises:
        UserError: it is none above 0.
    """
    if given is None:
        return None
    try:
        value = kind(given)
    except (TypeError, ValueError, OverflowError):
        value = kind(0)
    if isinstance(given, bool) or not value > 0:
        raise UserError(f"--model_args: {name} is {given!r}; give a number above 0")
    return value


def device_of(device: str | None) -> str | None:
    """The harnesses say `cuda` or nothing: each process then takes a device of its own."""
    if device in (None, "cuda") and torch.cuda.device_count() > 1:
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    return device


def batch_of(given: int | str | None) -> int:
    """The batch size of a command line, where "auto" means the default one."""
    if given is None or str(given).startswith("auto"):
        return DEFAULT_BATCH
    try:
        size = int(given)
    except ValueError:
        size = 0
    if size < 1:
        raise UserError(f"--batch_size is {given!r}; give a number of 1 or more, or auto")
    return size


def prefix_cache_of(given: Any) -> PrefixCache:
    """What requests share, in an argument's MiB; None: the default size, 0: nothing.

    Raises:
        UserError: it is no such number.
    """
    if given is None:
        return PrefixCache()
    return PrefixCache(0 if str(given) == "0" else number_of(given, "prefix_cache", int) << 20)


def generation_settings(given: dict[str, Any], longest: int) -> tuple[int, tuple[str, ...]]:
    """Most new tokens and the stop strings of a task's generation settings.

    Raises:
        UserError: they ask for sampling or beams.
    """
    sampled = given.get("do_sample") or (given.get("temperature") or 0) > 0
    if given.get("do_sample") is False:
        sampled = False
    if sampled or (given.get("num_beams") or 1) > 1:
        raise UserError(
            f"the task generates with {given}; {NAME} generates greedily: add "
            "--gen_kwargs do_sample=False,temperature=0,num_beams=1"
        )
    until = given.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    length = next((given[name] for name in _LENGTH_NAMES if given.get(name) is not None), longest)
    return int(length), tuple(text for text in stop if text)


class HarnessModel:
    """The model behind a harness's own class, with the arguments of its command line.

    Fields:
        model, processor: loaded. batch_size: rows at a time. compression: None: as trained.
        prefixes: what prompts share with each other and with earlier ones.
    """

    model: Any
    processor: Any
    batch_size: int
    compression: float | None
    prefixes: PrefixCache

    def open(
        self,
        pretrained: str | None,
        device: str | None,
        batch_size: int | str | None,
        compression: Any,
        prefix_cache: Any,
        unknown: dict[str, Any],
        own: Sequence[str],
    ) -> None:
        """Loads the model.

        Args:
            unknown: arguments that are none. own: names of those that the harness's class adds.

        Raises:
            UserError: no such model, or an argument is unknown or of no use.
        """
        names = ["pretrained", "compression", "prefix_cache", *own]
        refuse_unknown(unknown, f"{', '.join(names[:-1])} and {names[-1]}")
        self.prefixes = prefix_cache_of(prefix_cache)
        self.model, self.processor = load_pretrained(pretrained_of(pretrained), device_of(device))
        self.batch_size = batch_of(batch_size)
        self.compression = number_of(compression, "compression", float)
        check_reachable(self.model, self.compression)

    def likelihoods(self, pairs: Sequence[tuple[Prompt, str]]) -> list[LogLikelihood]:
        """Of each continuation behind its prompt."""
        return log_likelihoods(
            self.model, self.processor, pairs, self.batch_size, self.compression, self.prefixes
        )

    def answers(
        self,
        prompts: Sequence[Prompt],
        given: Sequence[dict[str, Any]],
        longest: int,
        on_answer: Callable[[int, Answer], None] = lambda number, answer: None,
    ) -> list[Answer]:
        """Answers to prompts, those of equal settings in one go, in the order of the prompts.

        Args:
            given: of each prompt, its task's generation settings. longest: tokens of an answer
                where they say nothing.
            on_answer: called with each number and answer as it is there.

        Raises:
            UserError: settings ask for sampling or beams.
        """
        settings = [generation_settings(values, longest) for values in given]
        answers: dict[int, Answer] = {}
        for max_new_tokens, stop in dict.fromkeys(settings):
            numbers = [n for n, own in enumerate(settings) if own == (max_new_tokens, stop)]

            def keep(
                index: int, answer: Answer, numbers: list[int] = numbers, new: int = max_new_tokens
            ) -> None:
                answers[numbers[index]] = answer
                self._warn_of_length(answer.prompt_tokens, new)
                on_answer(numbers[index], answer)

            generate_all(
                self.model,
                self.processor,
                (prompts[number] for number in numbers),
                max_new_tokens,
                self.batch_size,
                stop,
                self.compression,
                keep,
                prefixes=self.prefixes,
            )
        return [answers[number] for number in range(len(prompts))]

    def _warn_of_length(self, prompt: int, new: int) -> None:
        longest = self.model.config.text.max_position_embeddings
        if prompt + new > longest:
            warnings.warn(
                f"a prompt of {prompt} tokens and {new} new ones are more than the {longest} of "
                "text.max_position_embeddings; nothing was cut",
                stacklevel=2,
            )

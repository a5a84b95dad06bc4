"""From states to log-likelihoods: the head, some states at a time, and sums over the tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.asking import check_finite

# Logits of one product: 16 MB in float32.
_LOGIT_ENTRIES = 1 << 22


@dataclasses.dataclass(frozen=True)
class LogLikelihood:
    """How likely a continuation is behind its prompt.

    Fields:
        sum: natural logarithm of its probability.
        tokens: how many tokens it has.
        is_greedy: whether each of them is the likeliest: generation would write it.
    """

    sum: float
    tokens: int
    is_greedy: bool


class TokenScores:
    """Sums the log-likelihoods of tokens by request."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[int, list[tuple[float, bool]]] = {}

    def add(
        self,
        states_TD: Tensor,
        where: Sequence[int],
        targets: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """Scores tokens.

        Args:
            where: index of the state that predicts each. targets: their ids. numbers: their
                requests.
        """
        head, image = self._model.lm_head, self._model.config.image_token_id
        step = max(_LOGIT_ENTRIES // head.weight.shape[0], 1)
        for start in range(0, len(where), step):
            part = slice(start, start + step)
            index = torch.tensor(where[part], device=states_TD.device)
            target = torch.tensor(targets[part], device=states_TD.device)
            logits = head(states_TD.index_select(0, index)).float()
            likelihoods = logits.log_softmax(-1)
            chosen = likelihoods.gather(1, target[:, None]).squeeze(1)
            check_finite(bool(chosen.isfinite().all()))
            if image is not None:  # which generation never writes
                logits[:, image] = float("-inf")
            greedy = _are_greedy(logits, target)
            for number, *found in zip(numbers[part], chosen.tolist(), greedy, strict=True):
                self._found.setdefault(number, []).append((found[0], found[1]))

    def results(self) -> dict[int, LogLikelihood]:
        return {
            number: LogLikelihood(
                math.fsum(value for value, _ in found),
                len(found),
                all(greedy for _, greedy in found),
            )
            for number, found in self._found.items()
        }


def _are_greedy(logits_SV: Tensor, target_S: Tensor) -> list[bool]:
    """Whether each target is what `argmax` gives, of equal ones the first. On a CPU `amax` takes
    a twentieth of its time, so places are looked for only where the target is as likely as any.
    """
    largest_S = logits_SV.amax(-1)
    likeliest_S = logits_SV.gather(1, target_S[:, None]).squeeze(1) == largest_S
    rows = likeliest_S.nonzero().squeeze(1)
    first = logits_SV.index_select(0, rows).argmax(-1) == target_S.index_select(0, rows)
    return likeliest_S.index_put((rows,), first).tolist()

"""ConceptMoE-VL as a model of lmms-eval, found by the entry-point group `lmms_eval.models`.

Two classes: lmms-eval gives the chat one the messages of a task (generation alone), the simple one
(`--force_simple`) contexts and pictures, with log-likelihoods too.
"""

from __future__ import annotations

from typing import Any

from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.adaptors.generating import NAME, HarnessModel, number_of

# What tasks write for a picture; a context without one has its pictures in front of it.
_PICTURE = "<image>"


class _ConceptMoEVL(HarnessModel, lmms):
    """`--model conceptmoe_vl --model_args pretrained=DIR[,compression=R]`.

    Args:
        pretrained: model folder. device: a torch device.
        batch_size: rows at a time, "auto" is 16; it changes no answer.
        compression: wanted tokens per concept; None: what the model was trained for.
        max_new_tokens: longest answer where the task sets none.
        prefix_cache: MiB for what requests share; None: 1024, 0: every prompt in one pass.

    Raises:
        UserError: no such model, or an argument is unknown.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        compression: float | None = None,
        max_new_tokens: int = 256,
        prefix_cache: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.open(
            pretrained, device, batch_size, compression, prefix_cache, unknown, ("max_new_tokens",)
        )
        self.device = self.model.device
        self.max_new_tokens = number_of(max_new_tokens, "max_new_tokens", int)

    def loglikelihood(self, requests: Any) -> list[Any]:
        raise NotImplementedError(f"{NAME} has log-likelihoods with --force_simple")

    def generate_until_multi_round(self, requests: Any) -> list[str]:
        raise NotImplementedError(
            f"{NAME} answers tasks of several rounds only as one conversation"
        )

    def _document(self, task: str, split: str, number: int) -> Any:
        return self.task_dict[task][split][number]

    def _answers(self, prompts: list[list[dict]], settings: list[dict]) -> list[Any]:
        answers = self.answers(prompts, settings, self.max_new_tokens)
        return [
            GenerationResult(answer.text, TokenCounts(answer.prompt_tokens, answer.answer_tokens))
            for answer in answers
        ]


class ConceptMoEVLChat(_ConceptMoEVL):
    """Tasks as messages."""

    is_simple = False

    def generate_until(self, requests: Any) -> list[Any]:
        prompts, settings = [], []
        for request in requests:
            _, to_messages, given, number, task, split = request.args
            prompts.append(messages_of(to_messages(self._document(task, split, number))))
            settings.append(given)
        return self._answers(prompts, settings)


class ConceptMoEVLSimple(_ConceptMoEVL):
    """Tasks as a context and pictures."""

    is_simple = True

    def generate_until(self, requests: Any) -> list[Any]:
        prompts, settings = [], []
        for request in requests:
            context, given, to_visual, number, task, split = request.args
            visuals = to_visual(self._document(task, split, number)) if to_visual else []
            prompts.append(simple_messages(context, visuals))
            settings.append(given)
        return self._answers(prompts, settings)

    def loglikelihood(self, requests: Any) -> list[Any]:
        """(loss, whether it is greedy) of each continuation, as lmms-eval 0.7 wants them.

        It takes the choice of the least value for the answer, since its models give losses; and it
        makes strings of pairs that do not come as a `GenerationResult`.
        """
        pairs: list[tuple[list[dict], str]] = []
        shown: dict[tuple, list[dict]] = {}
        for request in requests:
            context, target, to_visual, number, task, split = request.args
            key = (task, split, number, context)
            if key not in shown:  # the choices of a question follow each other
                document = self._document(task, split, number)
                visuals = to_visual(document) if to_visual else []
                shown = {key: simple_messages(context, visuals)}
            if callable(target):
                target = target(self._document(task, split, number))
            pairs.append((shown[key], str(target)))
        scores = self.likelihoods(pairs)
        return [
            GenerationResult((-score.sum, score.is_greedy), TokenCounts(output_tokens=score.tokens))
            for score in scores
        ]


def simple_messages(context: str, visuals: Any) -> list[dict]:
    """One user turn: pictures where the context marks them, or all in front of it."""
    images = list(visuals or ())
    pieces = context.split(_PICTURE)
    if not images or len(pieces) != len(images) + 1:
        return question_messages(images, context)
    content = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
    for image, text in zip(images, pieces[1:], strict=True):
        content.append({"type": "image", "image": image})
        if text:
            content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]


def messages_of(given: list[dict]) -> list[dict]:
    """lmms-eval's messages in the processor's form.

    Raises:
        UserError: they hold video or sound.
    """
    return [
        {"role": message["role"], "content": [_part(part) for part in message["content"]]}
        if not isinstance(message["content"], str)
        else message
        for message in given
    ]


def _part(part: dict) -> dict:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image":
        return {"type": "image", "image": part["url"]}
    raise UserError(f"the task shows {part['type']}; {NAME} reads text and images alone")

"""ConceptMoE-VL as a model of lm-eval (EleutherAI's lm-evaluation-harness).

lm-eval has no way to find models of other packages, so its command line is started through
`python -m eval.adaptors lm_eval …`, which takes what `lm_eval` takes; in Python importing this
module registers the model as `conceptmoe_vl`.
"""

from __future__ import annotations

import os
from typing import Any

import lm_eval.models  # noqa: F401  (its own models: it adds them only while there are none)
import torch
import torch.distributed as dist
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from conceptmoe_vl.asking import Answer
from conceptmoe_vl.continuous_batching import Rendered
from conceptmoe_vl.likelihoods import Continuations, score_continuations, start_token
from conceptmoe_vl.processing import EncodedSample
from conceptmoe_vl.tokenizing import IMAGE, IMAGE_END, IMAGE_START
from eval.adaptors.generating import NAME, HarnessModel, number_of

# What tasks of lm-eval write for a picture.
_PICTURE = "<image>"


@register_model(NAME)
class ConceptMoEVLForLMEval(HarnessModel, LM):
    """`--model conceptmoe_vl --model_args pretrained=DIR[,compression=R][,max_length=N]`.

    Text and pictures; loglikelihood, loglikelihood_rolling and generate_until (greedy only).

    Args:
        pretrained: model folder. device: a torch device.
        batch_size: rows at a time, "auto" is 16; it changes no result.
        compression: wanted tokens per concept; None: what the model was trained for.
        max_length: tokens of a window of loglikelihood_rolling; None: the model's longest.
        max_gen_toks: longest answer where the task sets none.
        prefix_cache: MiB for what requests share; None: 1024, 0: every prompt in one pass.

    Raises:
        UserError: no such model, or an argument is unknown.
    """

    MULTIMODAL = True

    def __init__(
        self,
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        compression: float | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_cache: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self._rank, self._world_size = _join_processes()
        own = ("max_length", "max_gen_toks")
        self.open(pretrained, device, batch_size, compression, prefix_cache, unknown, own)
        self._device = self.model.device
        longest = self.model.config.text.max_position_embeddings
        self.max_length = number_of(max_length, "max_length", int) or longest
        self.max_gen_toks = number_of(max_gen_toks, "max_gen_toks", int)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [(prompt_of(*request.args[::2]), request.args[1]) for request in requests]
        scores = self.likelihoods(pairs)
        results = [(score.sum, score.is_greedy) for score in scores]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in lm-eval's own windows of `max_length`."""
        owners: list[int] = []
        windows: list[Continuations] = []
        prefix = start_token(self.processor)
        for number, request in enumerate(requests):
            ids = self.processor.encode_text(request.args[0]).input_ids
            for window in get_rolling_token_windows(ids, prefix, self.max_length, 1):
                context, continuation = make_disjoint_window(window)
                prompt = EncodedSample(list(context), [])
                windows.append(Continuations(prompt, [tuple(continuation)], [len(windows)]))
                owners.append(number)
        scores = score_continuations(
            self.model, iter(windows), len(windows), self.batch_size, self.compression
        )
        results = [0.0] * len(requests)
        for owner, score in zip(owners, scores, strict=True):
            results[owner] += score.sum
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        def keep(number: int, answer: Answer) -> None:
            self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)

        prompts = [prompt_of(*request.args[::2]) for request in requests]
        settings = [request.args[1] for request in requests]
        answers = self.answers(prompts, settings, self.max_gen_toks, keep)
        return [answer.text for answer in answers]

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt as text; without a generation prompt it ends inside the last answer."""
        begun = ""
        if not add_generation_prompt and chat_history[-1]["role"] == "assistant":
            begun, chat_history = chat_history[-1]["content"], chat_history[:-1]
            add_generation_prompt = True
        rendered = self.processor.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        return rendered + begun

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.processor.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return str(self.processor.tokenizer.name_or_path).replace("/", "__")

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, tensor.cpu())
        return torch.stack(gathered)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        if self.world_size == 1:
            return [obj]
        gathered: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, gathered, dst=dst)
        return gathered

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def _join_processes() -> tuple[int, int]:
    """Rank and number of processes under torchrun; 0 and 1 alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def prompt_of(context: str, shown: dict[str, Any] | None = None) -> Rendered:
    """A context of lm-eval, whose pictures stand as `<image>`, or without marks before the text."""
    images = tuple((shown or {}).get("visual") or ())
    if not images:
        return Rendered(context)
    mark = IMAGE_START + IMAGE + IMAGE_END
    if _PICTURE not in context:
        return Rendered(mark * len(images) + context, images)
    return Rendered(context.replace(_PICTURE, mark), images)

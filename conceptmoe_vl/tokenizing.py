"""Special tokens of the prompts, and a tokenizer trained on the user's own texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_START, IMAGE, IMAGE_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END, IMAGE_START, IMAGE, IMAGE_END)

_SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text can be written, and decoding gives it back exactly.

    The special tokens have the ids 0 to 5, pad first; digits are tokens of their own.

    Args:
        texts: training texts; the same texts in the same order give the same tokenizer.
        vocab_size: entries, special tokens included; fewer when the texts hold fewer pairs.

    Raises:
        ValueError: `vocab_size` is too small for the 256 bytes.
    """
    from transformers import PreTrainedTokenizerFast  # with torch: readers of shards need neither

    if vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(
            f"tokenizer vocab_size is {vocab_size}; 256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens need {_SMALLEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        extra_special_tokens=[TURN_START, IMAGE_START, IMAGE, IMAGE_END],
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of all special tokens: of those with a part of their own, and of those added as such."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}


def add_special_tokens(tokenizer: Any) -> int:
    """Gives a foreign tokenizer the special tokens that it lacks, and a pad token.

    Returns:
        How many tokens were added; the model's embedding needs rows for them.
    """
    known = tokenizer.get_vocab()
    missing = [token for token in SPECIAL_TOKENS if token not in known]
    if tokenizer.pad_token is not None and PAD in missing:
        missing.remove(PAD)
    added = tokenizer.add_tokens(missing, special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = PAD
    if tokenizer.eos_token is None:
        tokenizer.eos_token = TURN_END
    return added

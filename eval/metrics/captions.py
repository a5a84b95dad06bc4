"""Captions: BLEU-1 to 4, ROUGE-L and CIDEr by pycocoevalcap, the scorer of COCO captions.

Its tokenizer is a Java program that is started for each corpus; here NLTK's tokenizer for the same
convention (Penn Treebank) takes its place, followed by the same lower case and the same list of
punctuation that goes. Ordinary captions come out equal (a test compares the two where Java is
there); what differs are abbreviations at the end, and fractions such as `3 1/2`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from conceptmoe_vl.errors import UserError

# What pycocoevalcap leaves out behind its tokenizer. The names of brackets are in its list in
# capitals, but come in lower case, so that `-lrb-` stays, in published figures too.
_PUNCTUATION = frozenset(["''", "'", "``", "`", *".?!,:;", "-", "--", "..."])
# NLTK leaves the full stop at a word but for the last one of the text.
_SENTENCE_END = re.compile(r"(?<=[a-z]{3})\.(?=\s+[A-Z])")


def caption_figures(
    captions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Scores of a whole set of captions.

    The weights of CIDEr's n-grams come from the references of the set: the CIDEr of a part is not
    comparable with that of the whole.

    Args:
        captions: one for each picture; empty ones count.
        references: each picture's captions by people, at least one.

    Returns:
        `cider` (0 to 10), `bleu_1` to `bleu_4` and `rouge_l` (0 to 1).

    Raises:
        UserError: the extra `captions` is not installed.
    """
    try:
        from pycocoevalcap.bleu.bleu import Bleu
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.rouge.rouge import Rouge
    except ImportError as error:
        raise UserError(
            f"caption scores need pycocoevalcap and nltk ({error}): "
            "pip install 'conceptmoe-vl[captions]'"
        ) from error
    if not captions:
        raise ValueError("there are no captions; give at least one")
    pairs = list(zip(captions, references, strict=True))
    answers = {number: [tokenized(caption)] for number, (caption, _) in enumerate(pairs)}
    golds = {number: [tokenized(text) for text in texts] for number, (_, texts) in enumerate(pairs)}
    bleu = Bleu(4).compute_score(golds, answers, verbose=0)[0]
    return {
        "cider": float(Cider().compute_score(golds, answers)[0]),
        **{f"bleu_{order}": float(score) for order, score in enumerate(bleu, start=1)},
        "rouge_l": float(Rouge().compute_score(golds, answers)[0]),
    }


@lru_cache(maxsize=1 << 17)  # the bootstrap scores the same captions many times
def tokenized(caption: str) -> str:
    """Words in lower case with blanks between them, without punctuation."""
    try:
        from nltk.tokenize import TreebankWordTokenizer
    except ImportError as error:
        raise UserError(
            f"caption scores need nltk ({error}): pip install 'conceptmoe-vl[captions]'"
        ) from error
    text = _SENTENCE_END.sub(" .", caption.replace("\n", " "))
    words = TreebankWordTokenizer().tokenize(text, convert_parentheses=True)
    return " ".join(word.lower() for word in words if word not in _PUNCTUATION)

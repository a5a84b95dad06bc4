"""Official metrics, as pure functions of answers and references.

- `text`: exact match, ANLS, relaxed accuracy;
- `vqa`: VQA accuracy over ten answers, with the normalisations of VQAv2 and TextVQA;
- `choices`: letters of multiple choice, abstention included;
- `binary`: yes and no, precision and recall (POPE), accuracy+ (MME);
- `boxes`: boxes in texts, intersection over union;
- `open_answers`: MMMU's open questions;
- `captions`: BLEU, ROUGE-L and CIDEr by libraries (extra `captions`);
- `intervals`: Wilson's interval.
"""

from eval.metrics.binary import (
    answer_words,
    binary_parts,
    parse_yes_no,
    parse_yes_no_prefix,
)
from eval.metrics.boxes import intersection_over_union, parse_box
from eval.metrics.choices import LETTERS, parse_choice
from eval.metrics.intervals import wilson_interval
from eval.metrics.open_answers import open_answer_score, parse_open_answer
from eval.metrics.text import anls, exact_match, levenshtein, relaxed_accuracy
from eval.metrics.vqa import (
    normalize_textvqa_answer,
    normalize_vqa_answer,
    textvqa_accuracy,
    vqa_accuracy,
    vqa_accuracy_normalized,
)

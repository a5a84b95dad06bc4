from __future__ import annotations

import math
import shutil
import sys

import pytest

from conceptmoe_vl.errors import UserError
from eval.metrics.captions import caption_figures

_CAPTIONS = [
    "A man riding a wave on top of a surfboard.",
    "Two dogs, one black and one white, play in the snow",
    'A red-and-white bus; the sign reads "STOP"',
    "The man's hat isn't on his head!",
    "A cat (black) sitting on a laptop...",
    "An elephant.  With two spaces. Second sentence here.",
    "People can't see the kids' toys at 5:30 pm",
    "A café in Zürich with a $5 bill and 50% off",
]


def test_missing_libraries_are_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pycocoevalcap")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pycocoevalcap", None)
    with pytest.raises(UserError, match=r"pip install 'conceptmoe-vl\[captions\]'"):
        caption_figures(["a"], [["a"]])


def test_equal_captions_get_the_highest_scores():
    pytest.importorskip("pycocoevalcap")
    captions = ["a red bus on the street", "two small dogs play in snow"]
    figures = caption_figures(captions, [[caption] for caption in captions])
    assert figures.pop("cider") == pytest.approx(10.0)
    assert set(figures) == {"bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l"}
    assert list(figures.values()) == pytest.approx([1.0] * 5)


def test_figures_by_hand():
    pytest.importorskip("pycocoevalcap")
    figures = caption_figures(["The cat sat.", ""], [["the cat sits", "a cat"], ["a dog"]])
    # Unigrams: 2 of 3 stand in the references. Brevity: 3 words against 3 + 2.
    assert figures["bleu_1"] == pytest.approx(2 / 3 * math.exp(1 - 5 / 3))
    # The longest common part has 2 words: precision 2/3; recall 2/3 and 1/2, the best counts.
    assert figures["rouge_l"] == pytest.approx((2 / 3 + 0) / 2)
    assert 0 < figures["cider"] < 10


def test_words_are_those_of_the_official_tokenizer():
    tokenizers = pytest.importorskip("pycocoevalcap.tokenizer.ptbtokenizer")
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    from eval.metrics.captions import tokenized

    official = tokenizers.PTBTokenizer().tokenize(
        {number: [{"caption": caption}] for number, caption in enumerate(_CAPTIONS)}
    )
    assert [tokenized(caption) for caption in _CAPTIONS] == [
        official[number][0] for number in range(len(_CAPTIONS))
    ]

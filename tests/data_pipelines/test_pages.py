"""`inspect --html`: what the page shows, and that no record can write into it."""

from __future__ import annotations

import html.parser
import re

import pytest

from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
from conceptmoe_vl.processing import ConceptMoEVLProcessor, register, train_tokenizer
from data_pipelines.__main__ import main
from data_pipelines.pieces import token_pieces
from data_pipelines.visible import visible
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import encoded_image, failure, noise, record, toy_shards

HOSTILE = (
    "</span></div><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "<!-- ]]> &lt; &amp;",
    "javascript:alert(1) data:text/html,x",
    "a\x1b[31mb\x00c\u202ed\u2066e\x9bf",
)


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text outside of the styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.parts: list[str] = []
        self.feed(text)
        self.text = "".join(self.parts)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] != "style":
            self.parts.append(data)


def page_of(tmp_path, shards, *arguments: str, status: int = 0) -> Page:
    out = tmp_path / "page.html"
    assert main(["inspect", str(shards), "--html", str(out), *arguments]) == status
    return Page(out.read_text(encoding="utf-8"))


def test_no_text_of_a_record_becomes_part_of_the_page(tmp_path):
    samples = []
    for number, text in enumerate(HOSTILE):
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]},
            {"role": "assistant", "content": text},
        ]
        picture = ("png", encoded_image(9))
        samples.append((f"<b>k{number}", {"messages": messages, "source": text}, [picture]))
    samples.append(("bad", {"messages": [{"role": HOSTILE[0], "content": ""}]}, []))
    folder = tmp_path / "data"
    folder.mkdir()
    write_shards(folder, "toy", samples, size=10)
    clean = page_of(tmp_path, toy_shards(tmp_path / "clean", [2]))
    page = page_of(tmp_path, folder, status=1)
    allowed = {tag for tag, _ in clean.tags} | {"p", "a"}
    assert {tag for tag, _ in page.tags} == allowed
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src", "data:image/").startswith("data:image/")
    for text in HOSTILE:
        # Source, three turns, and of the tokens those that no other token's edge cuts.
        assert page.text.count(visible(text)) >= 4
    assert not set("\x1b\x00\u202e\u2066\x9b") & set(page.text)
    assert "49" not in re.findall(r"\b49\b", page.text)
    policy = next(a for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy["content"]
    assert "script-src" not in policy["content"]


def test_pictures_turns_and_tokens_are_shown(tmp_path, processor):
    shards = toy_shards(tmp_path / "data", [3], images=2)
    register()
    processor.save_pretrained(tmp_path / "model")
    page = page_of(tmp_path, shards, "--model", str(tmp_path / "model"), "--limit", "2")
    assert "2 of 3 samples" in page.text
    assert sum(tag == "article" for tag, _ in page.tags) == 2
    assert sum(tag == "img" for tag, _ in page.tags) == 4
    assert "16 × 16 px, 2 × 2 tokens" in page.text
    assert "s1 q1" in page.text
    spans = [attributes for tag, attributes in page.tags if tag == "span" and "title" in attributes]
    kept = [attributes for attributes in spans if "kept" in attributes["class"].split()]
    # Two answers `a0`, `a1` a sample, two tokens each, and their end marks.
    assert len(kept) == 2 * 2 * 3
    assert sum("special" in attributes["class"] for attributes in kept) == 4
    assert sum("image" in attributes["class"] for attributes in spans) == 4


def test_pieces_hold_every_token_once_and_whole_characters():
    tokenizer = train_tokenizer(["plain letters alone"], 270)
    processor = ConceptMoEVLProcessor(
        ConceptMoEVLImageProcessor(image_size=16, patch_size=8), tokenizer
    )
    text = "漢字 é 👩‍👩‍👧 \n\tend"
    sample = processor.encode(
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": noise("PNG")},
                    {"type": "text", "text": text},
                ],
            },
            {"role": "assistant", "content": text},
        ]
    )
    pieces = list(token_pieces(processor, sample.input_ids, sample.labels))
    assert [token for piece in pieces for token in piece.ids] == sample.input_ids
    flags = [piece.supervised for piece in pieces for _ in piece.ids]
    assert flags == [label != -100 for label in sample.labels]
    words = "".join(piece.text for piece in pieces if piece.kind == "text")
    assert words == text * 2
    assert max(len(piece.ids) for piece in pieces if piece.kind == "text") > 1
    assert [len(piece.ids) for piece in pieces if piece.kind == "image"] == [4]
    # Bytes that are no character stay tokens of their own.
    broken = [index for index in sample.input_ids if "\ufffd" in tokenizer.decode([index])][:1] * 3
    assert [piece.ids for piece in token_pieces(processor, broken, broken)] == [(broken[0],)] * 3


def test_damaged_samples_and_shards_are_named_with_their_reason(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    cut = encoded_image(3)[:60]
    samples = [
        ("good", record(0), [("png", encoded_image(1))]),
        ("cut", record(1), [("png", cut)]),
        ("few", record(2, images=2), [("png", encoded_image(1))]),
    ]
    write_shards(folder, "toy", samples, size=10)
    toy_shards(folder, [3])
    broken = folder / "toy0-000000.tar"
    broken.write_bytes(broken.read_bytes()[:3000])
    page = page_of(tmp_path, folder, status=1)
    for words in ("truncated", "image_count", "holds 2 image placeholders", "ends early"):
        assert words in page.text
    assert "2 damaged" in page.text
    anchors = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = {attributes["href"] for _, attributes in page.tags if "href" in attributes}
    assert {link.removeprefix("#") for link in links} <= anchors
    assert links


def test_mistakes_are_one_line_and_leave_nothing(tmp_path, capsys):
    shards = toy_shards(tmp_path / "data", [1])
    assert "--html" in failure(capsys, "inspect", shards, "--model", "nowhere")
    out = tmp_path / "none" / "page.html"
    assert "cannot be written" in failure(capsys, "inspect", shards, "--html", str(out))
    assert "cannot be written" in failure(capsys, "inspect", shards, "--html", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


@pytest.mark.parametrize(("text", "shown"), [("a\x1bb", "a<U+001B>b"), ("a\n\tb", "a\n\tb")])
def test_control_characters_are_made_visible(text, shown):
    assert visible(text) == shown

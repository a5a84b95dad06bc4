"""Traces against the reference's concepts, and what is drawn of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from conceptmoe_vl.chunk_pictures import Drawing, colour_of, draw_regions, pieces_of, side_by_side
from conceptmoe_vl.chunk_trace import ChunkRecorder, Plane, image_mode
from conceptmoe_vl.cli import main
from tests.eval.shards import png
from tests.model_folder import save_model_folder
from tests.reference import chunking as ref
from tests.tiny import make_document, packed, padded, tiny_model

DOCUMENTS = [
    make_document([3, "image", 4, "image", 1]),
    make_document([7], 1),
    make_document(["image"], 2),
    make_document([1], 3),
]


def traces_of(model, inputs):
    recorder = ChunkRecorder()
    with recorder.watch(model), torch.no_grad():
        model(**inputs)
    return recorder.take()


def parents_of(trace, document):
    """Parents for the reference: every patch's is its region's seed."""
    parent = [None] * len(document.ids)
    for plane in trace.planes:
        for n in range(plane.tokens.start, plane.tokens.stop):
            if not trace.is_boundary[n]:
                members = np.flatnonzero(trace.concept == trace.concept[n])
                parent[n] = int(members[trace.is_boundary[members]][0])
    return parent


@pytest.mark.parametrize("mode", ["sequential", "grid"])
@pytest.mark.parametrize("router", ["cosine", "linear", "fixed", "none"])
@pytest.mark.parametrize("make_inputs", [packed, padded])
def test_traces_hold_the_references_concepts(mode, router, make_inputs):
    model = tiny_model(router=router, image_mode=mode)
    traces = traces_of(model, make_inputs(DOCUMENTS))
    assert len(traces) == len(DOCUMENTS)
    for trace, document in zip(traces, DOCUMENTS, strict=True):
        assert trace.ids.tolist() == list(document.ids)
        grids = [(plane.first, plane.rows, plane.columns) for plane in trace.planes]
        assert grids == list(document.grids)
        grid_mode = mode == "grid"
        parent = parents_of(trace, document) if grid_mode else [None] * len(document.ids)
        boundary = trace.is_boundary.tolist()
        concepts = ref.find_concepts(boundary, document.kinds, parent, grid_mode=grid_mode)
        expected = np.full(len(document.ids), -1)
        for number, members in enumerate(concepts.members):
            expected[members] = number
        assert trace.concept.tolist() == expected.tolist()
        assert trace.sizes().tolist() == [len(members) for members in concepts.members]
        forced = [
            ref.is_forced(n, document.kinds, document.grids, grid_mode)
            for n in range(len(document.ids))
        ]
        assert trace.is_forced.tolist() == forced
        assert trace.probability[trace.is_forced].tolist() == [1.0] * sum(forced)
        assert trace.ratio() == len(document.ids) / len(concepts.members)


def test_sizes_and_modalities_of_tokens():
    (trace,) = traces_of(tiny_model(router="fixed", target_ratio=3.0), packed(DOCUMENTS[:1]))
    of_token = trace.size_of_token()
    for n, concept in enumerate(trace.concept):
        assert of_token[n] == (trace.concept == concept).sum()
    of_concept = trace.modality_of_concept()
    for number in range(trace.concepts):
        assert (trace.is_image[trace.concept == number] == of_concept[number]).all()


def test_tiles_are_two_planes_of_one_image():
    document = make_document([2, ("tiles", 1, 2), 3, ("tiles", 2, 1)])
    (trace,) = traces_of(tiny_model(vision="tiles", image_mode="grid"), packed([document]))
    images = trace.images()
    assert [[(p.rows, p.columns) for p in planes] for planes in images] == [
        [(3, 3), (3, 6)],
        [(3, 3), (6, 3)],
    ]


def test_decoding_steps_are_passed_over_and_modes_are_put_back():
    model = tiny_model(image_mode="grid")
    recorder = ChunkRecorder()
    with recorder.watch(model):
        model.generate(torch.tensor([[9, 8, 7]]), max_new_tokens=4, do_sample=False)
    assert [len(trace.ids) for trace in recorder.take()] == [3]
    with image_mode(model, "sequential"):
        assert model.config.chunk.image_mode == "sequential"
    assert model.config.chunk.image_mode == "grid"
    modes = {}
    for mode in ("sequential", "grid"):
        with image_mode(model, mode):
            (trace,) = traces_of(model, packed(DOCUMENTS[:1]))
        modes[mode] = trace
    # In the plane the first patch is a forced boundary, in reading order it is not.
    first = modes["grid"].planes[0].first
    assert modes["grid"].is_forced[first]
    assert not modes["sequential"].is_forced[first]


def test_regions_are_tinted_and_outlined_where_they_meet():
    regions = np.array([[0, 0, 1], [2, 2, -1]])
    drawn = draw_regions(Image.new("RGB", (30, 20), "white"), regions)
    assert drawn.size == (480, 320)
    pixels = np.asarray(drawn).astype(int)
    width, height = 480 // 3, 320 // 2

    def centre(row, column):
        return pixels[row * height + height // 2, column * width + width // 2].tolist()

    def tinted(colour):
        return [int(0.62 * 255 + 0.38 * channel) for channel in colour]

    for (row, column), number in np.ndenumerate(regions):
        colour = colour_of(number) if number >= 0 else (128, 128, 128)
        assert np.abs(np.array(centre(row, column)) - tinted(colour)).max() <= 1
    dark = [20, 20, 20]
    assert pixels[height // 2, 2 * width].tolist() == dark  # 0 | 1
    assert pixels[height, width // 2].tolist() == dark  # 0 over 2
    assert pixels[height // 2, width].tolist() == centre(0, 0)  # within region 0


def test_pictures_of_any_shape_are_drawn():
    for size in [(1, 1), (3000, 7), (5, 2000), (1600, 1600)]:
        drawn = draw_regions(Image.new("RGB", size), np.zeros((3, 2), int))
        assert max(drawn.size) <= 3000
        assert min(drawn.size) >= 1
    sheet = side_by_side([Drawing("a", Image.new("RGB", (10, 20))), Drawing("b", drawn)], 100)
    assert sheet.height == 140


def test_pieces_name_every_token_once(tmp_path):
    from conceptmoe_vl.asking import load_pretrained, question_messages
    from conceptmoe_vl.chunk_trace import trace_conversation

    folder = save_model_folder(tmp_path / "model", lively=True)
    model, processor = load_pretrained(folder)
    messages = question_messages([png()], "what is\tthe color\nof é\U0001f600?")
    trace = trace_conversation(model, processor, messages)
    pieces = pieces_of(trace, processor.tokenizer)
    patches = sum(plane.rows * plane.columns for plane in trace.planes)
    assert len(pieces) == len(trace.ids) - patches + len(trace.planes)
    assert sum(piece.is_boundary for piece in pieces) == int(
        trace.is_boundary[~trace.is_image].sum()
    )
    text = "".join(piece.text for piece in pieces)
    assert "⇥" in text
    assert "⏎" in text
    assert [Plane(p.first, p.rows, p.columns) for p in trace.planes] == list(trace.planes)


def test_the_command_writes_page_and_picture(tmp_path, capsys):
    folder = save_model_folder(tmp_path / "model", lively=True)
    picture = tmp_path / "a<b>.png"
    picture.write_bytes(png("blue", 50))
    page, sheet = tmp_path / "page.html", tmp_path / "sheet.png"
    arguments = [str(picture), str(picture), "<script>is there a circle?", "--model", str(folder)]
    status = main(["chunks", *arguments, "--out", str(page), "--png", str(sheet)])
    assert status == 0
    assert "concepts" in capsys.readouterr().out
    html = page.read_text("utf-8")
    assert html.count("data:image/png;base64,") == 6
    assert "(not trained for)" in html
    assert "<script>is there" not in html
    for path in (sheet, tmp_path / "sheet-2.png"):
        assert Image.open(path).size[1] == 552


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.png", "what?"], "x.png"),
        ([" "], "the question is empty"),
        (["what?", "--out", "/nowhere/page.html"], "cannot be written"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message, tmp_path, capsys):
    folder = save_model_folder(tmp_path / "model", vision=False)
    assert main(["chunks", *arguments, "--model", str(folder)]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]

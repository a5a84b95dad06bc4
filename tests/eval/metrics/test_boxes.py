from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import intersection_over_union, parse_box
from eval.metrics.boxes import Box
from tests.reference import metrics as reference


@pytest.mark.parametrize(
    ("answer", "coordinates", "box"),
    [
        ("[0.1, 0.2, 0.3, 0.4]", "unit", (0.1, 0.2, 0.3, 0.4)),
        ("The box is [0.1,0.2,0.3,0.4].", "unit", (0.1, 0.2, 0.3, 0.4)),
        ("(.1, .2, 1., 1)", "unit", (0.1, 0.2, 1.0, 1.0)),
        ("0.1 0.2 0.3 0.4", "unit", (0.1, 0.2, 0.3, 0.4)),
        ("<box>(100,200),(300,400)</box>", "thousand", (0.1, 0.2, 0.3, 0.4)),
        ("[[100, 200, 300, 400]]", "thousand", (0.1, 0.2, 0.3, 0.4)),
        ('{"bbox_2d": [64, 48, 320, 240], "label": "cat"}', "pixels", (0.1, 0.1, 0.5, 0.5)),
        ("{'x1': 64, 'y1': 48, 'x2': 320, 'y2': 240}", "pixels", (0.1, 0.1, 0.5, 0.5)),
        ("x_min: 64, y_min: 48, x_max: 320, y_max: 240", "pixels", (0.1, 0.1, 0.5, 0.5)),
        ("[-0.1, 0, 0.5, 1]", "unit", (-0.1, 0.0, 0.5, 1.0)),
        ("[1, 2, 3] then [0.1, 0.2, 0.3, 0.4]", "unit", (0.1, 0.2, 0.3, 0.4)),
        ("[0.1, 0.2, 0.3]", "unit", None),
        ("1 2 3 4 5", "unit", None),
        ("there is no box", "unit", None),
        ("", "unit", None),
    ],
)
def test_boxes_in_texts(answer, coordinates, box):
    read = parse_box(answer, coordinates, 640, 480)
    assert read == (None if box is None else pytest.approx(box))


def test_pixels_need_the_image_size():
    with pytest.raises(ValueError, match="image's size"):
        parse_box("[1, 2, 3, 4]", "pixels")


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 2, 2), (2, 0, 4, 2), 0.0),  # an edge in common
        ((0, 0, 2, 2), (0, 0, 2, 1), 0.5),
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7),
        ((2, 2, 0, 0), (0, 0, 2, 2), 0.0),  # corners exchanged: no box
        ((1, 1, 1, 1), (1, 1, 1, 1), 0.0),
    ],
)
def test_overlap_by_hand(first, second, overlap):
    assert intersection_over_union(Box(*first), Box(*second)) == pytest.approx(overlap)


_CORNERS = st.tuples(*[st.integers(0, 6)] * 4)


@settings(deadline=None, max_examples=100)
@given(_CORNERS, _CORNERS)
def test_overlap_is_the_slow_one(first, second):
    expected = pytest.approx(float(reference.overlap(first, second)))
    assert intersection_over_union(Box(*first), Box(*second)) == expected
    assert intersection_over_union(Box(*second), Box(*first)) == expected

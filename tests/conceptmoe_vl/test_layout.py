"""The packed layout: offsets, positions, document numbers, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.layout import PackedLayout

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_layout_equals_a_loop_over_documents(lengths, data):
    past = tuple(data.draw(st.integers(0, 5)) for _ in lengths)
    layout = PackedLayout.from_lengths(lengths, CPU, past_lengths=past)
    positions, documents, starts, offsets = [], [], [], [0]
    for g, length in enumerate(lengths):
        if length:
            starts.append(offsets[-1])
        positions += [past[g] + n for n in range(length)]
        documents += [g] * length
        offsets.append(offsets[-1] + length)
    assert layout.cu_seqlens.tolist() == offsets
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.positions_T.tolist() == positions
    assert layout.document_T.tolist() == documents
    assert layout.starts.tolist() == starts
    assert layout.total == sum(lengths)
    assert layout.max_length == max(lengths)
    assert layout.has_past == any(past)


def test_round_trip_by_offsets():
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 3, 3, 7], dtype=torch.int32), 7)
    assert layout.lengths == (3, 0, 4)
    assert layout.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("offsets", [[1, 7], [0, 5], [0, 4, 3, 7], [0, 9]])
def test_wrong_offsets_are_refused_with_the_count(offsets):
    with pytest.raises(ValueError, match="7"):
        PackedLayout.from_cu_seqlens(torch.tensor(offsets, dtype=torch.int32), 7)

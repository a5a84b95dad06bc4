"""What an answer costs, against the accounting that is held against real models."""

from __future__ import annotations

import pytest

from conceptmoe_vl.flops import decoding_cost, forward_flops
from conceptmoe_vl.memory import cache_bytes
from eval.efficiency import answer_cost, mean_cost
from eval.replies import Reply
from tests.tiny import tiny_config


def reply(text, image, concepts, answer):
    counts = {"text": concepts - 2 * bool(image), "image": 2 * bool(image)}
    return Reply("", "", "", text + image, answer, {"text": text, "image": image}, counts)


def test_a_prompt_and_its_steps():
    config = tiny_config()
    images = 18 // 9
    found = answer_cost(config, reply(12, 18, 10, 5))
    prompt = forward_flops(config, 30, images=images, logits=1, concepts=10)
    step = decoding_cost(config, 32, 3.0)
    expected = sum(f.total for f in prompt.values()) + 4 * sum(c.flops.total for c in step.values())
    assert found["flops"] == pytest.approx(expected)
    assert found["cache_bytes"] == cache_bytes(config, 34, 3.0).total


def test_compression_saves_and_text_has_no_tower():
    config = tiny_config()
    plain, merged = (answer_cost(config, reply(60, 0, count, 1)) for count in (60, 20))
    assert merged["flops"] < plain["flops"]
    assert merged["cache_bytes"] < plain["cache_bytes"]
    with_image = answer_cost(config, reply(51, 9, 60, 1))
    assert with_image["flops"] > plain["flops"]


def test_the_mean_is_over_questions():
    config = tiny_config()
    replies = [reply(60, 0, 60, 1), reply(10, 0, 5, 3)]
    costs = [answer_cost(config, each) for each in replies]
    assert mean_cost(config, replies) == {
        f"{name}_per_question": pytest.approx((costs[0][name] + costs[1][name]) / 2)
        for name in ("flops", "cache_bytes")
    }

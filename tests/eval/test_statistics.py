from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import wilson_interval
from eval.statistics import estimate, group_clusters, holm, paired
from eval.tasks import Question, RatioOfSums, Scored, mean_score


def scored(scores, clusters=None) -> list[Scored]:
    details = [{} if clusters is None else {"cluster": cluster} for cluster in clusters or scores]
    return [
        Scored(Question(str(i), [], [], details=detail), "", score)
        for i, (score, detail) in enumerate(zip(scores, details, strict=True))
    ]


def plain_mean(samples):
    """The same figure as `mean_score`, by the path of arbitrary functions."""
    return {"accuracy": sum(sample.score for sample in samples) / len(samples)}


def normal_interval(values) -> tuple[float, float]:
    half = 1.959964 * np.std(values, ddof=1) / math.sqrt(len(values))
    return np.mean(values) - half, np.mean(values) + half


def test_shares_have_wilsons_interval():
    figure = estimate(scored([1.0] * 15 + [0.0] * 5), mean_score)["accuracy"]
    assert figure.value == 0.75
    assert figure.interval == wilson_interval(15, 20)


def test_a_share_over_part_of_the_samples_has_wilsons_interval():
    """As the controls of a task, which enter one figure alone."""
    samples = scored([1.0] * 6 + [0.0] * 4)
    counted = {sample.question.key for sample in samples[2:]}

    def parts(sample):
        inside = float(sample.question.key in counted)
        return {"share": (sample.score * inside, inside), "none": (0.0, 0.0)}

    figures = estimate(samples, RatioOfSums(parts))
    assert figures["share"].value == 0.5
    assert figures["share"].interval == wilson_interval(4, 8)
    assert figures["none"].value is None
    assert figures["none"].interval is None


@pytest.mark.parametrize("metrics", [mean_score, plain_mean])
def test_other_means_have_the_interval_of_the_normal_distribution_for_many_samples(metrics):
    values = np.random.default_rng(1).beta(2, 3, size=400)
    figure = estimate(scored(values.tolist()), metrics)["accuracy"]
    low, high = normal_interval(values)
    width = high - low
    assert figure.interval == pytest.approx((low, high), abs=0.06 * width)


@pytest.mark.parametrize("metrics", [mean_score, plain_mean])
def test_clusters_are_resampled_as_a_whole(metrics):
    """Ten copies of each question, as clusters, are no better known than one of each."""
    values = np.random.default_rng(2).random(100)
    copies = scored(np.repeat(values, 10).tolist(), [i // 10 for i in range(1000)])
    once = estimate(scored(values.tolist()), metrics)["accuracy"]
    assert estimate(copies, metrics)["accuracy"].interval == pytest.approx(once.interval, abs=1e-9)


def test_clusters_of_shares_do_not_have_wilsons_interval_but_a_width():
    mixed = scored([1.0] * 30 + [0.0] * 30, [i // 10 for i in range(60)])
    low, high = estimate(mixed, mean_score)["accuracy"].interval
    assert high - low > 2 * np.diff(wilson_interval(30, 60))[0]
    all_right = scored([1.0] * 60, [i // 10 for i in range(60)])
    assert estimate(all_right, mean_score)["accuracy"].interval == wilson_interval(6, 6)


def test_samples_without_a_cluster_stand_alone():
    samples = scored([0.0] * 4, ["a", None, "a", None])
    assert group_clusters(samples) == [[0, 2], [1], [3]]


def test_a_ratio_of_sums_is_one():
    samples = [
        Scored(Question(str(i), [], []), "", 0.0, None, [(-2.0 * n, n)])
        for i, n in enumerate([1, 5, 9])
    ]
    perplexity = RatioOfSums(
        lambda s: {"perplexity": (-s.log_likelihoods[0][0], s.log_likelihoods[0][1])}, np.exp
    )
    figure = estimate(samples, perplexity)["perplexity"]
    assert figure.value == pytest.approx(math.exp(2))
    assert figure.interval == pytest.approx((math.exp(2), math.exp(2)))


@pytest.mark.parametrize("metrics", [mean_score, plain_mean])
def test_one_cluster_tells_nothing_of_others(metrics):
    one = scored([0.25, 0.75], ["a", "a"])
    assert estimate(one, metrics)["accuracy"].interval is None
    difference = paired(one, scored([0.5, 1.0], ["a", "a"]), metrics)["accuracy"]
    assert (difference.value, difference.interval) == (0.25, None)


def test_what_no_sample_defines_is_none():
    precision = RatioOfSums(lambda sample: {"precision": (0.0, 0.0)})
    figure = estimate(scored([0.0, 1.0]), precision)["precision"]
    assert figure.to_json() == {"value": None, "interval_95": None}
    difference = paired(scored([0.0, 1.0]), scored([0.0, 1.0]), precision)["precision"]
    assert (difference.value, difference.interval, difference.p) == (None, None, None)


def test_the_interval_is_the_same_every_time():
    samples = scored(np.random.default_rng(3).random(50).tolist())
    assert estimate(samples, mean_score) == estimate(samples, mean_score)
    assert estimate(samples, plain_mean) == estimate(samples, plain_mean)


@pytest.mark.parametrize("metrics", [mean_score, plain_mean])
def test_paired_differences_are_surer_than_unpaired_ones(metrics):
    rng = np.random.default_rng(4)
    hard = rng.random(300)
    first = scored(hard.tolist())
    second = scored((hard + rng.normal(0.02, 0.01, 300)).tolist())
    difference = paired(first, second, metrics)["accuracy"]
    low, high = normal_interval([b.score - a.score for a, b in zip(first, second, strict=True)])
    assert difference.interval == pytest.approx((low, high), abs=0.1 * (high - low))
    assert difference.p is not None
    assert difference.p < 0.005


def test_equal_models_do_not_differ():
    samples = scored([0.0, 1.0, 0.3])
    difference = paired(samples, samples, mean_score)["accuracy"]
    assert (difference.value, difference.interval, difference.p) == (0.0, (0.0, 0.0), 1.0)


@pytest.mark.parametrize("metrics", [mean_score, plain_mean])
def test_the_p_value_of_few_questions_is_that_of_the_sign_test(metrics):
    """Better on five of five questions: by chance once in 16, however clear it looks."""
    difference = paired(scored([0.0] * 5), scored([1.0] * 5), metrics)["accuracy"]
    assert difference.p == pytest.approx(2 / 32, abs=0.02)


def test_ties_in_the_permutation_are_no_matter_of_rounding():
    """Half of the exchanges of two questions give the difference itself, but for last bits."""
    first, second = scored([0.1, 0.2]), scored([0.4, 0.7])
    assert paired(first, second, mean_score)["accuracy"].p == pytest.approx(0.5, abs=0.02)


def test_holm_equals_a_published_example():
    # Holm 1979, and R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm").
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.7, 0.9]) == [1.0, 1.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(p_values):
    adjusted = holm(p_values)
    for i, p in enumerate(p_values):
        assert p <= adjusted[i] <= min(1.0, len(p_values) * p) + 1e-12
        for j, q in enumerate(p_values):
            if p < q:
                assert adjusted[i] <= adjusted[j]

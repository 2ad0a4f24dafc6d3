"""Samples move from the ranks that hold them to the replicas that compute them; what they are does not change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from ranks import results, run_ranks

LAYOUTS = ("dp4", "dp2pp2", "dp2tp2", "dp2cp2", "dp1")
Seen = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By rank and layout."""
    return results(run_ranks(Path(__file__).with_name("exchange_job.py"), 4, [str(tmp_path_factory.mktemp("steps"))]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sample_is_computed_by_one_replica_with_all_that_is_known_of_it(seen: Seen, layout: str) -> None:
    for rank in seen:
        assert rank[layout]["off"] == []
        assert rank[layout]["alike"] is True
        assert rank[layout]["numbers"] == seen[0]["dp1"]["numbers"]
    assert seen[0]["dp1"]["numbers"] == [*range(4), 8, *range(10, 24)], "neither groups without signal nor the unscored"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_is_routed_as_the_weights_did_that_read_the_sample_last(seen: Seen, layout: str) -> None:
    assert all(rank[layout]["misrouted"] == [] for rank in seen)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_and_weights_are_those_of_one_replica(seen: Seen, layout: str) -> None:
    for rank in seen:
        assert rank[layout]["advantage"] == seen[0]["dp1"]["advantage"]
        assert rank[layout]["weights"] == seen[0]["dp1"]["weights"]
    assert all(sum(weights) > 0 for weights in seen[0]["dp1"]["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_of_steps_reach_the_tokens_of_their_steps(seen: Seen, layout: str) -> None:
    for rank in seen:
        found, expected = rank[layout]["by_step"]
        assert found == pytest.approx(expected, abs=1e-5)
        assert len({round(advantage, 4) for advantage in expected}) > 2 * len(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_normalised_over_the_batch_is_that_of_one_replica(seen: Seen, layout: str) -> None:
    expected = seen[0]["dp1"]["correction"]
    assert len({factor for factor in expected if factor}) > 5
    share = seen[0]["dp1"]["corrected"]["policy/corrected"]
    assert 0 < share < 1
    for rank in seen:
        assert rank[layout]["correction"] == pytest.approx(expected, rel=1e-6)
        assert rank[layout]["corrected"]["policy/corrected"] == pytest.approx(share)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_effective_sample_size_is_that_of_all_learned_tokens(seen: Seen, layout: str) -> None:
    """Of the factors of sequences that the batch has, some of which are 0, and of those of the loss, up to 2."""
    learned, log_ratio = seen[0]["dp1"]["factors"]
    of_batch = [c for c, one in zip(seen[0]["dp1"]["correction"], learned, strict=True) if one]
    of_loss = [min(math.exp(x), 2.0) for x, one in zip(log_ratio, learned, strict=True) if one]
    expected = [sum(w) ** 2 / (len(w) * sum(x * x for x in w)) for w in (of_batch, of_loss)]
    assert 0 in of_batch
    assert max(expected) < 0.99
    for rank in seen:
        assert rank[layout]["effective"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kl_penalty_lowers_the_rewards_that_advantages_are_made_of(seen: Seen, layout: str) -> None:
    for rank in seen:
        found, expected, lengths = rank[layout]["penalised"]
        assert sum(lengths) == len(found)
        of_samples = [[a for a in found[sum(lengths[:i]) : sum(lengths[: i + 1])] if a] for i in range(len(lengths))]
        for tokens, advantage in zip(of_samples, expected, strict=True):
            assert tokens == pytest.approx([advantage] * len(tokens), abs=1e-5)
        moved = sum(advantage != 0 for advantage in expected)
        assert sum(map(bool, of_samples)) == moved - 1, "all but the sample without tokens"


@pytest.mark.parametrize("layout", ["dp4", "dp2pp2"])
def test_mini_batches_of_the_first_epoch_are_spread_evenly(seen: Seen, layout: str) -> None:
    """No replica has more than the fair share and one more sequence of at most 37 tokens; there are two epochs."""
    loads = seen[0][layout]["loads"]
    for replicas in loads[: len(loads) // 2]:
        assert max(tokens for (tokens,) in replicas) - min(tokens for (tokens,) in replicas) <= 37


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mismatch_is_that_of_all_tokens(seen: Seen, layout: str) -> None:
    expected, apart = seen[0]["dp1"]["mismatch"], seen[0]["dp1"]["apart"]
    assert expected["mismatch/mean_abs"] == pytest.approx(sum(apart) / len(apart), abs=1e-6), "of those sampled"
    assert expected["mismatch/p99_abs"] > expected["mismatch/p50_abs"] > 0
    for rank in seen:
        assert rank[layout]["mismatch"] == pytest.approx(expected, rel=1e-12)
        assert all(
            rank[layout]["mismatch"][f"mismatch/p{p}_abs"] == expected[f"mismatch/p{p}_abs"] for p in (50, 90, 99)
        )
        assert not any(map(math.isnan, rank[layout]["mismatch"].values()))


@pytest.mark.parametrize("kind", ["whole", "steps"])
def test_a_reward_model_s_scores_are_added_to_every_rank_s_completions(seen: Seen, kind: str) -> None:
    """Normalised, weighted and, for steps, at the tokens at which other terms may reward steps as well."""
    for rank in seen:
        found, expected = rank["dp4"]["learned"][kind]
        for (total, terms, steps), (of_total, of_terms, of_steps) in zip(found, expected, strict=True):
            assert total == pytest.approx(of_total, abs=1e-4)
            assert terms == pytest.approx(of_terms, abs=1e-4)
            assert [token for token, _ in steps] == [token for token, _ in of_steps]
            assert [value for _, value in steps] == pytest.approx([value for _, value in of_steps], abs=1e-4)
    assert len({round(terms["model"], 3) for _, terms, _ in expected if terms}) > 20, "scores differ"
    held = [count for (count,) in seen[0]["dp4"]["learned"]["held"]]
    assert len({*held}) > 1, "replicas score other numbers of samples"
    assert seen[0]["dp4"]["learned"]["ended"] > 0, "before some stop token a step has ended"


def test_a_reward_model_counts_from_the_step_that_was_asked_for(seen: Seen) -> None:
    assert seen[0]["dp4"]["learned"]["due"] == [False, False, False, True, True]


@pytest.mark.parametrize("kind", ["whole", "steps"])
def test_a_score_that_is_not_finite_names_the_sample(seen: Seen, kind: str) -> None:
    for rank in seen:
        refused = rank["dp4"]["learned"][f"{kind} refused"]
        assert refused.startswith("the reward model's score of prompt 'p0', sample 0 is nan: its weights overflow")


def test_a_step_saved_under_one_layout_is_continued_under_any_other(seen: Seen) -> None:
    for rank in seen:
        for layout in LAYOUTS:
            assert rank[layout]["same"] is True
            for saved, (off, numbers) in rank[layout]["loaded"].items():
                assert off == [], f"{saved} under {layout}"
                assert numbers == seen[0]["dp1"]["numbers"], f"{saved} under {layout}"

"""The pieces of the GRPO loop, on a real Megatron model in one real process (grpo_steps_job.py)."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from ranks import results, run_ranks

ROOT_HALF = math.sqrt(3) / 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    job = Path(__file__).with_name("grpo_steps_job.py")
    return results(run_ranks(job, 1, [str(tmp_path_factory.mktemp("trainer"))]))


WITH_SIGNAL = [0, 1, 2, 3, 12, 13, 14, 15]
"""Samples of the four groups, four each, whose rewards differ within the group."""
COMPUTED = {"drop": WITH_SIGNAL, "left out": WITH_SIGNAL, "kl": list(range(16))}
COUNTED = {"drop": WITH_SIGNAL, "left out": list(range(16)), "kl": list(range(16))}


@pytest.mark.parametrize("case", COMPUTED)
def test_batch_holds_the_samples_that_something_moves_and_no_others(seen, case):
    found = seen["batches"][case]
    assert found["tokens"] == [seen["batches"]["expected_tokens"][i] for i in COMPUTED[case]]
    assert found["only_equal"] is (case != "kl"), "a batch of groups without signal alone"
    assert found["nothing_to_do"] == (2 if case == "kl" else 0), "updates of such groups, in two epochs"


@pytest.mark.parametrize("case", COMPUTED)
def test_every_completion_token_carries_its_groups_relative_advantage(seen, case):
    found = seen["batches"][case]
    expected = [ROOT_HALF, -ROOT_HALF, ROOT_HALF, -ROOT_HALF, *[0.0] * 8, 0.5, 0.5, 0.5, -1.5]
    for row, sample in zip(found["advantages"], COMPUTED[case], strict=True):
        prompt_length = seen["batches"]["prompt_lengths"][sample]
        assert row[:prompt_length] == [0.0] * prompt_length
        assert len(row) > prompt_length
        assert row[prompt_length:] == pytest.approx([expected[sample]] * (len(row) - prompt_length), abs=1e-5)


@pytest.mark.parametrize("parts", [1, 3, 12, 16])
@pytest.mark.parametrize("case", COMPUTED)
def test_mini_batches_share_out_every_counted_sample_once_per_epoch(seen, case, parts):
    found = seen["batches"][case][f"parts_{parts}"]
    trained = Counter(i for part in found for i in part["dealt"][0])
    assert trained == Counter(2 * COMPUTED[case])
    for part in found:
        assert [COMPUTED[case][i] for i in part["sequences"]] == part["dealt"][0]
        assert not set(part["dealt"][1]) & set(COMPUTED[case])
        sizes = len(COUNTED[case]) // parts, -(-len(COUNTED[case]) // parts)
        assert sum(map(len, part["dealt"])) in (*sizes, 1)
    if parts < 12:  # every part has somebody in it who is trained
        assert Counter(i for part in found for kind in part["dealt"] for i in kind) == Counter(2 * COUNTED[case])


@pytest.mark.parametrize("parts", [1, 3, 12, 16])
def test_who_is_computed_does_not_change_the_mini_batches(seen, parts):
    def members(case):
        return [sorted(part["dealt"][0] + part["dealt"][1]) for part in seen["batches"][case][f"parts_{parts}"]]

    with_signal = [part for part in members("kl") if set(part) & set(WITH_SIGNAL)]
    assert members("left out") == with_signal


def test_mini_batches_are_cut_differently_in_every_epoch(seen):
    found = [part["sequences"] for part in seen["batches"]["kl"]["parts_3"]]
    assert found[:3] != found[3:]


@pytest.mark.parametrize("parts", [1, 3, 12, 16])
@pytest.mark.parametrize("case", COMPUTED)
def test_token_mean_weights_sum_to_the_computed_part_of_each_mini_batchs_tokens(seen, case, parts):
    for part in seen["batches"][case][f"parts_{parts}"]:
        left_out = sum(seen["batches"]["lengths"][i] for i in part["dealt"][1])
        assert part["weight"] == pytest.approx(part["tokens"] / (part["tokens"] + left_out), abs=1e-6)
        assert part["off_mask"] == 0


def test_gradients_are_those_of_the_papers_over_all_sampled_sequences(seen):
    assert len(seen["gradients"]) == 21
    for name, found in seen["gradients"].items():
        assert found["error"] < 2e-6, name
        assert found["norm"] > 1e-3, name
        moved = "kl 0.0, entropy 0.0" not in name
        assert found["computed"] == (16 if moved else 8), name
        if moved:
            assert found["shares"] == pytest.approx(1), name


@pytest.mark.parametrize("case", ["drop", "left out"])
def test_equal_rewards_move_no_bit_where_nothing_acts_on_them(seen, case):
    found = seen["equal_rewards"][case]
    assert found["signal"]["policy/grad_norm"] > 0
    assert len(set(found["digests"])) == 1
    assert found["after"] != found["digests"][0], "the digest sees updates"
    assert all(m["rollout/groups_with_signal"] == 0 and "policy/loss" not in m for m in found["metrics"])


def test_the_kl_term_moves_the_policy_when_all_rewards_are_equal(seen):
    found = seen["equal_rewards"]["kl"]
    assert len(set(found["digests"])) == 4
    for metrics in found["metrics"]:
        assert metrics["rollout/groups_with_signal"] == 0
        assert metrics["policy/grad_norm"] > 0
        assert metrics["policy/loss"] == pytest.approx(0.5 * metrics["policy/kl"])


@pytest.mark.parametrize("case", COMPUTED)
def test_engine_and_trainer_are_compared_in_steps_without_signal_too(seen, case):
    for metrics in seen["equal_rewards"][case]["metrics"]:
        assert metrics["mismatch/max_abs"] < 1e-5
        assert metrics["mismatch/effective_sample_size"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("case", COMPUTED)
def test_patience_ends_after_three_steps_without_signal_with_one_warning(seen, case):
    found = seen["equal_rewards"][case]
    assert found["warnings"] == [0, 0, 0, 1]
    (text,) = found["text"]
    assert "for 3 steps" in text
    assert "look at samples/" in text


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_before_the_first_update_can_be_continued(seen, sharded):
    found = seen["resumed_without_update"][sharded]
    assert found["step"] == 1
    assert found["metrics"]["policy/grad_norm"] > 0


def test_generators_go_on_where_they_were_saved(seen):
    found = seen["run_state"]
    assert found["drawn"] == found["expected"]


def test_a_state_of_other_libraries_warns_and_names_both_versions(seen):
    found = seen["run_state"]
    assert found["same versions"] == 0
    (warning,) = found["warnings"]
    assert f"saved with torch 1.0 and continues with {found['torch']}" in warning


def test_a_single_update_is_exactly_on_policy(seen):
    for metrics in seen["on_policy"]:
        assert metrics["policy/ratio"] == 1.0
        assert metrics["policy/clip_fraction"] == 0.0
        assert metrics["policy/approx_kl_old"] == 0.0
        assert metrics["mismatch/max_abs"] < 1e-5


def test_samples_of_other_weights_are_warned_of_once(seen):
    found = seen["stale_engine"]
    assert all(metrics["mismatch/mean_abs"] > 1e-3 for metrics in found["steps"])
    (warning,) = found["warnings"]
    assert "the engine's log-probs differ from the trainer's" in warning
    assert f"{found['steps'][0]['mismatch/mean_abs']:.2g} on average" in warning


def test_kl_is_exactly_zero_right_after_a_refresh_and_only_then(seen):
    first, second, third = (metrics["policy/kl"] for metrics in seen["on_policy"])
    assert (first, third) == (0.0, 0.0)
    assert second > 0


def test_learning_rate_warms_up_by_update(seen):
    assert [m["policy/lr"] for m in seen["on_policy"]] == pytest.approx([3e-4 / 4, 3e-4 / 2, 3e-4 * 3 / 4])


def test_second_epoch_is_measured_against_the_policy_before_the_first(seen):
    found = seen["two_epochs"]
    assert found["first"]["ratio"] == 1.0
    assert found["first"]["approx_kl_old"] == 0.0
    assert abs(found["ratio"] - 1) > 1e-4
    assert found["second"]["ratio"] == pytest.approx(found["ratio"], rel=1e-5)
    assert found["second"]["approx_kl_old"] > 0
    assert found["step"]["policy/ratio"] == pytest.approx((1 + found["ratio"]) / 2, rel=1e-5)
    assert found["trained"] == 2 * found["completion_tokens"]


def test_a_step_with_groups_that_are_left_out_goes_on_behind_every_update_as_if_never_stopped(seen):
    found = seen["continued"]
    assert 0 < found["with_signal"] < 4
    assert found["places"][1:] == [
        f"in step 1 after {done} of {found['updates']} updates" for done in range(1, found["updates"])
    ]
    assert found["same"] is True
    assert found["losses"] is True


def test_mini_batches_are_measured_against_the_policy_before_the_first_at_the_samples_temperature(seen):
    found = seen["two_mini_batches"]
    first, second = found["updates"]
    assert (first["ratio"], first["approx_kl_old"], first["kl"]) == pytest.approx((1, 0, 0), abs=1e-6)
    assert found["step"]["mismatch/max_abs"] < 1e-5
    assert abs(found["ratio"] - 1) > 1e-4
    assert second["ratio"] == pytest.approx(found["ratio"], rel=1e-5)
    assert second["kl"] > 1e-6
    assert min(found["tokens"]) > 0


def test_a_step_without_signal_is_compared_at_the_samples_temperature(seen):
    found = seen["two_mini_batches"]["without_signal"]
    assert found["rollout/groups_with_signal"] == 0
    assert found["mismatch/max_abs"] < 1e-5


def test_a_step_that_was_begun_is_finished_although_fewer_are_wanted_now(seen):
    found = seen["begun"]
    assert found["where"] == "in step 2 after 1 of 2 updates"
    assert (found["steps"], found["updates"], found["left"]) == (2, 4, False)


def test_samples_do_not_depend_on_how_many_are_drawn_at_once(seen):
    tokens, logprobs = seen["drawing_and_scoring"]["tokens"], seen["drawing_and_scoring"]["logprobs"]
    assert len({len(row) for row in tokens["512"]}) > 1, "sequences of several lengths leave the cache at several times"
    for concurrent in ("8", "1"):
        assert tokens[concurrent] == tokens["512"]
        assert logprobs[concurrent] == pytest.approx(logprobs["512"], abs=1e-5)
    assert seen["drawing_and_scoring"]["next_version"] != tokens["512"], "another policy version draws other noise"


def test_rewards_come_from_the_users_function_in_the_order_of_the_samples(seen):
    found = seen["drawing_and_scoring"]
    assert found["order"] == found["expected_order"]
    assert found["same"] is True, "groups are what the engine generates for the same version"
    assert found["own"] == found["expected_own"]
    assert len(set(found["own"])) > 1
    totals = [own + 0.5 * tagged for own, tagged in zip(found["own"], found["format"], strict=True)]
    assert found["totals"] == pytest.approx(totals)


def test_completions_become_longer_in_the_step_that_was_asked_for(seen):
    found = seen["longer"]
    assert found["lengths"] == [[12], [20]], "nothing stops these"
    assert found["evaluated"] == [12, 20]
    assert found["denominators"] == pytest.approx([4 * 12, 4 * 20]), "of the constant aggregation"


def test_a_model_may_know_more_tokens_than_the_tokenizer(seen):
    found = seen["longer"]
    known = len(found["tokens"])
    assert any(token >= known for ids, _ in found["samples"] for token in ids)
    for ids, text in found["samples"]:
        assert text == "".join(found["tokens"][token] for token in ids if token < known)
    assert found["refused"].startswith(f"model.vocab_size=25 is below the tokenizer's {known}")

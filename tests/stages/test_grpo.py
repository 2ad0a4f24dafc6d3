"""The pieces of the GRPO loop, on a real Megatron model in one real process (grpo_steps_job.py)."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from metric_lines import unexplained
from ranks import results, run_ranks, words_of_long

ROOT_HALF = math.sqrt(3) / 2


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """All that the job sees, or what `make test` asks of it."""
    job = Path(__file__).with_name("grpo_steps_job.py")
    return results(run_ranks(job, 1, [str(tmp_path_factory.mktemp("trainer")), *words_of_long(request)]))


WITH_SIGNAL = [0, 1, 2, 3, 12, 13, 14, 15]
"""Samples of the four groups, four each, whose rewards differ within the group."""
COMPUTED = {"drop": WITH_SIGNAL, "left out": WITH_SIGNAL, "kl": list(range(16))}
COUNTED = {"drop": WITH_SIGNAL, "left out": list(range(16)), "kl": list(range(16))}


@pytest.mark.parametrize("case", COMPUTED)
def test_batch_holds_the_samples_that_something_moves_and_no_others(seen, case):
    outcome = seen["batches"][case]
    assert outcome["tokens"] == [seen["batches"]["expected_tokens"][i] for i in COMPUTED[case]]
    assert outcome["only_equal"] is (case != "kl"), "a batch of groups without signal alone"
    assert outcome["nothing_to_do"] == (2 if case == "kl" else 0), "updates of such groups, in two epochs"


@pytest.mark.parametrize("case", COMPUTED)
def test_batch_is_that_of_the_first_epoch_whatever_the_second_is_dealt(seen, case):
    outcome = seen["batches"][case]
    assert outcome["numbers"] == [COMPUTED[case]] * 12
    assert case != "left out" or any(first != second for first, second in outcome["mini_batches"])


@pytest.mark.parametrize("case", COMPUTED)
def test_every_completion_token_carries_its_groups_relative_advantage(seen, case):
    outcome = seen["batches"][case]
    expected = [ROOT_HALF, -ROOT_HALF, ROOT_HALF, -ROOT_HALF, *[0.0] * 8, 0.5, 0.5, 0.5, -1.5]
    for row, sample in zip(outcome["advantages"], COMPUTED[case], strict=True):
        prompt_length = seen["batches"]["prompt_lengths"][sample]
        assert row[:prompt_length] == [0.0] * prompt_length
        assert len(row) > prompt_length
        assert row[prompt_length:] == pytest.approx([expected[sample]] * (len(row) - prompt_length), abs=1e-5)


@pytest.mark.parametrize("parts", [1, 3, 12, 16])
@pytest.mark.parametrize("case", COMPUTED)
def test_mini_batches_share_out_every_counted_sample_once_per_epoch(seen, case, parts):
    outcome = seen["batches"][case][f"parts_{parts}"]
    trained = Counter(i for part in outcome for i in part["dealt"][0])
    assert trained == Counter(2 * COMPUTED[case])
    for part in outcome:
        assert [COMPUTED[case][i] for i in part["sequences"]] == part["dealt"][0]
        assert not set(part["dealt"][1]) & set(COMPUTED[case])
        sizes = len(COUNTED[case]) // parts, -(-len(COUNTED[case]) // parts)
        assert sum(map(len, part["dealt"])) in (*sizes, 1)
    if parts < 12:  # every part has somebody in it who is trained
        assert Counter(i for part in outcome for kind in part["dealt"] for i in kind) == Counter(2 * COUNTED[case])


@pytest.mark.parametrize("parts", [1, 3, 12, 16])
def test_who_is_computed_does_not_change_the_mini_batches(seen, parts):
    def members(case):
        return [sorted(part["dealt"][0] + part["dealt"][1]) for part in seen["batches"][case][f"parts_{parts}"]]

    with_signal = [part for part in members("kl") if set(part) & set(WITH_SIGNAL)]
    assert members("left out") == with_signal


def test_mini_batches_are_cut_differently_in_every_epoch(seen):
    outcome = [part["sequences"] for part in seen["batches"]["kl"]["parts_3"]]
    assert outcome[:3] != outcome[3:]


@pytest.mark.parametrize("parts", [1, 3, 12, 16])
@pytest.mark.parametrize("case", COMPUTED)
def test_token_mean_weights_sum_to_the_computed_part_of_each_mini_batchs_tokens(seen, case, parts):
    for part in seen["batches"][case][f"parts_{parts}"]:
        left_out = sum(seen["batches"]["lengths"][i] for i in part["dealt"][1])
        assert part["weight"] == pytest.approx(part["tokens"] / (part["tokens"] + left_out), abs=1e-6)
        assert part["off_mask"] == 0


def test_gradients_are_those_of_the_papers_over_all_sampled_sequences(seen):
    assert len(seen["gradients"]) == 42
    for name, outcome in seen["gradients"].items():
        assert outcome["error"] < 2e-6, name
        assert outcome["norm"] > 1e-3, name
        moved = "kl 0.0, entropy 0.0" not in name and "drop" not in name
        scored, with_signal = (10, 6) if "unscored" in name else (16, 12 if "steps" in name else 8)
        assert outcome["computed"] == (scored if moved else with_signal), name
        if moved:
            assert outcome["shares"] == pytest.approx(1), name


def test_a_correction_of_sequences_scales_their_advantages_and_leaves_some_out(seen):
    outcome = seen["corrections"]
    ratios = [math.exp(apart) for apart in outcome["apart"]]
    expected = [min(ratio, 1.1) if 0.8 <= ratio <= 1.25 else 0.0 for ratio in ratios]
    assert 0 < expected.count(0.0) < len(expected)
    assert 1.1 in expected
    for factors, mask, factor in zip(outcome["factors"], outcome["mask"], expected, strict=True):
        assert factors == pytest.approx([factor * here for here in mask], rel=1e-5)
    lengths = outcome["lengths"]
    rejected = sum(n for n, factor in zip(lengths, expected, strict=True) if factor == 0) / sum(lengths)
    mean = sum(n * factor for n, factor in zip(lengths, expected, strict=True)) / sum(lengths)
    assert (outcome["metrics"]["rejected"], outcome["metrics"]["correction"]) == pytest.approx((rejected, mean))
    assert outcome["same"]
    assert outcome["moves"]
    beyond = sum(n for n, ratio in zip(lengths, ratios, strict=True) if ratio > 1.1) / sum(lengths)
    assert 0 < beyond < 1
    assert outcome["beyond"] == pytest.approx(beyond)


def test_a_correction_changes_nothing_where_engine_and_trainer_agree(seen):
    step = seen["corrections"]["step"]
    assert (step["policy/rejected"], step["policy/corrected"]) == (0, 0)
    assert (step["policy/correction"], step["policy/ratio"]) == pytest.approx((1, 1), abs=1e-5)
    assert step["policy/grad_norm"] > 0


def test_a_kl_penalty_in_the_rewards_moves_the_policy_although_the_rewards_are_equal(seen):
    """RLOO: what is left of an equal reward is a sample's own penalty, less the mean of the others'."""
    first, second = seen["kl_in_rewards"]["steps"]
    assert (first["policy/kl"], second["rollout/groups_with_signal"]) == (0, 0)
    assert second["policy/kl"] > 0
    assert second["policy/grad_norm"] > 0
    penalty = seen["kl_in_rewards"]["penalty"]
    groups = [penalty[i : i + 4] for i in range(0, 16, 4)]
    expected = [(sum(group) - 4 * own) / 3 for group in groups for own in group]
    assert seen["kl_in_rewards"]["advantages"] == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 1e-4
    assert seen["kl_in_rewards"]["loss"] == pytest.approx(seen["kl_in_rewards"]["policy term"], rel=1e-4), "and no more"


@pytest.mark.parametrize("case", ["drop", "left out"])
def test_equal_rewards_move_no_bit_where_nothing_acts_on_them(seen, case):
    outcome = seen["equal_rewards"][case]
    assert outcome["signal"]["policy/grad_norm"] > 0
    assert len(set(outcome["digests"])) == 1
    assert outcome["after"] != outcome["digests"][0], "the digest sees updates"
    assert all(m["rollout/groups_with_signal"] == 0 and "policy/loss" not in m for m in outcome["metrics"])


def test_the_kl_term_moves_the_policy_when_all_rewards_are_equal(seen):
    outcome = seen["equal_rewards"]["kl"]
    assert len(set(outcome["digests"])) == 4
    for metrics in outcome["metrics"]:
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
    outcome = seen["equal_rewards"][case]
    assert outcome["warnings"] == [0, 0, 0, 1]
    (text,) = outcome["text"]
    assert "for 3 steps" in text
    assert "look at samples/" in text


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_before_the_first_update_can_be_continued(seen, sharded):
    outcome = seen["resumed_without_update"][sharded]
    assert outcome["step"] == 1
    assert outcome["metrics"]["policy/grad_norm"] > 0


def test_generators_go_on_where_they_were_saved(seen):
    outcome = seen["run_state"]
    assert outcome["drawn"] == outcome["expected"]


def test_a_start_finds_all_that_the_stage_held(seen):
    """After two steps, the second one without signal, with a curriculum, a reference and an average."""
    assert (seen["run_state"]["unmoved"], seen["run_state"]["lost"]) == ([], [])


def test_a_state_of_other_libraries_warns_and_names_both_versions(seen):
    outcome = seen["run_state"]
    assert outcome["same versions"] == 0
    (warning,) = outcome["warnings"]
    assert f"saved with torch 1.0 and continues with {outcome['torch']}" in warning


def test_a_single_update_is_exactly_on_policy(seen):
    assert not unexplained(
        [*seen["on_policy"], *seen["kl_in_rewards"]["steps"], *seen["equal_rewards"]["kl"]["metrics"]]
    )
    for metrics in seen["on_policy"]:
        assert metrics["policy/ratio"] == 1.0
        assert metrics["policy/clip_fraction"] == 0.0
        assert metrics["policy/approx_kl_old"] == 0.0
        assert metrics["mismatch/max_abs"] < 1e-5


def test_samples_of_other_weights_are_warned_of_once(seen):
    outcome = seen["stale_engine"]
    assert all(metrics["mismatch/mean_abs"] > 1e-3 for metrics in outcome["steps"])
    (warning,) = outcome["warnings"]
    assert "the engine's log-probs differ from the trainer's" in warning
    assert f"{outcome['steps'][0]['mismatch/mean_abs']:.2g} on average" in warning


def test_without_a_ratio_nothing_is_clipped(seen):
    """RLOO with a KL penalty computes the old policy's log-probs, which rounding makes others than the update's."""
    for metrics in seen["kl_in_rewards"]["steps"]:
        assert (metrics["policy/clip_fraction"], metrics["policy/clip_low"], metrics["policy/clip_high"]) == (0, 0, 0)


def test_kl_is_exactly_zero_right_after_a_refresh_and_only_then(seen):
    first, second, third = (metrics["policy/kl"] for metrics in seen["on_policy"])
    assert (first, third) == (0.0, 0.0)
    assert second > 0


def test_tokens_are_counted_over_all_steps(seen):
    outcome = seen["equal_rewards"]["kl"]
    steps = [outcome["signal"], *outcome["metrics"], outcome["last"]]
    generated = sum(metrics["rollout/tokens"] for metrics in steps)
    assert outcome["tokens"] == {"generated": generated, "trained": generated}


def test_the_noise_of_gradients_is_that_of_as_many_updates_as_there_were(seen):
    outcome = seen["two_mini_batches"]
    assert outcome["step"]["policy/gradient_noise_scale"] == pytest.approx(outcome["noise after two"], rel=1e-9)


def test_learning_rate_warms_up_by_update(seen):
    assert [m["policy/lr"] for m in seen["on_policy"]] == pytest.approx([3e-4 / 4, 3e-4 / 2, 3e-4 * 3 / 4])


def test_second_epoch_is_measured_against_the_policy_before_the_first(seen):
    outcome = seen["two_epochs"]
    assert outcome["first"]["ratio"] == 1.0
    assert outcome["first"]["approx_kl_old"] == 0.0
    assert abs(outcome["ratio"] - 1) > 1e-4
    assert outcome["second"]["ratio"] == pytest.approx(outcome["ratio"], rel=1e-5)
    assert outcome["second"]["approx_kl_old"] > 0
    assert outcome["step"]["policy/ratio"] == pytest.approx((1 + outcome["ratio"]) / 2, rel=1e-5)
    assert outcome["trained"] == 2 * outcome["completion_tokens"]


@pytest.mark.parametrize(
    "case",
    [
        "continued",
        pytest.param("continued_by_step", marks=pytest.mark.long),
        pytest.param("continued_with_others", marks=pytest.mark.long),
    ],
)
def test_a_step_with_groups_that_are_left_out_goes_on_behind_every_update_as_if_never_stopped(seen, case):
    outcome = seen[case]
    assert 0 < outcome["with_signal"] < 4
    assert outcome["reports"][1:] == [
        f"in step 1 after {done} of {outcome['updates']} updates" for done in range(1, outcome["updates"])
    ]
    assert outcome["same"] is True
    assert outcome["losses"] is True


def test_a_step_draws_prompts_until_enough_groups_have_signal(seen):
    outcome = seen["refilled"]
    assert outcome["drawn"] == outcome["expected"] > 4
    assert outcome["metrics"]["rollout/refilled"] == outcome["drawn"] - 4
    assert outcome["metrics"]["rollout/groups_with_signal"] == pytest.approx(4 / outcome["drawn"])
    assert outcome["stopped"] == 0, "prompts of a step that was given up are drawn again"
    assert outcome["same"] is True


def test_a_step_whose_groups_never_have_signal_draws_no_more_than_it_may(seen):
    outcome = seen["refilled"]["vain"]
    assert outcome["drawn"] == 3 * 4
    assert outcome["rollout/groups_with_signal"] == 0
    assert "policy/loss" not in outcome


@pytest.mark.long
def test_steps_that_differ_move_a_policy_whose_completions_earn_the_same(seen):
    outcome = seen["continued_by_step"]
    assert 1 < outcome["steps"] <= 2
    assert outcome["within"] >= 4, "samples whose tokens have different advantages"
    assert seen["continued"]["within"] == 0
    assert seen["continued"]["steps"] == 0


def test_mini_batches_are_measured_against_the_policy_before_the_first_at_the_samples_temperature(seen):
    outcome = seen["two_mini_batches"]
    first, second = outcome["updates"]
    assert (first["ratio"], first["approx_kl_old"], first["kl"]) == pytest.approx((1, 0, 0), abs=1e-6)
    assert outcome["step"]["mismatch/max_abs"] < 1e-5
    assert abs(outcome["ratio"] - 1) > 1e-4
    assert second["ratio"] == pytest.approx(outcome["ratio"], rel=1e-5)
    assert second["kl"] > 1e-6
    assert min(outcome["tokens"]) > 0


def test_samples_show_what_each_update_has_computed(seen):
    outcome = seen["two_mini_batches"]
    for shown, computed in zip(outcome["shown"], outcome["computed"], strict=True):
        for mine, of_update in zip(shown, computed, strict=True):
            assert mine == pytest.approx(of_update, abs=1e-3)
            assert any(of_update)


def test_a_step_without_signal_is_compared_at_the_samples_temperature(seen):
    outcome = seen["two_mini_batches"]["without_signal"]
    assert outcome["rollout/groups_with_signal"] == 0
    assert outcome["mismatch/max_abs"] < 1e-5


def test_samples_know_how_many_updates_their_weights_have_seen(seen):
    assert seen["two_epochs"]["versions"] == [[0, 0], [0, 2]]


def test_a_step_that_was_begun_is_finished_although_fewer_are_wanted_now(seen):
    outcome = seen["begun"]
    assert outcome["where"] == "in step 2 after 1 of 2 updates"
    assert (outcome["steps"], outcome["updates"], outcome["left"]) == (2, [4, 4], False)


def test_samples_do_not_depend_on_how_many_are_drawn_at_once(seen):
    tokens, logprobs = seen["drawing_and_scoring"]["tokens"], seen["drawing_and_scoring"]["logprobs"]
    assert len({len(row) for row in tokens["512"]}) > 1, "sequences of several lengths leave the cache at several times"
    for concurrent in ("8", "1"):
        assert tokens[concurrent] == tokens["512"]
        assert logprobs[concurrent] == pytest.approx(logprobs["512"], abs=1e-5)
    assert seen["drawing_and_scoring"]["next_draw"] != tokens["512"], "every draw has noise of its own"


def test_rewards_come_from_the_users_function_in_the_order_of_the_samples(seen):
    outcome = seen["drawing_and_scoring"]
    assert outcome["order"] == outcome["expected_order"]
    assert outcome["same"] is True, "completions are what the engine generates in the same draw"
    assert outcome["own"] == outcome["expected_own"]
    assert len(set(outcome["own"])) > 1
    totals = [own + 0.5 * tagged for own, tagged in zip(outcome["own"], outcome["format"], strict=True)]
    assert outcome["totals"] == pytest.approx(totals)


def test_completions_become_longer_in_the_step_that_was_asked_for(seen):
    outcome = seen["longer"]
    assert outcome["lengths"] == [[12], [20]], "nothing stops these"
    assert outcome["evaluated"] == [12, 20]
    assert outcome["denominators"] == pytest.approx([4 * 12, 4 * 20]), "of the constant aggregation"


def test_evaluations_are_about_the_average_of_the_weights(seen):
    outcome = seen["averaged"]
    assert outcome["evaluated"] == outcome["of average"] != outcome["of policy"]
    assert outcome["off"] < 1e-6 < 1e-3 < outcome["apart"], "every update moves it by a tenth of the way"


def test_a_model_may_know_more_tokens_than_the_tokenizer(seen):
    outcome = seen["longer"]
    known = len(outcome["tokens"])
    assert any(token >= known for ids, _ in outcome["samples"] for token in ids)
    for ids, text in outcome["samples"]:
        assert text == "".join(outcome["tokens"][token] for token in ids if token < known)
    assert outcome["refused"].startswith(f"model.vocab_size=25: below the tokenizer's {known}")

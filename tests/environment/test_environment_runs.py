"""Runs in which an environment answers the policy: ids are only appended, nothing given is learned, and neither slices,
stops nor layouts change anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from ranks import results, run_ranks, words_of_long

from grpo_mega.data.tokenizer import CharTokenizer

HERE = Path(__file__).parent
JOB = HERE / "conversation_job.py"
LAYOUTS = [
    pytest.param((1, ["layout=single"]), id="alone"),
    pytest.param((2, ["layout=ep2"]), id="ep2", marks=pytest.mark.long),
    pytest.param((2, ["layout=tp2"]), id="tp2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    ranks, layout = request.param
    words = [str(tmp_path_factory.mktemp("environment")), *words_of_long(request), *layout]
    return results(run_ranks(JOB, ranks, words, timeout=600))


@pytest.mark.parametrize("name", ["whole", "sliced"])
def test_each_call_is_followed_by_its_reply(found: dict[str, Any], name: str) -> None:
    tokenizer, ended = CharTokenizer(), {"calls": 0, "length": 0}
    for sample in found[name]["samples"]:
        assert len(sample["given"]) == len(sample["calls"]) <= 3
        assert sample["given_logprobs"] == 0
        assert sample["reason"] in ("stop", "length")
        before = 0
        for number, ((first, end), (call, error, *_)) in enumerate(zip(sample["given"], sample["calls"], strict=True)):
            turn, reply = (tokenizer.decode(sample["ids"][a:b]) for a, b in ((before, first), (first, end)))
            assert turn.endswith("=")
            assert turn[:-1].rpartition("+")[2] == call
            assert reply.startswith(str(number + 1))
            assert reply.endswith("<think>")
            assert not error
            before = end
        assert sum(end - first for first, end in sample["given"]) + 24 >= len(sample["ids"])
        ended["calls"] += len(sample["calls"])
    assert ended["calls"] > 10
    assert max(found[name]["mismatch"]) < 1e-5
    assert sum(found[name]["calls"]) * 16 == pytest.approx(ended["calls"])


@pytest.mark.parametrize("name", ["whole", "sliced"])
def test_replies_count_as_given_and_not_as_generated(found: dict[str, Any], name: str) -> None:
    seen = found[name]
    for number, (tokens, share) in enumerate(zip(seen["tokens"], seen["given"], strict=True)):
        of_step = seen["samples"][16 * number : 16 * (number + 1)]
        length = sum(len(sample["ids"]) for sample in of_step)
        given = sum(end - first for sample in of_step for first, end in sample["given"])
        assert given
        assert tokens == length - given
        assert share == pytest.approx(given / length)
    assert seen["generated"] == sum(seen["tokens"])


def test_the_secret_of_a_problem_is_the_same_for_its_group(found: dict[str, Any]) -> None:
    secrets: dict[str, set[str]] = {}
    for sample in found["whole"]["samples"]:
        secrets.setdefault(sample["prompt"], set()).update(
            CharTokenizer().decode(sample["ids"][first:end])[1] for first, end in sample["given"]
        )
    assert all(len(of_group) <= 1 for of_group in secrets.values())
    assert len(set().union(*secrets.values())) > 1


@pytest.mark.parametrize("names", [("whole", "sliced"), ("pieces", "sliced_pieces")])
def test_slices_change_no_call_and_no_reply(found: dict[str, Any], names: tuple[str, str]) -> None:
    whole, sliced = (
        {(s["prompt"], s["index"]): (s["ids"], s["given"], s["restarts"], s["calls"]) for s in found[name]["samples"]}
        for name in names
    )
    common = whole.keys() & sliced.keys()
    assert len(common) >= 32
    assert all(whole[one] == sliced[one] for one in common)


def test_waiting_changes_nothing(found: dict[str, Any]) -> None:
    for name in ("samples", "reward", "calls", "errors"):
        assert found["async"][name] == found["whole"][name]


def test_an_agent_is_trained_as_an_environment_that_says_the_same(found: dict[str, Any]) -> None:
    """To the token and the reward, although it has its own loop, and writes its own prompt."""
    agent, environment = found["agent"], found["whole"]
    compared = ("prompt", "prompt_ids", "index", "ids", "given", "reason", "given_logprobs")
    assert [[one[key] for key in compared] for one in agent["samples"]] == [
        [one[key] for key in compared] for one in environment["samples"]
    ]
    for name in ("reward", "tokens", "given", "generated", "mismatch"):
        assert agent[name] == environment[name]


def test_an_agent_that_rewrites_its_history_is_trained_piece_by_piece(found: dict[str, Any]) -> None:
    """Each piece begins with what the agent requested, and the log-probs of its tokens are those of the trainer."""
    decode, known, seen, pieces = CharTokenizer().decode, CharTokenizer().token_ids(), found["pieces"], 0
    for sample in seen["samples"]:
        ends = dict(sample["given"])
        for number, (first, _) in enumerate(sample["given"]):
            if first not in sample["restarts"]:
                continue
            turn = max((end for end in ends.values() if end <= first), default=0)
            said, context = decode(sample["ids"][turn : first - 1]), decode(sample["ids"][first : ends[first]])
            # Messages have no letters in this vocabulary, and so no tags.
            assert context == f"<bos>{number}:{''.join(one for one in said[-3:] if one in known)}?"
        pieces += len(sample["restarts"])
    assert pieces > 10
    assert sum(seen["restarts"]) * 16 == pytest.approx(pieces)
    assert 0 < max(seen["mismatch"]) < 1e-5


def sampled(folder: Path, ranks: int, layout: str) -> dict[str, list[dict[str, Any]]]:
    """Samples of a layout, whole and in slices, in an order that does not depend on who has finished first."""
    found = results(run_ranks(JOB, ranks, [str(folder / layout), "samples", f"layout={layout}"], timeout=600))
    compared = ("prompt", "index", "prompt_ids", "ids", "given", "restarts", "calls", "reason")
    samples = {name: [{key: one[key] for key in compared} for one in found[name]["samples"]] for name in found}
    return {name: sorted(each, key=lambda one: (one["prompt"], one["index"])) for name, each in samples.items()}


@pytest.mark.long
def test_samples_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Not on how many ranks ask the environment, nor on which computes what."""
    alone = sampled(tmp_path / "alone", 1, "single")
    assert {len(samples) for samples in alone.values()} == {48}
    assert sum(len(sample["restarts"]) for sample in alone["sliced_pieces"]) > 10
    assert sum(len(sample["calls"]) for sample in alone["whole"]) > 10
    for ranks, layout in ((2, "single"), (2, "ep2"), (4, "tp2_pp2")):
        assert sampled(tmp_path / str(ranks), ranks, layout) == alone, layout


def test_what_is_said_before_the_first_turn_is_part_of_the_prompt(found: dict[str, Any]) -> None:
    """The same for a group, of the same episode as its replies, and no part of the problem that `reset` gets."""
    openings, replies = set(), 0
    for sample in found["opened"]["samples"]:
        text, (asked, opening) = CharTokenizer().decode(sample["prompt_ids"]), sample["asked"]
        assert text == f"<bos>{asked}{opening}"
        openings.add((sample["prompt"], opening))
        for number, (first, end) in enumerate(sample["given"]):
            reply = CharTokenizer().decode(sample["ids"][first:end])
            assert reply.startswith(f"{number + 1}{opening}")
            assert reply.endswith(f"{len(asked)}<think>")
            replies += 1
    assert replies > 10
    assert len({opening for _, opening in openings}) > 2
    assert len(openings) == len({prompt for prompt, _ in openings})
    assert max(found["opened"]["mismatch"]) < 1e-5


def test_evaluations_open_each_problem_once_even_if_an_engine_is_lost(found: dict[str, Any]) -> None:
    assert len(found["evaluated"]) == 4
    assert all(opening in "0123456789" for opening in found["evaluated"])
    assert "" not in found["evaluated"]


@pytest.mark.long
def test_groups_without_signal_are_refilled_with_opened_problems(found: dict[str, Any]) -> None:
    seen = found["drawn"]["refill"]
    refilled = sum(metrics["rollout/refilled"] for metrics in seen["metrics"])
    assert refilled > 4
    assert len(seen["groups"]) == 24 + refilled
    assert sum(len({*rewards}) > 1 for _, _, rewards in seen["groups"]) == 24
    for _, opening, rewards in seen["groups"]:
        assert {round(10 * reward) % 10 for reward in rewards} == {int(opening)}, "of the secret that it was told"


@pytest.mark.long
def test_a_curriculum_goes_by_the_rewards_of_the_environment(found: dict[str, Any]) -> None:
    """Problems beyond the frontier come again in one of four epochs only."""
    groups = [(*problem.split("#"), rewards) for problem, _, rewards in found["drawn"]["frontier"]["groups"]]
    rates = {problem: sum(rewards) / len(rewards) for problem, epoch, rewards in groups if epoch == "0"}
    again = {problem for problem, epoch, _ in groups if epoch == "1"}
    frontier = {problem for problem, rate in rates.items() if 0.1 <= rate <= 1.0}
    assert len(rates) == 16
    assert 2 < len(frontier) < 14
    assert frontier <= again
    assert len(again - frontier) <= 4


def test_rewards_of_turns_become_the_advantages_of_one_process(found: dict[str, Any]) -> None:
    seen = found["credited"]
    assert seen["off"] < 1e-6
    assert seen["largest"] > 0.1
    assert len(seen["computed"]) == len(seen["signal"]) > 4, "each sample whose group has signal"
    assert max(len(steps) for steps in seen["steps"]) > 1
    for steps, reward in zip(seen["steps"], seen["rewards"], strict=True):
        assert not steps or sum(value for _, value in steps) == pytest.approx(reward)
        assert [end for end, _ in steps] == sorted({end for end, _ in steps})


@pytest.mark.parametrize(
    "name", ["slices", *(pytest.param(name, marks=pytest.mark.long) for name in ("peace", "ahead"))]
)
def test_a_stop_changes_nothing(found: dict[str, Any], name: str) -> None:
    assert found["stopped"][name] == {"metrics": True, "digest": True}


def test_episodes_that_cannot_be_rebuilt_start_over_after_a_stop(found: dict[str, Any]) -> None:
    seen = found["begun_anew"]
    assert max(seen["before"]) > 0, "some had made calls"
    assert seen["after"] == [calls for calls in seen["before"] if not calls]
    assert not seen["journal"]
    lost = sum(calls > 0 for calls in seen["before"])
    warned = re.findall("environment.replayable=false: (.*)", "\n".join(seen["logs"]))
    assert warned == [f"{lost} unfinished samples start over"], "on the main rank"
    assert any(sample["calls"] for sample in seen["samples"])
    for sample in seen["samples"]:
        replies = [CharTokenizer().decode(sample["ids"][first:end]) for first, end in sample["given"]]
        assert [int(reply[0]) for reply in replies] == [*range(1, len(replies) + 1)], "its own object counts its calls"
        assert sample["reason"] in ("stop", "length")


def test_a_run_refuses_problems_without_the_fields_of_reset(found: dict[str, Any]) -> None:
    assert "reset needs 'level', which the problem " in found["refused"]


def test_a_run_warns_of_dropped_thoughts_once(found: dict[str, Any]) -> None:
    """On the main rank."""
    warned = [log.count("the chat template drops the thoughts before a call") for log in found["logs"]["ending"]]
    assert warned == [1] + [0] * (len(warned) - 1)
    assert not any("drops the thoughts" in log for log in found["logs"]["whole"])


def test_a_call_that_ends_its_sample_counts(found: dict[str, Any]) -> None:
    samples = found["ending"]["samples"]
    ended = [sample for sample in samples if sample["calls"]]
    assert len(ended) > 5
    assert all((len(s["calls"]), s["given"], s["reason"]) == (1, [], "stop") for s in ended)
    assert sum(found["ending"]["calls"]) * 16 == pytest.approx(len(ended))


def test_what_one_rank_cannot_use_is_refused_on_all() -> None:
    for output in run_ranks(HERE / "refused_job.py", 2, [], timeout=120):
        assert "the licence server does not answer" in output


def test_calls_of_several_ranks_are_spread_over_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "4").mkdir()
    monkeypatch.setenv("TOGETHER", str(tmp_path / "4"))
    outputs = run_ranks(HERE / "together_job.py", 2, [str(limit(60.0))], timeout=120)
    seen = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    assert seen == [[[0, "turn"], [2, "turn"], [4, "turn"]], [[1, "turn"], [3, "turn"]]]

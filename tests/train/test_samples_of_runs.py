"""What a run writes into samples/: whole groups with the numbers of each token, the same under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import logits_of_transformers
from ranks import results, run_ranks
from train_jobs import differing, numbers, rewarded_by, samples

from grpo_mega.data.tokenizer import CharTokenizer

pytestmark = pytest.mark.long

JOB = Path(__file__).with_name("stops_job.py")
COMMON = [rewarded_by("varied"), "run.steps=2", "run.eval_every=2", "run.tensorboard=false", "run.save_every=0"]
LEARNED = [*COMMON, "algorithm.kl_coef=0.05", "algorithm.mini_batches=2", "run.sample_groups_per_step=2"]
"""Two updates a step of a policy with a reference; without `epochs` each token is in one of them."""
ALONE = {
    "one": [*LEARNED, "algorithm.epochs=2"],
    "checked": [*LEARNED, "run.export_every=1", "algorithm.reference_refresh=1", "rollout.temperature=0.8"],
    "on_policy": [*COMMON],
    "none": [*COMMON, "run.sample_groups_per_step=0", "run.followed_problems=0"],
    "no_signal": [*COMMON, "reward.terms=[{name:accuracy},{name:format,weight:0.2}]", "algorithm.group_size=2"],
    "ppo": [*COMMON, "algorithm=ppo", "critic.alone_steps=1"],
}
TEXTS = ("prompt_id", "prompt", "answer", "completion", "finish_reason")
NUMBERS = ("engine_logprobs", "old_logprobs", "new_logprobs", "ref_logprobs", "entropies")


def records(path: Path, kind: str, step: int) -> list[dict[str, Any]]:
    lines = (path / "samples" / f"{kind}-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trained(folder: Path, ranks: int, runs: dict[str, list[str]]) -> None:
    tasks = [["run", [*words, f"run.name={name}"], ["end"]] for name, words in runs.items()]
    assert results(run_ranks(JOB, ranks, [str(folder), json.dumps(tasks)])) == [["completed"]] * len(runs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    trained(folder, 1, {name: ["layout=single", *words] for name, words in ALONE.items()})
    return folder


def test_a_file_has_whole_groups_with_every_field(folder: Path) -> None:
    for step in (1, 2):
        found = records(folder / "one", "step", step)
        assert [(record["group"], record["sample"]) for record in found] == [(g, s) for g in (0, 1) for s in range(4)]
        assert len({record["prompt_id"] for record in found}) == 2
        for record in found:
            assert {*record} == {
                *TEXTS, *NUMBERS, "group", "sample", "reward", "accuracy", "format", "own", "terms", "tokens",
                "policy_version", "advantage", "token_texts", "reason",
            }  # fmt: skip
            assert record["terms"] == {name: record[name] for name in ("accuracy", "format", "own")}
            assert {len(record[name]) for name in (*NUMBERS, "token_texts")} == {record["tokens"]}
            stop = "<eos>" if record["finish_reason"] == "stop" else ""
            assert "".join(record["token_texts"]) == record["completion"] + stop
            assert record["engine_logprobs"] == pytest.approx(record["old_logprobs"], abs=1e-5)
            assert record["new_logprobs"] != pytest.approx(record["old_logprobs"], abs=1e-3), "it moved"
        for group in (0, 1):
            members = [record for record in found if record["group"] == group]
            rewards = torch.tensor([record["reward"] for record in members], dtype=torch.float64)
            expected = ((rewards - rewards.mean()) / rewards.std()).tolist()
            assert [record["advantage"] for record in members] == pytest.approx(expected, abs=1e-5)


def test_log_probs_are_those_that_transformers_computes(folder: Path) -> None:
    """Of the policy that step 2 began with; in the first of two mini-batches the newest policy is still that one."""
    tokenizer, unmoved = CharTokenizer(), []
    for record in records(folder / "checked", "step", 2):
        prompt = tokenizer.encode(record["prompt"])
        completion = [tokenizer.token_id(text) for text in record["token_texts"]]
        tokens = torch.tensor([*prompt, *completion])
        logits = logits_of_transformers(folder / "checked" / "export" / "step-000001", tokens)[0].double() / 0.8
        of_all = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        logprobs = of_all.gather(1, torch.tensor(completion)[:, None])[:, 0]
        entropies = -(of_all.exp() * of_all).sum(-1)
        for name in ("engine_logprobs", "old_logprobs", "ref_logprobs"):
            assert record[name] == pytest.approx(logprobs.tolist(), abs=1e-5), name
        unmoved.append(record["new_logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-5))
        assert (record["entropies"] == pytest.approx(entropies.tolist(), abs=1e-5)) == unmoved[-1]
    assert {*unmoved} == {True, False}


def test_a_single_update_finds_the_policy_that_sampled(folder: Path) -> None:
    for record in records(folder / "on_policy", "step", 2):
        assert record["new_logprobs"] == record["old_logprobs"]
        assert record["old_logprobs"] == pytest.approx(record["engine_logprobs"], abs=1e-5)
        assert "ref_logprobs" not in record


def test_nothing_is_written_where_nothing_is_asked_for(folder: Path) -> None:
    assert [*(folder / "none" / "samples").iterdir()] == []


def test_what_no_update_computed_has_no_advantage(folder: Path) -> None:
    """The rewards of a step with random weights are all 0; its mismatch is measured all the same."""
    for record in records(folder / "no_signal", "step", 1):
        assert record["advantage"] is None
        assert record["old_logprobs"] == pytest.approx(record["engine_logprobs"], abs=1e-5)
        assert not {"new_logprobs", "advantages", "entropies"} & {*record}


def test_with_a_critic_every_token_has_an_advantage(folder: Path) -> None:
    """In step 1 the critic learns alone, and there is no newest policy."""
    for step in (1, 2):
        for record in records(folder / "ppo", "step", step):
            assert len(record["advantages"]) == record["tokens"]
            assert "advantage" not in record
            assert ("new_logprobs" in record) == ("entropies" in record) == (step == 2)


def test_problems_are_followed(folder: Path) -> None:
    found = records(folder / "one", "followed", 2)
    assert [(record["group"], record["sample"]) for record in found] == [(0, 0), (1, 0)]
    for record in found:
        assert record["prompt_id"].startswith("chain_sum/validation/")
        assert record["policy_version"] == 8
        assert record["advantage"] is None
        assert len(record["engine_logprobs"]) == len(record["token_texts"]) == record["tokens"]
    assert not (folder / "one" / "samples" / "followed-000001.jsonl").exists()


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, {"cp2": ["layout=single", "layout.cp=2"], "ep2": ["layout=ep2"]}),
        (4, {"tp2_pp2": ["layout=tp2_pp2"], "dp2_pp2": ["layout=pp2"]}),
    ],
    ids=["two ranks", "four ranks"],
)
def test_layout_changes_nothing(folder: Path, ranks: int, layouts: dict[str, list[str]]) -> None:
    trained(folder, ranks, {name: [*words, *ALONE["one"]] for name, words in layouts.items()})
    expected = samples(folder / "one")
    first = {name: value for name, value in expected.items() if name.startswith("step-000001")}
    assert len(first) > 500
    alone = numbers(folder / "one")  # of metrics.jsonl: every metric of every step, but times
    assert min(map(len, alone)) > 30
    for name in layouts:
        found = samples(folder / name)
        for moved in (False, True):
            # After an update, which divides by the gradient's own size: on one CPU of four 1e-5 apart.
            of_kind = {key: first[key] for key in first if ("new_logprobs" in key) == moved}
            these = {key: found[key] for key in found if key in of_kind}
            assert differing(these, of_kind, by=5e-5 if moved else 1e-5) == {}, name
        assert differing(found, expected, by=1e-4) == {}, name
        assert numbers(folder / name) == [pytest.approx(line, rel=1e-4, abs=1e-5) for line in alone], name

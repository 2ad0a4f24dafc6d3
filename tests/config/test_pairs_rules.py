"""Settings of a reward model's run: what is asked for, and what is refused."""

from __future__ import annotations

import pytest
from composed import composed

from grpo_mega.config.inputs import inputs
from grpo_mega.errors import ConfigError

RUN = ["run.trains=reward_model", "run.name=x", "model=tiny_moe", "data.tokenizer=chars", "pairs.path=pairs.jsonl"]


def test_nothing_of_reinforcement_learning_is_asked_for() -> None:
    config = composed(*RUN)
    assert (config.run.steps, config.optimizer.lr, config.pairs.path) == (0, 1e-5, "pairs.jsonl")
    assert composed(*RUN, "data=jsonl", "data.tokenizer=chars").data.train_path is None


def test_a_list_of_files_is_accepted_and_all_are_inputs() -> None:
    config = composed(*RUN, "pairs.path=[a.jsonl,b.jsonl]", "pairs.replay_path=c.jsonl", "pairs.test_path=t.jsonl")
    found = {name: path for name, path in inputs(config).items() if name.startswith(("pairs", "data.train"))}
    assert found == {
        "pairs.test_path": "t.jsonl",
        "pairs.path[0]": "a.jsonl",
        "pairs.path[1]": "b.jsonl",
        "pairs.replay_path": "c.jsonl",
    }


@pytest.mark.parametrize(
    ("words", "where", "fact"),
    [
        (["pairs.path=null"], "pairs.path", "run.trains=reward_model learns from it"),
        (["pairs.path=[]"], "pairs.path", "not set"),
        (["pairs.path=3"], "pairs.path=3", "a list of files"),
        (["pairs.path=[3]"], "pairs.path=[3]", "a list of files"),
        (["pairs.test_path=t.jsonl", "pairs.test_size=4"], "pairs.test_path=t.jsonl", "pairs.test_size=4"),
        (["pairs.replay_share=0.2"], "pairs.replay_share=0.2", "give pairs.replay_path"),
        (["pairs.replay_path=b.jsonl", "pairs.replay_share=1"], "pairs.replay_share=1.0", "(0, 1)"),
        (["pairs.max_tokens=100000"], "pairs.max_tokens=100000", "model.context="),
        (["base=worked_arithmetic"], "base.train=true", "base=none"),
        (["sft=cold_start"], "sft.steps=50", "sft.steps=0"),
        (["distill.teacher=runs/x"], "distill.teacher=runs/x", "run.trains=reward_model"),
        (["lora.rank=4"], "lora.rank=4", "run.trains=reward_model"),
        (["run.export_every=5"], "run.export_every=5", "run.trains=reward_model"),
        (["rollout.slice_tokens=5"], "rollout.slice_tokens=5", "run.trains=reward_model"),
        (["rollout.ahead=true"], "rollout.ahead=true", "run.trains=reward_model"),
        (["optimizer.frozen=[head]"], 'optimizer.frozen=["head"]', "run.trains=reward_model"),
        (["run.trains=critic", "run.steps=1", "optimizer.lr=1"], "run.trains=critic", "policy, reward_model"),
        (["pairs.separators=[x]"], 'pairs.separators=["x"]', "set run.trains=process_reward_model"),
        (["run.trains=process_reward_model", "pairs.separators=[]"], "pairs.separators=[]", "at least one text"),
        (["run.trains=process_reward_model", "pairs.separators=[a,'']"], "pairs.separators=['a', '']", "none of them"),
        (["run.trains=process_reward_model", "pairs.path=null"], "pairs.path", "run.trains=process_reward_model"),
        (["data.template=chat"], "data.template='chat'", "data.tokenizer=chars"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(words: list[str], where: str, fact: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(*RUN, *words)
    assert [problem.where for problem in refused.value.problems if fact in str(problem)] == [where]


def test_pairs_have_no_effect_on_a_policy_s_run() -> None:
    with pytest.raises(ConfigError, match=r"run\.trains=policy") as refused:
        composed("experiment=tiny", "pairs.path=p.jsonl")
    assert refused.value.field == "pairs.path"


def test_a_policy_s_run_is_still_asked_for_its_steps() -> None:
    with pytest.raises(ConfigError) as refused:
        composed("run.name=x", "model=tiny_moe", "optimizer.lr=1")
    assert ("run.steps", "not set") in {(problem.where, problem.what) for problem in refused.value.problems}

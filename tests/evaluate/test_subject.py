"""The configuration that a run's model is evaluated with: the embedded engine, without settings of SGLang's."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from refusals import refused

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import AlgorithmConfig, Config, EvalConfig, SGLangConfig
from grpo_mega.convert.source import Source, configuration
from grpo_mega.data import Data
from grpo_mega.data.prompt_order import PromptSource, in_epoch
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import ConfigError
from grpo_mega.evaluate.subject import of_run, training_problems
from grpo_mega.types import Prompt

FLAGSHIPS = ("qwen3_30b_a3b", "r1zero_671b")


@pytest.fixture(scope="module", params=FLAGSHIPS)
def trained(request: pytest.FixtureRequest) -> Config:
    """The configuration of a run with SGLang, as it is read from a checkpoint."""
    return stored(request.param)


def stored(experiment: str, *words: str) -> Config:
    """What one process reads from a checkpoint that holds the configuration of an experiment."""
    config = compose_config([f"experiment={experiment}", "run.init_from=null", "data.tokenizer=models/any", *words])
    return configuration(Source(Path("a_checkpoint"), None, {"config": asdict(config)}), [], 1)


def test_a_run_with_sglang_is_sampled_by_the_embedded_engine(trained: Config) -> None:
    assert trained.rollout.engine == "sglang"
    assert trained.rollout.sglang != SGLangConfig()
    rollout = of_run(trained, None, []).rollout
    assert (rollout.engine, rollout.sglang) == ("embedded", SGLangConfig())
    assert (rollout.max_new_tokens, rollout.stop) == (trained.rollout.max_new_tokens, trained.rollout.stop)


def test_the_embedded_engine_is_made_to_hold_the_samples_of_a_prompt() -> None:
    large = stored("qwen3_30b_a3b", "algorithm.group_size=1024")
    assert of_run(large, None, []).rollout.concurrent_sequences == 1024
    assert of_run(large, None, ["rollout.concurrent_sequences=2048"]).rollout.concurrent_sequences == 2048
    few = replace(large.rollout, concurrent_sequences=8)
    many = replace(large, rollout=few, eval=EvalConfig(samples=200), algorithm=AlgorithmConfig(group_size=16))
    assert of_run(many, None, []).rollout.concurrent_sequences == 200


def test_the_words_of_the_user_win(trained: Config) -> None:
    rollout = of_run(trained, None, ["rollout.engine=sglang", "rollout.sglang.bucket_bytes=1048576"]).rollout
    own = replace(trained.rollout.sglang, bucket_bytes=1048576)
    assert (rollout.engine, rollout.sglang) == ("sglang", own)
    rollout = of_run(trained, None, ["rollout.engine=embedded", "rollout.concurrent_sequences=32"]).rollout
    assert (rollout.engine, rollout.concurrent_sequences) == ("embedded", 32)
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.tp=4: no effect with rollout\.engine=embedded"):
        of_run(trained, None, ["rollout.sglang.tp=4"])


def test_training_problems_are_asked_once() -> None:
    """Stored problems come again in the next epoch, and would count as if they were others."""
    stored = [Prompt(f"{i}", (1,), "", "", "") for i in range(3)]
    train = PromptSource(lambda k: in_epoch(stored[k % 3], k // 3), "three")
    asked = training_problems(Data(CharTokenizer(), train, [], [], stored), 3)
    assert [prompt.id for prompt in asked] == ["0#0", "1#0", "2#0"]
    with refused("--train 4 | choose 3 or fewer"):
        training_problems(Data(CharTokenizer(), PromptSource(train.prompt_at, "three"), [], [], stored), 4)

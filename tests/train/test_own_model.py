"""A Hugging Face folder and JSON Lines are enough; mistakes cost no name, and a run continues as it began."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from made_tokenizer import write_tokenizer
from metric_lines import of_steps
from safetensors.torch import save_file
from train_jobs import Job
from transformers import AutoTokenizer

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.config.schema import MLAConfig, ModelConfig, MoEConfig  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

LLAMA = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=64, context=2048, rope_base=500000)
DEEPSEEK = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=4, ffn_hidden=64, context=2048, attention="mla", qk_norm=True,
    mla=MLAConfig(24, 20, 12, 8, 10),
    moe=MoEConfig(experts=4, top_k=2, ffn_hidden=16, shared_ffn_hidden=16, first_dense=1),
)  # fmt: skip
REWARD = "reward.terms=[{name:boxed},{name:own,function:train_rewards:varied}]"
"""A second term, for random weights never answer."""
SHORT = ["data.validation_size=4", "algorithm.prompts_per_step=4", "algorithm.group_size=2", REWARD]


@dataclass(frozen=True)
class Own:
    """A model with a tokenizer of its own, and problems."""

    root: Path
    folder: Path
    settings: list[str]

    def ended(self, *more: str, code: int = 0) -> str:
        """What a run with these settings prints."""
        ended = Job(self.root, [*self.settings, *more]).finish()
        assert ended.code == code, ended.stderr
        return ended.stderr


def written(root: Path, model: ModelConfig) -> Own:
    folder = write_tokenizer(root / "model", with_bos=True)
    size = len(AutoTokenizer.from_pretrained(folder))
    # Half of the tokens end a completion, so that none is long.
    ends = {"eos_token_id": [*range(0, size, 2)]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    (folder / "config.json").write_text(json.dumps(hf_config(model, size)))
    generator = torch.Generator().manual_seed(1)
    tensors = {e.name: 0.2 * torch.randn(e.shape, generator=generator) for e in entries(model, size)}
    save_file(tensors, folder / "model.safetensors")
    for name, first, count in (("train", 0, 300), ("test", 900, 4)):
        problems = [{"prompt": f"What is {i} + 5?", "answer": i + 5} for i in range(first, first + count)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    files = [f"data.{name}_path={root}/{name}.jsonl" for name in ("train", "test")]
    return Own(root, folder, ["experiment=own_model", f"run.init_from={folder}", *files])


def test_three_settings_lead_from_a_folder_and_problems_to_an_update(tmp_path: Path) -> None:
    """Those of README.md; only the reward has a second term, and the steps are one."""
    own = written(tmp_path, LLAMA)
    assert len(own.settings) == 1 + 3
    own.ended(REWARD, "run.steps=1")
    path = tmp_path / "runs" / "own_model"
    (first,) = of_steps(path)
    assert first["policy/grad_norm"] > 0
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert config["model"] | {"hidden": 32, "context": 2048, "rope_base": 500000} == config["model"]
    assert config["data"]["tokenizer"] == str(own.folder)
    (samples,) = (path / "samples").iterdir()
    prompts = [json.loads(line)["prompt"] for line in samples.read_text().splitlines()]
    assert all(prompt.startswith("<|im_start|>user\nWhat is ") for prompt in prompts)
    assert all("put your final answer within \\boxed{}.<|im_end|>" in prompt for prompt in prompts)


@pytest.mark.long
def test_a_mistake_takes_no_name_and_what_comes_later_continues_as_it_began(tmp_path: Path) -> None:
    own = written(tmp_path, LLAMA)
    path = tmp_path / "runs" / "own_model"
    wrong = own.ended(*SHORT, "run.steps=1", "model.ffn_hidden=80", code=2)
    assert "intermediate_size is 64, not 80" in wrong
    assert not path.exists()
    weights = (own.folder / "model.safetensors").read_bytes()
    (own.folder / "model.safetensors").write_bytes(weights[:-4])  # which is only seen when it is read
    assert "model.safetensors" in own.ended(*SHORT, "run.steps=1", "model.context=1500", code=2)
    (own.folder / "model.safetensors").write_bytes(weights)
    own.ended(*SHORT, "run.steps=1", "model.context=1600")
    assert yaml.safe_load((path / "config.yaml").read_text())["model"]["context"] == 1600
    (own.folder / "config.json").write_text("{}")
    assert "after step 1" in own.ended(*SHORT, "run.steps=2")
    assert [line["step"] for line in of_steps(path)] == [1, 2]
    assert yaml.safe_load((path / "config.yaml").read_text())["model"]["context"] == 1600


@pytest.mark.long
@pytest.mark.parametrize("named", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_a_prediction_module_that_is_named_and_not_there_is_no_contradiction(tmp_path: Path, named: str) -> None:
    """As transformers writes DeepSeek-V3."""
    own = written(tmp_path, DEEPSEEK)
    said = json.loads((own.folder / "config.json").read_text())
    said.pop("num_nextn_predict_layers")
    (own.folder / "config.json").write_text(json.dumps(said | {named: 1}))
    missing = own.ended(*SHORT, "run.steps=1", "model.mtp_layers=1", code=2)
    assert "model.mtp_layers=1, and the files do not hold that many prediction modules (config.json" in missing
    assert "names 1, the files hold 0); set model.mtp_layers=0" in missing
    assert not (tmp_path / "runs").exists()
    own.ended(*SHORT, "run.steps=1")
    assert of_steps(tmp_path / "runs" / "own_model")

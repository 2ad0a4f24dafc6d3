"""A copy of the program with a small model and problems, for commands that write into it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from forks import run_python
from made_tokenizer import write_tokenizer
from ranks import REPOSITORY
from safetensors.torch import save_file
from transformers import AutoTokenizer

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.config.schema import ModelConfig  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

LLAMA = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=64, context=512, rope_base=500000)


class Clone:
    """A copy of the program, into which experiments are written, with a model and problems beside it."""

    def __init__(self, root: Path) -> None:
        self.root, self.model, self.data = root, root / "model", root / "problems.jsonl"
        for room in ("grpo_mega", "configs", "tools", "slurm"):
            shutil.copytree(REPOSITORY / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
        write_tokenizer(self.model, with_bos=True)
        size = len(AutoTokenizer.from_pretrained(self.model))
        # Half of the tokens end a completion, so that none is long.
        (self.model / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, size, 2)]}))
        (self.model / "config.json").write_text(json.dumps(hf_config(LLAMA, size)))
        generator = torch.Generator().manual_seed(1)
        tensors = {e.name: 0.2 * torch.randn(e.shape, generator=generator) for e in entries(LLAMA, size)}
        save_file(tensors, self.model / "model.safetensors")
        lines = [json.dumps({"prompt": f"What is {i} + 5?", "answer": i + 5}) + "\n" for i in range(40)]
        self.data.write_text("".join(lines))
        (root / "my_rewards.py").write_text("def score(sample):\n    return len(set(sample.token_ids)) % 3 / 2\n")

    def runs(self, *words: str, code: int = 0) -> str:
        """What `python -m` or a tool prints."""
        done = run_python(*words, folder=self.root, paths=(self.root, REPOSITORY / "kernels"))
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def new(self, name: str, *words: str, code: int = 0) -> str:
        """What the command under test prints for this model and these problems."""
        return self.runs(
            "-m", "grpo_mega.new", name, "--model", str(self.model), "--data", str(self.data), *words, code=code
        )

    def experiment(self, name: str) -> Path:
        """Its file."""
        return self.root / "configs" / "experiment" / f"{name}.yaml"

"""Measures one GRPO step of TRL, Hugging Face's trainer, on the shape of `bench_step.py`, for comparison.

    pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0
    OMP_NUM_THREADS=1 python tools/bench_trl.py
    OMP_NUM_THREADS=1 python tools/bench_trl.py --moe --micro-batch 64 --attention eager

Use a separate virtual environment; nothing of this project is imported. Model (Qwen3 or Qwen3-MoE, random weights),
tokenizer and prompts are generated, nothing is downloaded. A step is 16 prompts x 8 samples x 64 new tokens, a checksum
as the reward, a reference model, and one AdamW update, in float32 on the CPU in one process; Transformers generates,
with a key-value cache. The end token lies outside the model's vocabulary, so no completion stops early. TRL is not
changed: phases are timed around its own methods, and a step's time that is in none of them counts as update. The two
commands above have the settings that needed the fewest CPU seconds on one core among those the options offer. For the
model of `bench_step.py` to have Qwen3's normed queries and keys, give it `model.qk_norm=true`.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

VOCABULARY = 128
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 16, 64
SHAPE = dict(
    num_hidden_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=512,
    vocab_size=VOCABULARY,
    max_position_embeddings=PROMPT_TOKENS + NEW_TOKENS,
    tie_word_embeddings=False,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True)
PHASES = ["generate", "reward", "logprobs", "update"]


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, with the wall and CPU seconds of every step by phase."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, tuple[float, float]]] = []
        self.spent: dict[str, tuple[float, float]] = {}
        self.began = now()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measures the body as part of `phase`."""
        began = now()
        yield
        self.spent[phase] = plus(self.spent.get(phase, (0.0, 0.0)), since(began))

    def end_step(self) -> None:
        """Ends a step, which includes everything since the previous one, also data loading."""
        step = since(self.began)
        rest = plus(step, *((-wall, -cpu) for wall, cpu in self.spent.values()))
        self.steps.append({**self.spent, "update": rest, "step": step})
        self.spent, self.began = {}, now()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("generate"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        # The policy's pass is part of the update; only the reference's is the phase that `bench_step.py` calls
        # log-probs.
        if model is not self.ref_model:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with self.timed("logprobs"):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


class StepEnds(transformers.TrainerCallback):
    """Callback that tells the trainer that a step is over."""

    trainer: TimedTrainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Called by Transformers after every optimizer update."""
        self.trainer.end_step()


def main() -> None:
    """Runs the benchmark and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe", action="store_true", help="8 experts, top 2, instead of a dense feed-forward layer")
    parser.add_argument("--steps", type=int, default=5, help="measured steps; the median is shown")
    parser.add_argument("--warmup", type=int, default=2, help="steps before")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences in one forward and backward pass")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"], help="Transformers' attention")
    parser.add_argument(
        "--experts", default="grouped_mm", choices=["grouped_mm", "eager"], help="Transformers' experts"
    )
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder)
        trainer.train()
    print(table(options, trainer))


def make_trainer(options: argparse.Namespace, folder: str) -> TimedTrainer:
    """The trainer, on a model with random weights that is first written to `folder`."""
    # TRL loads policy and reference from a path.
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))
        if options.moe
        else Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    )
    model.save_pretrained(folder)
    args = GRPOConfig(
        output_dir=folder,
        model_init_kwargs={
            "dtype": "float32",
            "attn_implementation": options.attention,
            **({"experts_implementation": options.experts} if options.moe else {}),
        },
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=options.warmup + options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=PROMPTS * SAMPLES // options.micro_batch,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        beta=0.04,
        router_aux_loss_coef=0.0 if options.moe else None,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    ends = StepEnds()
    trainer = TimedTrainer(
        model=folder,
        reward_funcs=checksum,
        args=args,
        train_dataset=random_prompts(args.max_steps * PROMPTS),
        processing_class=number_tokenizer(),
        callbacks=[ends],
    )
    ends.trainer = trainer
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def number_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer in which token k is the number k; the end token is outside the model's vocabulary and never sampled."""
    vocabulary = {str(k): k for k in range(VOCABULARY)} | {"<eos>": VOCABULARY}
    words = Tokenizer(WordLevel(vocabulary))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", padding_side="left")


def random_prompts(count: int) -> Dataset:
    """Prompts of random tokens."""
    tokens = [random.Random(k).choices(range(VOCABULARY), k=PROMPT_TOKENS) for k in range(count)]
    return Dataset.from_dict({"prompt": [" ".join(map(str, prompt)) for prompt in tokens]})


def checksum(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within nearly every group and costs nothing; also checks the completions' length."""
    lengths = {len(ids) for ids in completion_ids}
    if len(completion_ids) != PROMPTS * SAMPLES or lengths != {NEW_TOKENS}:
        raise ValueError(
            f"expected {PROMPTS * SAMPLES} completions of {NEW_TOKENS} tokens, got {len(completion_ids)}, {lengths}"
        )
    return [float(sum(ids) % 7) for ids in completion_ids]


def now() -> tuple[float, float]:
    """Wall and CPU clock; the latter counts all threads of the process."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Wall and CPU seconds passed."""
    wall, cpu = now()
    return wall - began[0], cpu - began[1]


def plus(*times: tuple[float, float]) -> tuple[float, float]:
    """Sum of wall and CPU seconds."""
    return sum(wall for wall, _ in times), sum(cpu for _, cpu in times)


def table(options: argparse.Namespace, trainer: TimedTrainer) -> str:
    """The median step as a table."""
    steps = trainer.steps[options.warmup :]

    def median(of: int, phase: str) -> float:
        return statistics.median(step[phase][of] for step in steps)

    trained = PROMPTS * SAMPLES * NEW_TOKENS
    wall, cpu = median(0, "step"), median(1, "step")
    lines = [
        f"trl {trl.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        f"{SHAPE['num_hidden_layers']} layers, hidden {SHAPE['hidden_size']}, "
        + ("8 experts top 2" if options.moe else f"ffn {SHAPE['intermediate_size']}")
        + f", {PROMPTS} prompts x {SAMPLES} samples x "
        f"{NEW_TOKENS} tokens, {options.micro_batch} sequences per micro-batch",
        f"{'phase':>12} {'wall s':>9} {'CPU s':>9} {'share':>7}",
    ]
    lines += [f"{p:>12} {median(0, p):9.3f} {median(1, p):9.3f} {median(1, p) / cpu:7.1%}" for p in PHASES]
    lines += [
        f"{'step':>12} {wall:9.3f} {cpu:9.3f}",
        f"{1000 * cpu / trained:.3f} CPU seconds per 1,000 trained tokens; {trained / wall:,.0f} trained tokens per "
        f"second; peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

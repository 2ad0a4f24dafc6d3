"""A step of TRL's trainer on the class `Bisect` of bisect_game.py; prints what it logs.

Its model is an automaton that always calls `guess` with 16 and then ends its turn. Usage: trl_job.py FOLDER
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import trl
from bisect_game import Bisect
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<|endoftext|>", "<|im_end|>"
TURN = ["<tool_call>", '\n{"name": "guess", "arguments": {"number": 16}}\n', "</tool_call>", END]
"""A token each. The first follows the line break with which the template begins a turn."""


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=END, pad_token=PAD)
    tokenizer.add_tokens([PAD, "<|im_start|>", *TURN])
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return tokenizer


def automaton(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A model whose next token follows from the last one: embeddings are unit vectors, its layer adds nothing."""
    size = len(tokenizer)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=size, hidden_size=size, intermediate_size=2, max_position_embeddings=4096, **shape, **ends
    )
    model = Qwen3ForCausalLM(config)
    (line_break,) = tokenizer.encode("\n")
    chain = [line_break, *tokenizer.convert_tokens_to_ids(TURN)]
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for before, after in pairwise(chain):
            model.lm_head.weight[after, before] = 10.0
    return model


if __name__ == "__main__":
    tokenizer = tokenizer_of_bytes()
    asked = [{"role": "user", "content": "Guess my number."}]
    options = trl.GRPOConfig(
        output_dir=sys.argv[1], per_device_train_batch_size=4, num_generations=2, max_steps=1, logging_steps=1,
        max_completion_length=100, max_tool_calling_iterations=2, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=automaton(tokenizer),
        args=options,
        train_dataset=Dataset.from_list([{"prompt": asked, "answer": answer} for answer in ("16", "3")]),
        processing_class=tokenizer,
        environment_factory=Bisect,
    )
    trainer.train()
    games = [[game.secret, game.found] for game in trainer.environments]
    print(json.dumps({"games": sorted(games), "log": trainer.state.log_history[0]}))

"""A small Hugging Face tokenizer for tests, trained on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = ["What is 3+5?", "A conversation between User and Assistant.", "x < 3, so \\frac{1}{2} it is"] * 9
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(
    folder: Path, with_bos: bool, chat: bool = True, unigram: bool = False, special: Sequence[str] = SPECIAL
) -> Path:
    """A byte-level BPE tokenizer, as Qwen (no first token) and DeepSeek have, or a unigram model."""
    from transformers import PreTrainedTokenizerFast  # takes a second, which collecting tests would take too

    made = Tokenizer(models.Unigram() if unigram else models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.UnigramTrainer if unigram else trainers.BpeTrainer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainer(initial_alphabet=alphabet, special_tokens=[*special]))
    if with_bos:
        made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<|im_end|>", chat_template=CHAT + ASKING if chat else None
    )
    fast.save_pretrained(folder)
    return folder

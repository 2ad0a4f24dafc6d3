"""A teacher on a real SGLang server beside the same teacher as a Megatron model; prints what was found as JSON.

Usage: teacher_job.py FOLDER URL, of a Hugging Face folder and of the server that serves it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.config.trained_model import read_teacher  # noqa: E402
from grpo_mega.convert.source import load_teacher  # noqa: E402
from grpo_mega.data import build_tokenizer  # noqa: E402
from grpo_mega.models.reference import Teacher  # noqa: E402
from grpo_mega.models.topology import join_layout, leave_layout  # noqa: E402
from grpo_mega.rollout.sglang.teacher import ServedTeacher, TeacherServer  # noqa: E402
from grpo_mega.types import Batch, pack_tokens  # noqa: E402


def made_up_batch(vocab_size: int, longest: int) -> Batch:
    """Sequences of 2 to `longest` tokens, more than are asked for at once; those of a group begin with one prompt."""
    chance = random.Random(0)
    draw = lambda size: [chance.randrange(vocab_size) for _ in range(size)]  # noqa: E731
    prompts = [draw(size) for size in (1, 9, 40)]
    groups = [prompt + draw(chance.randint(1, longest - len(prompt))) for prompt in prompts for _ in range(16)]
    return pack_tokens([*groups, draw(longest)], [len(prompt) for prompt in prompts for _ in range(16)] + [1])


def said(check: Callable[[], str]) -> str:
    """The error that a check ends with; nothing if it ends well."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    folder, url = sys.argv[1:]
    platform.join_processes(HERE)
    words = ["data=jsonl", "data.train_path=none", "reward=boxed", f"data.tokenizer={folder}"]
    config = compose_config(["experiment=tiny_distill", "base=none", *words, f"distill.teacher={folder}"])
    topology, tokenizer, longest = join_layout(config.layout, 0), build_tokenizer(config.data), config.model.context
    described = read_teacher(config.distill, config.model)
    assert described is not None
    own = Teacher(described.model, config.layout, tokenizer.vocab_size, topology, HERE)
    load_teacher(Path(folder), own)
    server, more = (TeacherServer(url, 60, tokenizer.vocab_size + more) for more in (0, 1))
    served = ServedTeacher(server, server.check(longest, tokenizer.decode), topology)
    batch = made_up_batch(tokenizer.vocab_size, longest)
    found, expected = (teacher.logprobs(batch, 1.0)[batch.mask] for teacher in (served, own))
    result = {
        "tokens": len(found),
        "deviation": float(expected.std()),
        "apart": float((found - expected).abs().max()),
        "too long": said(lambda: server.check(longest + 64, tokenizer.decode)),
        "too many": said(lambda: more.check(longest, tokenizer.decode)),
        "others": said(lambda: server.check(longest, lambda ids: tokenizer.decode(ids) + "?")),
    }
    leave_layout()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

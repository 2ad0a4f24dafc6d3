"""Builds runs whose engine has turns on the trainer's device; prints the models of each, and those that then leave.

A CPU stands for the device that both share, and no engine is started: nothing is generated.
Usage: assembled_job.py FOLDER
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from composed import composed

from grpo_mega import assemble, platform

HERE = platform.start()

from grpo_mega.colocation import colocation  # noqa: E402
from grpo_mega.models.model import Model  # noqa: E402
from grpo_mega.models.reference import ReferencePolicy  # noqa: E402
from grpo_mega.run import Run  # noqa: E402
from grpo_mega.train import read  # noqa: E402

FOLDER = sys.argv[1]
SMALL = ["base=none", "layout=single", "data.validation_size=8", "data.test_size=8", "rollout.max_new_tokens=12"]
JUDGE = [
    *("run.trains=reward_model", "model=tiny_moe", "data.tokenizer=chars", f"pairs.path={FOLDER}/pairs.jsonl"),
    *("pairs.test_size=2", "pairs.epochs=1", "pairs.batch_size=4", "pairs.warmup_steps=0", "run.eval_every=0"),
]
SHARED = {
    "critic": ["experiment=tiny_ppo", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"],
    "teacher": ["experiment=tiny_distill"],
    "reward_model": ["experiment=tiny", "algorithm.kl_coef=0.1", f"reward.model.path={FOLDER}/judge"],
}


@contextmanager
def built(name: str, *words: str) -> Iterator[Run]:
    os.environ["MASTER_PORT"] = "0"  # any free one, for each job of this process
    platform.join_processes(HERE)
    config = composed(*words, f"run.root={FOLDER}", f"run.name={name}", "run.tensorboard=false")
    with assemble.assemble(config, HERE, *read(config)) as run:
        yield run


def models() -> list[Model | ReferencePolicy]:
    """All that there are."""
    return [one for one in gc.get_objects() if isinstance(one, Model | ReferencePolicy)]


def roles(name: str, words: list[str]) -> list[list[str]]:
    """Of the models of a run, and of those that leave the device."""
    before = models()
    with built(f"with_{name}", *words, *SMALL, "rollout.engine=sglang") as run:
        of_run = [one.role for one in models() if not any(one is earlier for earlier in before)]
        leaving = run.stages[-1].rollouts.access._memory.held()
        return [sorted(of_run), sorted(kind.removesuffix(" weights") for kind in leaving if kind.endswith(" weights"))]


def main() -> None:
    pair = {"prompt": "1+1=?", "chosen": "2", "rejected": "3"}
    lines = (json.dumps(pair | {"prompt": f"{number}+1=?"}) for number in range(10))
    Path(FOLDER, "pairs.jsonl").write_text("\n".join(lines))
    with built("teacher", "experiment=tiny", *SMALL) as run:
        run.save()
    with built("judge", *JUDGE) as run:
        run.execute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "_sglang", lambda ground, decode: nullcontext(SimpleNamespace()))
        patch.setattr(colocation, "take_turns", lambda sglang, here: True)
        print(json.dumps({name: roles(name, words) for name, words in SHARED.items()}))


if __name__ == "__main__":
    main()

"""Prompts of a job as its policy will get them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from grpo_mega.config.inputs import inputs
from grpo_mega.config.schema import GENERATED_TASKS, REWARD_MODELS, Config, ModelConfig
from grpo_mega.data import build_data, build_example_data, build_tokenizer
from grpo_mega.data.model_defaults import stop_ids
from grpo_mega.data.problems import load_problems
from grpo_mega.data.prompt_order import in_epoch
from grpo_mega.data.stored import sources_of, tokenizer_of
from grpo_mega.data.supervised import rows_of_file
from grpo_mega.data.tokenizer import Tokenizer, vocabulary
from grpo_mega.forecast.dry_run.refusals import Refusals
from grpo_mega.observe import waiting
from grpo_mega.reward.scorable import check_curriculum, why_unreachable
from grpo_mega.types import Prompt

SHOWN = 8
"""Number of problems shown."""
TASKS = 32
"""Number of tasks whose problems are shown."""
SHOWN_CHARACTERS = 400
"""Characters of a prompt shown, from its beginning and its end."""
UNLIMITED = 10**9
"""A context that fits every prompt: too long prompts are counted here, not refused one by one."""
GENERATED = 1000
"""Number of training problems examined when they are generated without end."""


@dataclass(frozen=True)
class Read:
    """The data that could be read.

    Attributes:
        tokenizer: None when it cannot be used.
        prompts: Prompts, training problems first.
    """

    tokenizer: Tokenizer | None
    prompts: list[Prompt]

    def vocab_size(self, model: ModelConfig, refusals: Refusals) -> int | None:
        """Number of tokens that the model scores; None if only an unusable tokenizer knows it."""
        if tokenizer := self.tokenizer:
            return refusals.attempt("model.vocab_size", lambda: vocabulary(model, tokenizer))
        return model.vocab_size


def read_data(config: Config, refusals: Refusals) -> Read:
    """Reads the data as the job will, or if that fails what it can. A reward model's examples give no prompts."""
    if config.run.trains in REWARD_MODELS:
        return _read_examples(config, refusals)
    paths = [path for source in sources_of(config.data).values() for path in (source.path, source.test_path)]
    is_generated = config.data.task in GENERATED_TASKS
    unlimited = config if is_generated else replace(config, model=replace(config.model, context=UNLIMITED))
    data = None
    # `input_checks` has reported missing files.
    if all(os.path.exists(path) for path in [*paths, config.sft.path] if path):
        unreachable = partial(why_unreachable, config.reward.terms)
        data = refusals.attempt("the data", lambda: build_data(unlimited, unreachable, tell=waiting.tell))
    if data:
        trained = f"{len(data.problems):,}" if data.problems else "unlimited"
        print(
            f"problems: {trained} for training, {len(data.validation):,} for validation, {len(data.test):,} for testing"
        )
        for warning in data.warnings:
            print(f"warning: {warning}")
        refusals.attempt("data.curriculum", partial(check_curriculum, config.data, config.reward, data.problems))
        # The first epoch; of problems that are generated without end, the first ones.
        once = [in_epoch(prompt, 0) for prompt in data.problems] or data.train.take(GENERATED)
        return Read(data.tokenizer, [*once, *data.validation, *data.test])
    if config.data.tokenizer != "chars" and not os.path.exists(config.data.tokenizer):
        return Read(None, [])
    tokenizer = refusals.attempt("data.tokenizer", lambda: build_tokenizer(config.data))
    return Read(tokenizer, [*_readable_parts(config, tokenizer, refusals)] if tokenizer else [])


def _read_examples(config: Config, refusals: Refusals) -> Read:
    paths = inputs(config)
    if any(name.startswith(("pairs.", "data.")) and not os.path.exists(path) for name, path in paths.items()):
        # `input_checks` has reported the missing files.
        return Read(None, [])
    noun = "pair" if config.run.trains == "reward_model" else "completion"
    data = refusals.attempt(f"the {noun}s", lambda: build_example_data(config))
    if data:
        steps, test = data.examples.steps, len(data.examples.test)
        print(f"{steps} steps of {config.pairs.batch_size} {noun}s, {test} {noun}s held out")
        for warning in data.warnings:
            print(f"warning: {warning}")
        return Read(data.tokenizer, [])
    return Read(refusals.attempt("data.tokenizer", lambda: build_tokenizer(config.data)), [])


def _readable_parts(config: Config, tokenizer: Tokenizer, refusals: Refusals) -> Iterator[Prompt]:
    """Yields the problems of each readable file, for when some are not readable."""
    unreachable = partial(why_unreachable, config.reward.terms)
    for name, source in sources_of(config.data).items() if config.data.task == "jsonl" else ():
        own = refusals.attempt(f"data.sources.{name}", partial(tokenizer_of, source, config.data, tokenizer))
        for path, split in ((source.path, source.split), (source.test_path, source.test_split)):
            if own and path and os.path.exists(path):
                reading = partial(load_problems, path, own, unreachable, name=name, source=source, split=split)
                yield from (problem.prompt for problem in refusals.attempt(path, reading) or [])
    ends = refusals.attempt(
        "rollout.stop", lambda: stop_ids(config.rollout.stop, tokenizer, (config.data.tokenizer, config.run.init_from))
    )
    if config.sft.path and os.path.exists(config.sft.path) and ends is not None:
        refusals.attempt(
            "sft.path", lambda: rows_of_file(config.sft, tokenizer, ends, config.model.context, config.run.seed, print)
        )


def show_prompts(data: Read, context: int, new: int, refusals: Refusals) -> None:
    """Prints the first problems as the policy's prompts, and the lengths of all; too long ones are a problem.

    Args:
        data: What was read.
        context: Most tokens of a sequence.
        new: Most tokens of a completion.
        refusals: Gets the prompts that leave no room for a completion.
    """
    if not data.prompts:
        return
    print("prompts, special tokens included")
    of_task: dict[str, list[Prompt]] = {}
    for prompt in data.prompts:
        of_task.setdefault(prompt.task, []).append(prompt)
    # `SHOWN` in all unless there are more tasks.
    each = max(1, SHOWN // len(of_task))
    for prompt in [prompt for of_it in of_task.values() for prompt in of_it[:each]][:TASKS]:
        text = prompt.text
        if len(text) > SHOWN_CHARACTERS:
            text = f"{text[: SHOWN_CHARACTERS // 2]} ... {text[-SHOWN_CHARACTERS // 2 :]}"
        print(f"  {prompt.id}, {len(prompt.token_ids)} tokens, answer {prompt.answer!r}: {text!r}")
    lengths = sorted(len(prompt.token_ids) for prompt in data.prompts)
    print(
        f"{len(lengths):,} prompts of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}; "
        f"model.context={context}"
    )
    if too_long := sum(length >= context for length in lengths):
        longest = max(data.prompts, key=lambda prompt: len(prompt.token_ids))
        refusals.add(
            f"{too_long} of {len(lengths)} prompts leave no room for a completion in model.context={context}; the "
            f"longest, {longest.id!r}, has {lengths[-1]} tokens: raise model.context, or drop these problems"
        )
    if cut := sum(length < context < length + new for length in lengths):
        print(f"{cut} of them leave less than rollout.max_new_tokens={new} tokens for a completion")

"""Finds all problems of a job at once, before it is queued: `--dry-run` of any command line.

    python -m grpo_mega.train experiment=tiny --dry-run
    slurm/tiny.sh --dry-run

It needs no GPU, shows none to the reward functions, starts no rank and writes nothing. It prints prompts, their
lengths, rewards of made-up completions, the planned memory, and a numbered list of problems. Every check runs, whatever
the others find, unless its input could not be read.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from grpo_mega.checks import Check, check_run_directory, input_checks, layout_checks, model_checks
from grpo_mega.config.from_folder import CHAT
from grpo_mega.config.load import compose_config
from grpo_mega.config.rules import check_config
from grpo_mega.config.schema import Config
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.forecast.dry_run.completions import show_rewards
from grpo_mega.forecast.dry_run.prompts import TASKS, read_data, show_prompts
from grpo_mega.forecast.dry_run.refusals import Refusals
from grpo_mega.forecast.dry_run.resources import laid_out, planned, show_plan
from grpo_mega.rollout.sglang.release import check_installed
from grpo_mega.types import Prompt

OPTION = "--dry-run"
READY, NOT_READY = 0, 2
"""Exit codes."""


def main(words: list[str]) -> int:
    """Dry run of a command line of `grpo_mega.train`; returns the exit code. Only one of several ranks reports."""
    if os.environ.get("RANK", "0") != "0":
        return READY
    processes = os.environ.get("WORLD_SIZE")
    return dry_run([word for word in words if word != OPTION], int(processes) if processes else None)


def dry_run(
    words: Sequence[str],
    processes: int | None = None,
    more: Callable[[Config], Iterable[Check]] = lambda config: (),
    known: Sequence[str] = (),
) -> int:
    """Dry run of a job with these settings: prints its data, rewards, plan and problems; returns the exit code.

    Args:
        words: The settings.
        processes: Number of processes of the job; None for that of `cluster.*`, or the fewest that the layout allows.
        more: Called with the configuration, including its vocabulary size; returns further checks.
        known: Problems already known.
    """
    # Must come before torch looks for GPUs: the plan refuses to start where one is visible, since Megatron would
    # allocate its models there.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore", module="megatron|torch")
    refusals = Refusals([*known])
    config = _composed([*words], refusals)
    if config:
        complete = _check(config, processes, refusals)
        refusals.attempt_all(more(complete))
    if not refusals.found:
        print("\nready")
        return READY
    print(f"\n{len(refusals.found)} {'problem' if len(refusals.found) == 1 else 'problems'}:")
    for number, problem in enumerate(refusals.found, start=1):
        print(f"{number:3}. " + problem.replace("\n", "\n     "))
    return NOT_READY


def _check_environment(config: Config, tokenizer: Tokenizer, prompts: list[Prompt]) -> None:
    """Starts the run's environment, if it has one, checks that all problems have the fields that it needs, and shows
    what it adds to the first problem of each task, and so of each source."""
    # Imports torch, which `--help` does without.
    from grpo_mega.environment.conversation import conversation_of
    from grpo_mega.environment.workers import of_user

    with conversation_of(config, tokenizer) as conversation:
        if not conversation:
            return
        print(f"\n{conversation.tools()}")
        for warning in conversation.warnings:
            print(f"\nwarning: {warning}")
        conversation.check_fields(prompts)
        firsts: dict[str, Prompt] = {}
        for prompt in prompts:
            firsts.setdefault(prompt.task, prompt)
        for prompt in conversation.opened([*firsts.values()][:TASKS]):
            if prompt.unopened:
                where = f"environment.path={config.environment.path}"
                what = "the agent's first request for" if conversation.is_agent else "reset of"
                raise of_user(where, f"{what} problem {prompt.id}: ", prompt.unopened, "correct the environment")
            if conversation.is_agent:
                print(f"\nthe agent's first request for {prompt.id}, {len(prompt.token_ids)} tokens: {prompt.text!r}")
            elif prompt.opening:
                print(f"\nreset adds to {prompt.id}, {len(prompt.token_ids)} tokens with it: {prompt.opening!r}")
            if config.data.template == CHAT and (untold := conversation.untold(prompt)):
                print(f"\nwarning: {untold}")


def _composed(words: list[str], refusals: Refusals) -> Config | None:
    """The composed configuration, without unknown settings; None if it cannot be composed without them either."""
    # Most likely an experiment whose name stands alone.
    bare = [word for word in words if "=" not in word]
    while True:
        try:
            return compose_config(words, checked=False)
        except ValueError as error:
            refusals.add(*map(str, getattr(error, "problems", [error])))
            # Hydra stops at the first setting that it does not know. Its message begins with the setting's name;
            # composing again without that setting finds the next one.
            named = re.match(r"['\"+~]*([\w.@/]+)", str(error))
            rest = [word for word in words if not named or word.lstrip("+~").partition("=")[0] != named[1]]
            # Errors about single settings have a cause, which they explain. Others, such as required settings that are
            # missing, are not fixed by dropping a word; and much would be missing without the experiment or the model.
            needed = named and named[1] in ("experiment", "model", "run.init_from", *bare)
            if error.__cause__ is None or rest == words or needed:
                print("fix this first: data, rewards, environment, layout and memory were not checked")
                return None
            words = rest


def _check(config: Config, processes: int | None, refusals: Refusals) -> Config:
    """Runs every check of a complete configuration; returns it with its vocabulary size."""
    before = len(refusals.found)
    refusals.attempt("settings", lambda: check_config(config))
    refusals.attempt_all(layout_checks(config, processes))
    valid = len(refusals.found) == before
    # Data and rewards.
    refusals.attempt_all(input_checks(config))
    data = read_data(config, refusals)
    show_prompts(data, config.model.context, config.rollout.max_new_tokens, refusals)
    show_rewards(config, data, refusals)
    if tokenizer := data.tokenizer:
        refusals.attempt("the environment", lambda: _check_environment(config, tokenizer, data.prompts))
    # Layout, models and memory; a layout is chosen, and memory planned, only with valid settings, on which both rely.
    vocab_size = data.vocab_size(config.model, refusals)
    if config.layout.undecided and valid and vocab_size:
        laid = refusals.attempt("the layout", partial(laid_out, config, vocab_size, processes))
        config, valid = laid or config, laid is not None
    refusals.attempt_all(model_checks(config, data.tokenizer, vocab_size, alone=True))
    refusals.attempt("the run directory", lambda: check_run_directory(config))
    if valid and vocab_size:
        if plan := refusals.attempt("the plan", lambda: planned(config, vocab_size, processes)):
            show_plan(config.run, plan, refusals)
    else:
        print("\nmemory and disk space were not planned: fix the settings or the tokenizer first")
    try:
        # Printed and not counted as a problem: the job's machines may have another release of SGLang than this one.
        check_installed(config.rollout)
    except ValueError as error:
        print(f"\non the machines that will run the job, perhaps not this one: {error}")
    return replace(config, model=replace(config.model, vocab_size=vocab_size))

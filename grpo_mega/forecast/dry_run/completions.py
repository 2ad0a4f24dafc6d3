"""Rewards of made-up completions of a problem, term by term."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import replace
from typing import Any

from grpo_mega.config.rules.reward import reward_problems
from grpo_mega.config.schema import REWARD_MODELS, Config, RewardConfig, RewardTerm
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.forecast.dry_run.prompts import Read
from grpo_mega.forecast.dry_run.refusals import Refusals
from grpo_mega.reward.code import checked_tests
from grpo_mega.reward.compose import build_reward
from grpo_mega.reward.extract import PREFILLED
from grpo_mega.reward.scorable import check_problems, has_task
from grpo_mega.types import Prompt, Sample

MADE_UP = Prompt(id="made up", token_ids=(), text="What is 40 + 2?", answer="42", task="made up")
"""A stand-in problem, when none can be read."""
SHOWN_TASKS = 8
"""Number of tasks whose first problem has made-up completions."""
WRONG = "123454321"
"""An answer that is wrong for every problem."""
IN_TAGS, IN_A_BOX = "<think>...</think><answer>{}</answer>", r"... \boxed{{{}}}"
# Formatted twice, here with WRONG and later with the answer: four braces become one.
AFTER_THOUGHTS = f"<think>\nInto \\boxed{{{{}}}}. Is it \\boxed{{{{{WRONG}}}}}?\n</think>\n\n... \\boxed{{{{{{}}}}}}"
COMPLETIONS = (
    ("right, in think and answer tags", IN_TAGS, True, "stop"),
    ("right, in a box", IN_A_BOX, True, "stop"),
    ("right, alone", "{}", True, "stop"),
    ("wrong, in think and answer tags", IN_TAGS, False, "stop"),
    ("wrong, in a box", IN_A_BOX, False, "stop"),
    ("right, in a box after thoughts", AFTER_THOUGHTS, True, "stop"),
    ("right, stated", "The answer is {}.", True, "stop"),
    ("right, its tags not closed", "<think>...<answer>{}", True, "stop"),
    ("right in tags, but cut off", IN_TAGS, True, "length"),
    ("empty", "", False, "stop"),
)
"""(name, text with {} for the value, whether it is correct, finish_reason) of each completion."""


READ = {"boxed": "\\boxed", "accuracy": "<answer>", "format": "<answer>", "tag": "<answer>"}
"""Kind of a term, or its option `read` -> what a prompt should say of the answer."""
UNKNOWN_RIGHT = ("countdown", "reasoning_gym", "judge", "http")
"""Kinds of terms for which the `answer` of a problem is not itself a right completion."""


def show_rewards(config: Config, data: Read, refusals: Refusals) -> None:
    """Prints the rewards of `COMPLETIONS` of the first problem of each task: every term and the total."""
    if config.run.trains in REWARD_MODELS or not config.reward.terms:
        return
    if data.prompts:
        refusals.attempt("reward.terms", lambda: check_problems(config.reward.terms, data.prompts))
    firsts: dict[str, Prompt] = {}
    for prompt in data.prompts:
        firsts.setdefault(prompt.task, prompt)
    for prompt in [*firsts.values()][:SHOWN_TASKS] or [MADE_UP]:
        terms = [term for term in config.reward.terms if prompt is MADE_UP or has_task(term, prompt.task)]
        _show(terms, prompt, data.tokenizer, config.reward, config.run.seed, refusals)
        if prompt is not MADE_UP and config.data.tokenizer != "chars" and not config.sft.path:
            _show_unasked(terms, prompt)


def _show_unasked(terms: list[RewardTerm], prompt: Prompt) -> None:
    """Warns of the first term that reads a form of answers that the prompt does not ask for."""
    for term in terms:
        form = READ.get(str(term.options.get("read", term.built_in)))
        if form and form not in prompt.text:
            option = "data=asks_for_box" if form == READ["boxed"] else "data=r1zero"
            print(
                f"warning: prompts do not mention {form}, which reward term {term.name!r} reads; unless the model "
                f"writes it by itself, ask for it: data.question, or {option}"
            )
            return


def _right(terms: list[RewardTerm], prompt: Prompt) -> str:
    """What a right completion states: the truth, or, if tests judge it, a program that knows the tests by heart."""
    if not any(term.built_in == "code" for term in terms):
        return prompt.answer
    try:
        tests = checked_tests(_sample(prompt, 0, "", "stop", None))
    except ValueError:
        # `check_problems` has reported the problems that cannot be scored.
        return prompt.answer
    # The program looks its results up by the text of the arguments, since lists cannot be keys.
    calls: dict[str, dict[str, Any]] = {}
    for test in tests:
        if "call" in test:
            calls.setdefault(test["call"], {})[repr(test["args"])] = test["returns"]
    program: list[str] = []
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in calls):
        program += [f"class {owner}:"] if owner else []
        for name in [name for name in calls if name.rpartition(".")[0] == owner]:
            head = f" def {name.rpartition('.')[2]}(self, *args):" if owner else f"def {name}(*args):"
            program.append(f"{head}\n  return {calls[name]!r}[repr([*args])]")
    if said := {test["stdin"]: test["stdout"] for test in tests if "stdin" in test}:
        program.append(f"import sys\nprint({said!r}.get(sys.stdin.read(), ''), end='')")
    return "```python\n" + "\n".join(program) + "\n```"


def _show(
    terms: list[RewardTerm],
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    reward: RewardConfig,
    seed: int,
    refusals: Refusals,
) -> None:
    """Prints the rewards of `COMPLETIONS` of one problem by these terms."""
    # Where the chat template has opened <think> already, completions must not open it again.
    begins = PREFILLED.search(prompt.text)
    begun = "<think>" if begins else ""
    values_of = {True: _right(terms, prompt), False: WRONG}
    samples = [
        _sample(prompt, index, text.removeprefix(begun).format(values_of[right]), ends, tokenizer)
        for index, (_, text, right, ends) in enumerate(COMPLETIONS)
    ]
    values = {term.name: _values(term, reward, seed, samples, refusals) for term in terms}
    weights = {term.name: term.weight for term in terms}
    scored = {name: column for name, column in values.items() if column}
    if not scored:
        return
    print(f"\nrewards of completions of {prompt.id!r}, whose answer is {prompt.answer!r}")
    if begins:
        print("the chat template begins each completion with <think>, and the policy goes on from there")
    width = max(9, *map(len, scored)) + 2
    print(f"  {'':<34}" + "".join(f"{name:>{width}}" for name in [*scored, "total"]))
    totals = [
        sum(weights[name] * column[index] for name, column in scored.items()) for index in range(len(COMPLETIONS))
    ]
    for index, (name, *_) in enumerate(COMPLETIONS):
        row = [*(column[index] for column in scored.values()), totals[index]]
        print(f"  {name:<34}" + "".join(f"{value:>{width}.4g}" for value in row))
    known = all(term.built_in not in UNKNOWN_RIGHT for term in terms)
    # Rows 0 and 3 of `COMPLETIONS` are right and wrong in tags, 1 and 4 in a box.
    if known and len(scored) == len(values) and totals[0] <= totals[3] and totals[1] <= totals[4]:
        print("warning: in tags and in a box, a right answer earns no more than a wrong one")


def _values(
    term: RewardTerm, reward: RewardConfig, seed: int, samples: list[Sample], refusals: Refusals
) -> list[float] | None:
    """The term's value for each sample; None when it has none, which is printed or added to the problems."""
    # A dry run writes nothing, so a judge's replies are not cached. With weight 1 the total is the term's own value.
    # An error must reach the list of problems, rather than leave samples out.
    kept = {name: value for name, value in term.options.items() if (term.built_in, name) != ("judge", "cache")}
    tried = replace(term, weight=1.0, tasks=[], options=kept)
    alone = replace(reward, terms=[tried], success=term.name, on_error="stop")
    # Violated rules have been reported with the settings; no environment has met made-up completions.
    if [*reward_problems(alone)] or term.built_in == "environment":
        return None
    built = refusals.attempt(f"reward term {term.name}", lambda: build_reward(alone, seed))
    scores = refusals.attempt(f"reward term {term.name}", lambda: built.score(samples)) if built else None
    if not scores:
        return None
    if why := next((score.unscorable for score in scores if score.unscorable), ""):
        print(f"\non the machines that will run the job, perhaps not this one: {why}")
        return None
    return [score.total for score in scores]


def _sample(prompt: Prompt, index: int, text: str, ends: str, tokenizer: Tokenizer | None) -> Sample:
    """A completion as the policy might sample it; where the tokenizer lacks characters, with a token for each."""
    tokens = array("i", bytes(4 * max(1, len(text))))
    if tokenizer:
        with suppress(ValueError):
            tokens = array("i", tokenizer.encode(text)) or tokens
    return Sample(prompt, index, tokens, array("f", bytes(4 * len(tokens))), ends, ((0, 0),), text)

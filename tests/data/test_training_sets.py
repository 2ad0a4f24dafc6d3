"""Generated tasks with a number of training problems: the same in every run, none of them held out, in epochs."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from refusals import refused

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config
from grpo_mega.data import Data, build_data
from grpo_mega.types import Group, Prompt, SampleInfo, Score


def config(*words: str) -> Config:
    return compose_config(["experiment=tiny_mixture", "data.validation_size=20", "data.test_size=20", *words])


def data(*words: str) -> Data:
    return build_data(config(*words))


def name(prompt: Prompt) -> str:
    return prompt.id.rpartition("#")[0]


def learned(prompt: Prompt, rate: float) -> Group:
    """A group of ten with this pass rate in the term of the prompt's task; sums have formats, too."""
    term = {"chain_sum": "accuracy", "tiny_code": "code"}[prompt.task]
    of_format = {"format": 1.0} if prompt.task == "chain_sum" else {}
    scores = [Score(0.0, of_format | {term: float(i < 10 * rate)}) for i in range(10)]
    return Group(prompt, tuple(SampleInfo(1, "stop", ((0, 0),), score) for score in scores))


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        ("chain_sum", {"chain_sum": 9}),
        ("tiny_code", {"tiny_code": 9}),
        ("tiny_product", {"tiny_product": 9}),
        ("tiny_mixture", {"chain_sum": 5, "tiny_code": 4}),
    ],
)
def test_every_epoch_has_all_problems_and_none_that_is_held_out(task: str, sizes: dict[str, int]) -> None:
    made = data(f"data.task={task}", "data.train_size=9")
    assert Counter(prompt.task for prompt in made.problems) == sizes
    assert len({prompt.text for prompt in made.problems}) == len({prompt.id for prompt in made.problems}) == 9
    taken = made.train.take(36)
    assert {Counter(name(prompt) for prompt in taken)[prompt.id] for prompt in made.problems} == {4}
    assert len({prompt.id for prompt in taken}) == 36  # other samples in every epoch
    endless = data(f"data.task={task}")
    assert (made.validation, made.test) == (endless.validation, endless.test)
    assert not endless.problems
    assert not {prompt.text for prompt in made.problems} & {prompt.text for prompt in made.validation + made.test}


def test_the_problems_are_the_same_for_every_seed_and_a_larger_set_has_those_of_a_smaller() -> None:
    one, two, larger = (
        data("data.train_size=20", "run.seed=0"),
        data("data.train_size=20", "run.seed=1"),
        data("data.train_size=40"),
    )
    assert one.problems == two.problems
    assert {*one.problems} < {*larger.problems}
    assert [name(prompt) for prompt in one.train.take(20)] != [name(prompt) for prompt in two.train.take(20)]
    for other in (two, larger, data("data.train_size=20", "data.curriculum=frontier"), data()):
        with refused("saved prompt order | belongs to "):
            other.train.load_state_dict(one.train.state_dict())


def test_an_order_continues_where_it_stopped() -> None:
    one, two = data("data.train_size=7"), data("data.train_size=7")
    one.train.take(10)
    two.train.load_state_dict(one.train.state_dict())
    assert two.train.take(20) == one.train.take(20)


def test_a_curriculum_follows_each_tasks_own_term_and_leaves_the_mixture_as_it_is() -> None:
    made = data("data.train_size=40", "data.curriculum=frontier", "data.frontier_revisit=1000")
    first = made.train.take(40)
    rates = {prompt.id: (0.0, 0.5, 1.0)[i % 3] for i, prompt in enumerate(made.problems)}
    made.train.learn([learned(prompt, rates[name(prompt)]) for prompt in first])
    later = made.train.take(80)
    assert Counter(prompt.task for prompt in later) == {"chain_sum": 40, "tiny_code": 40}
    visits = Counter(map(name, later))
    often = {problem for problem, rate in rates.items() if rate == 0.5}
    assert often <= visits.keys()
    assert sum(visits[problem] for problem in often) >= 78  # the others come once in a thousand passes


def test_more_problems_than_there_are_is_refused() -> None:
    with refused("data.train_size | 1000 training problems of chain_sum"):
        data("data.train_size=2000", "data.max_terms=3")
    with refused("data.train_size | 1620 training problems of tiny_code") as raised:
        data("data.task=tiny_code", "data.train_size=1620")
    (most,) = re.findall("only ([0-9]+) different ones", raised.value.what)
    assert len({prompt.text for prompt in data("data.task=tiny_code", f"data.train_size={most}").problems}) == int(most)

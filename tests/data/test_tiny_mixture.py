"""Two generated tasks in turn: each as it is alone, half of everything, and told apart where it matters."""

from __future__ import annotations

from collections import Counter

import pytest
from composed import composed
from refusals import refused

from grpo_mega.config.schema import DataConfig
from grpo_mega.data import build_data
from grpo_mega.data.tasks import TinyMixture
from grpo_mega.data.tasks.chain_sum import ChainSum
from grpo_mega.data.tasks.tiny_code import TinyCode
from grpo_mega.data.tokenizer import CharTokenizer, character_tokenizer
from grpo_mega.reward.scorable import check_problems

TOKENIZER = character_tokenizer(DataConfig(task="tiny_mixture"))
TASK = TinyMixture(TOKENIZER, 3, 5, validation_size=21, test_size=40)


def test_either_task_is_what_it_is_alone() -> None:
    sums, programs = ChainSum(TOKENIZER, 3, 5, 11, 20), TinyCode(TOKENIZER, 10, 20)
    assert (TASK.validation, TASK.test) == (sums.validation + programs.validation, sums.test + programs.test)
    assert [TASK.problem(5, k) for k in range(6)] == [t.problem(5, k) for k in range(3) for t in (sums, programs)]
    assert len({TASK.problem(5, k).id for k in range(200)}) == 200
    assert TASK.longest_document() == programs.longest_document() > sums.longest_document()


def test_half_of_the_documents_are_of_each_task() -> None:
    documents = [TOKENIZER.decode(ids) for ids in TASK.documents(1, 2, 101, tagged=0.5, direct=0.5)]
    assert Counter("def" in text for text in documents) == {False: 51, True: 50}
    assert 30 < sum("<answer>" in text for text in documents) < 70
    assert documents != [TOKENIZER.decode(ids) for ids in TASK.documents(1, 3, 101, tagged=0.5, direct=0.5)]


def test_the_gate_reads_each_task_in_its_own_way() -> None:
    a_sum, a_program = (next(p for p in TASK.validation if p.task == task) for task in ("chain_sum", "tiny_code"))
    started = [TASK.working_prompt(prompt) for prompt in (a_sum, a_program)]
    assert [p.text.removeprefix(q.text)[-1] for p, q in zip(started, (a_sum, a_program), strict=True)] == ["=", "="]
    assert TASK.is_worked_out(started[0], f"1;1+1={a_sum.answer}")
    assert TASK.is_worked_out(started[1], f"1;3-1=2;{a_program.answer}")
    assert not TASK.is_worked_out(started[0], f"1;{a_sum.answer}")
    assert not TASK.is_worked_out(started[1], f"1;1+1={a_program.answer}")


def test_tokens_of_sums_are_those_of_sums_alone() -> None:
    assert TOKENIZER.tokens[: CharTokenizer().vocab_size] == CharTokenizer().tokens
    assert TOKENIZER.vocab_size == CharTokenizer().vocab_size + 8


def test_a_run_reads_both_and_every_task_has_a_reward() -> None:
    config = composed("experiment=tiny_mixture")
    data = build_data(config)
    assert Counter(p.task for p in data.test) == {"chain_sum": 200, "tiny_code": 200}
    assert Counter(p.task for p in data.train.take(32)) == {"chain_sum": 16, "tiny_code": 16}
    check_problems(config.reward.terms, [*data.validation, *data.test])
    with refused("problem 'tiny_code/ | no reward term has"):
        check_problems(config.reward.terms[:2], data.test)


@pytest.mark.parametrize(
    ("sizes", "field"), [((5, 4), "data.test_size=2"), ((20, 882), "data.validation_size + data.test_size=451")]
)
def test_impossible_sizes_are_named_as_they_were_given(sizes: tuple[int, int], field: str) -> None:
    validation, test = sizes
    given = f"half of data.validation_size={validation} and data.test_size={test}"
    with refused(f"{field} (tiny_mixture gives each of its two tasks {given}"):
        TinyMixture(TOKENIZER, 3, 5, validation, test)

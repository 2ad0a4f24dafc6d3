"""Chain sums: disjoint splits, streams that are functions of a counter, documents in the promised proportions."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.config.schema import DataConfig
from grpo_mega.data.tasks.chain_sum import BASE_TAGGED, SFT_TAGGED, ChainSum, multisets, working, working_answer
from grpo_mega.data.tokenizer import CharTokenizer, character_tokenizer
from grpo_mega.judges.numerals import NUMERALS, STAYS, in_digits, in_words
from grpo_mega.types import Prompt

TOKENIZER = CharTokenizer()
TASK = ChainSum(TOKENIZER, 3, 5, validation_size=200, test_size=400)


def digits(prompt: Prompt) -> tuple[int, ...]:
    """The sorted digits of a problem, read from its text."""
    match = re.fullmatch(r"<bos>([0-9+]+)=\?", prompt.text)
    assert match is not None
    return tuple(sorted(int(term) for term in match.group(1).split("+")))


def terms_of(text: str) -> list[int]:
    return [int(term) for term in text.removeprefix("<bos>").partition("=?")[0].split("+")]


def test_prompts_are_what_they_say():
    for prompt in TASK.validation + TASK.test + [TASK.problem(0, k) for k in range(100)]:
        assert TOKENIZER.encode(prompt.text) == list(prompt.token_ids)
        assert prompt.answer == str(sum(digits(prompt)))
        assert 3 <= len(digits(prompt)) <= 5
        assert prompt.task == "chain_sum"


def test_splits_share_no_multiset_of_digits():
    validation, test = ({digits(p) for p in split} for split in (TASK.validation, TASK.test))
    train = {digits(TASK.problem(seed, k)) for seed in range(2) for k in range(3000)}
    assert (len(validation), len(test)) == (200, 400)
    assert not validation & test
    assert not train & (validation | test)
    assert len(train) > 1200


def test_documents_and_traces_leave_the_held_out_problems_alone():
    held_out = {digits(p) for p in TASK.validation + TASK.test}
    documents = [TOKENIZER.decode(ids) for ids in TASK.documents(0, 0, 1000, 0.1, 0.25)]
    prompts = [TOKENIZER.decode(prompt) for prompt, _ in TASK.sft_traces(0, 0, 1000)]
    assert not held_out & {tuple(sorted(terms_of(text))) for text in documents + prompts}


def test_every_length_is_in_every_split_in_proportion():
    for split, size in ((TASK.validation, 200), (TASK.test, 400)):
        counts = Counter(len(digits(p)) for p in split)
        for terms in (3, 4, 5):
            assert abs(counts[terms] - size * multisets(terms) / 2937) < 1.5
    smallest = ChainSum(TOKENIZER, 3, 5, validation_size=3, test_size=3)
    assert sorted(len(digits(p)) for p in smallest.test) == [3, 4, 5]


def test_training_lengths_are_balanced():
    counts = Counter(len(digits(TASK.problem(1, k))) for k in range(3000))
    assert all(900 < counts[terms] < 1100 for terms in (3, 4, 5))


def test_test_problems_do_not_depend_on_the_validation_size():
    other = ChainSum(TOKENIZER, 3, 5, validation_size=10, test_size=400)
    assert other.test == TASK.test


def test_splits_are_the_same_for_ever():
    """A changed generator would silently change what every reported accuracy means."""
    prompts = [*TASK.test, *TASK.validation, *(TASK.problem(0, k) for k in range(100))]
    assert prompts[0].id == "chain_sum/test/8+4+5"
    assert hashlib.sha256("\n".join(p.id for p in prompts).encode()).hexdigest()[:16] == "3087f3dc277b416f"


def test_ids_are_unique_even_when_a_problem_comes_back():
    prompts = [TASK.problem(0, k) for k in range(5000)] + TASK.validation + TASK.test
    assert len({p.id for p in prompts}) == len(prompts) > len({p.text for p in prompts})


@settings(max_examples=50)
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_problem_is_a_function_of_seed_and_counter(seed: int, k: int):
    again = ChainSum(TOKENIZER, 3, 5, validation_size=200, test_size=400)
    assert TASK.problem(seed, k) == again.problem(seed, k)
    assert TASK.problem(seed, k).id != TASK.problem(seed, k + 1).id


@settings(max_examples=200)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 8))
def test_working_is_correct_arithmetic_that_uses_every_term_once(terms: list[int], stride: int):
    total, used = terms[0], [terms[0]]
    steps = working(tuple(terms), stride).split(";")
    for step in steps:
        left, _, result = step.partition("=")
        start, *merged = map(int, left.split("+"))
        assert start == total
        assert 1 <= len(merged) <= stride
        total += sum(merged)
        used += merged
        assert int(result) == total
    assert used == terms
    assert len(steps) == -(-(len(terms) - 1) // stride)


def test_worked_examples():
    assert working((3, 5, 2, 9), 1) == "3+5=8;8+2=10;10+9=19"
    assert working((3, 5, 2, 9), 2) == "3+5+2=10;10+9=19"
    assert working((3, 5, 2, 9), 4) == "3+5+2+9=19"


def kind(document: str) -> str:
    """Tagged, direct or working, checking on the way that the answer is right."""
    question, _, solution = document.partition("=?")
    total = sum(terms_of(question))
    assert document.count("<eos>") == 1
    if solution == f"{total}<eos>":
        return "direct"
    if re.fullmatch(rf"<think>[0-9+=;]+={total}</think><answer>{total}</answer><eos>", solution):
        return "tagged"
    assert re.fullmatch(rf"[0-9+=;]+={total}<eos>", solution)
    return "working"


def test_base_documents_come_in_the_configured_shares():
    documents = [TOKENIZER.decode(ids) for ids in TASK.documents(3, 7, 4000, tagged=0.1, direct=0.25)]
    counts = Counter(map(kind, documents))
    assert all(text.startswith("<bos>") for text in documents)
    assert counts["tagged"] / 4000 == pytest.approx(0.1, abs=0.02)
    assert counts["direct"] / 4000 == pytest.approx(0.225, abs=0.03)
    assert counts["working"] / 4000 == pytest.approx(0.675, abs=0.03)


@pytest.mark.parametrize(
    ("tagged", "direct", "only"), [(1.0, 0.5, "tagged"), (0.0, 1.0, "direct"), (0.0, 0.0, "working")]
)
def test_extreme_shares(tagged: float, direct: float, only: str):
    documents = TASK.documents(0, 0, 200, tagged, direct)
    assert {kind(TOKENIZER.decode(ids)) for ids in documents} == {only}


@pytest.mark.parametrize("styles", [BASE_TAGGED, SFT_TAGGED])
def test_quality_mix(styles):
    rng = random.Random(0)
    counts = Counter(styles.draw(rng, (1, 2, 3, 4, 5)) for _ in range(4000))
    assert [counts[stride] / 4000 for stride in (5, 2, 1)] == pytest.approx(
        [styles.whole, styles.two, styles.one], abs=0.03
    )


def test_sft_traces_are_in_the_answer_format():
    for prompt, completion in TASK.sft_traces(0, 0, 200):
        text = TOKENIZER.decode(prompt + completion)
        assert kind(text) == "tagged"
        assert TOKENIZER.decode(prompt).endswith("=?")


def test_documents_are_functions_of_seed_and_step():
    assert TASK.documents(0, 5, 64, 0.1, 0.25)[:8] == TASK.documents(0, 5, 8, 0.1, 0.25)
    assert TASK.documents(0, 5, 8, 0.1, 0.25) != TASK.documents(0, 6, 8, 0.1, 0.25)
    assert TASK.documents(0, 5, 8, 0.1, 0.25) != TASK.documents(1, 5, 8, 0.1, 0.25)
    assert TASK.sft_traces(0, 5, 64)[:8] == TASK.sft_traces(0, 5, 8) != TASK.sft_traces(0, 6, 8)


def test_gate_prompt_starts_the_working_that_documents_hold():
    for prompt in TASK.validation[:20]:
        started = TASK.working_prompt(prompt)
        assert TOKENIZER.encode(started.text) == list(started.token_ids)
        assert started.id != prompt.id
        full = prompt.text + working(tuple(terms_of(prompt.text)), 1)
        assert full.startswith(started.text)
        assert working_answer(full.removeprefix(started.text)) == prompt.answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8;8+2=10", "10"),
        ("8", "8"),
        ("8;8+2=", None),
        ("8;8+2", None),
        ("=10<eos>", None),
        ("=10\n", None),
        ("</answer>", None),
        ("", None),
    ],
)
def test_working_answer(text: str, answer: str | None):
    assert working_answer(text) == answer


def test_too_many_held_out_problems():
    ChainSum(TOKENIZER, 3, 3, validation_size=10, test_size=100)
    with refused("validation_size + data.test_size | only 220"):
        ChainSum(TOKENIZER, 3, 3, validation_size=11, test_size=100)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((3, 5, 2, 10), "validation_size"),
        ((3, 5, 10, 0), "test_size"),
    ],
)
def test_senseless_sizes_are_named(arguments: tuple[int, int, int, int], field: str):
    with pytest.raises(ValueError, match=field):
        ChainSum(TOKENIZER, *arguments)


def test_long_sums_need_no_enumeration():
    task = ChainSum(TOKENIZER, 2, 40, validation_size=50, test_size=50)
    assert len({digits(p) for p in task.validation + task.test}) == 100


def test_no_document_is_longer_than_the_longest():
    task = ChainSum(CharTokenizer(), 3, 5, 20, 20)
    documents = task.documents(0, 0, 500, tagged=0.9, direct=0.0)
    traces = [prompt + completion for prompt, completion in task.sft_traces(0, 0, 500)]
    assert max(map(len, documents + traces)) <= task.longest_document() <= 64


LANGUAGES = ("english", "chinese")
BILINGUAL = ChainSum(character_tokenizer(DataConfig(task="chain_sum", languages=[*LANGUAGES])), 3, 5, 8, 8, LANGUAGES)


@given(
    terms=st.lists(st.integers(0, 9), min_size=2, max_size=6).map(tuple), stride=st.integers(1, 6), seed=st.integers()
)
def test_number_words_are_the_digits_and_a_step_is_in_one_language(terms: tuple[int, ...], stride: int, seed: int):
    worked = working(terms, stride)
    written = in_words(worked, LANGUAGES, random.Random(seed))
    assert in_digits(written) == worked
    assert in_words(worked, (), random.Random(seed)) == worked
    for step in written.split(";"):
        assert sum(any(word in step for word in NUMERALS[language]) for language in LANGUAGES) == 1
    assert TOKENIZER.vocab_size + 20 == BILINGUAL.tokenizer.vocab_size
    assert BILINGUAL.tokenizer.decode(BILINGUAL.tokenizer.encode(written)) == written


def test_a_step_stays_in_the_language_of_the_one_before_as_often_as_it_says():
    texts = [in_words("1+1=2;2+1=3", LANGUAGES, random.Random(seed)) for seed in range(4000)]
    same = [len({"o" in step or "t" in step for step in text.split(";")}) == 1 for text in texts]
    first = [text.startswith("one") for text in texts]
    assert sum(same) / len(same) == pytest.approx(STAYS + (1 - STAYS) / 2, abs=0.025)
    assert sum(first) / len(first) == pytest.approx(0.5, abs=0.035)


def test_documents_in_two_languages_have_digits_where_others_read_them():
    texts = [BILINGUAL.tokenizer.decode(ids) for ids in BILINGUAL.documents(0, 0, 300, 0.5, 0.25)]
    plain = ChainSum(BILINGUAL.tokenizer, 3, 5, 8, 8)
    for text in texts:
        question, _, solution = text.partition("=?")
        answer = re.search(r"<answer>(.*)</answer>", solution)
        assert question.removeprefix("<bos>").replace("+", "").isdecimal()
        assert (answer[1] if answer else in_digits(solution).removesuffix("<eos>").rpartition("=")[2]) == str(
            sum(terms_of(text))
        )
    assert any("三" in text for text in texts)
    assert any("three" in text for text in texts)
    prompt = BILINGUAL.working_prompt(BILINGUAL.validation[0])
    assert in_digits(prompt.text) == plain.working_prompt(plain.validation[0]).text != prompt.text
    right = in_words(prompt.answer, ["chinese"], random.Random(0))
    assert BILINGUAL.is_worked_out(prompt, f"={right}")
    traces = [BILINGUAL.tokenizer.decode(completion) for _, completion in BILINGUAL.sft_traces(0, 0, 50)]
    assert not any(word in trace for trace in traces for word in NUMERALS["chinese"])

"""Functions of users: what they do stays in their process, what goes wrong is named, nothing outlives the run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from limits import limit
from processes import kill, left, there
from refusals import refused

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.reward import user_functions
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.reward.user_functions import UserFunction, UserFunctions, import_fix
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Prompt, Sample, Score

HERE = Path(__file__).parent


def sample(text: str = "abc", index: int = 0, version: int = 0) -> Sample:
    prompt = Prompt(id="chain_sum/x", token_ids=(1,), text="<bos>3+5+2+9=?", answer="19", task="chain_sum")
    return Sample(prompt, index, array("i", [2]), array("f", [0.0]), "stop", ((0, version),), text)


def reward(*functions: str, seconds: float = 600, seed: int = 0) -> Reward:
    """Functions of hostile_functions.py or another module, each a term of its own name."""
    paths = [name if ":" in name else f"hostile_functions:{name}" for name in functions]
    terms = [RewardTerm(path.partition(":")[2], 1.0, path) for path in paths]
    return build_reward(RewardConfig(terms, success=terms[0].name, timeout_seconds=seconds), seed)


def value(function: str, of: Sample, seed: int = 0) -> float:
    """Of the first call in a process of its own."""
    (score,) = reward(function, seed=seed).score([of])
    return score.total


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("exits", "SystemExit: 0"),
        ("interrupts", "KeyboardInterrupt: "),
        ("leaves", "ended with exit code 0"),
        ("kills_itself", r"was killed by SIGKILL \(memory may have run out\)"),
        ("crashes", "was killed by SIGSEGV"),
        ("eats_memory", "MemoryError"),
        ("closes_all_files", "ended with exit code 1"),
        ("writes_everywhere", "written to a file descriptor that is not its own"),
        ("raises_what_cannot_be_printed", "Unprintable"),
    ],
)
def test_whatever_ends_a_function_is_an_error_that_names_term_prompt_and_sample(function: str, words: str):
    with pytest.raises(RuntimeError, match=rf"^reward term '{function}', prompt 'chain_sum/x', sample 3: .*{words}"):
        reward(function).score([sample(index=3)])


@pytest.mark.parametrize(("function", "where"), [("hangs", "in hangs"), ("talks_for_ever", "la la la"), ("stops", "")])
def test_a_function_that_does_not_come_back_is_ended_and_says_where_it_was(
    monkeypatch: pytest.MonkeyPatch, function: str, where: str
):
    if function == "stops":  # it says nothing, however long it is waited for
        monkeypatch.setattr(user_functions, "STACK_SECONDS", 0.2)
    words = rf"'{function}', prompt 'chain_sum/x', sample 3: no value within reward.timeout_seconds=1"
    with pytest.raises(RuntimeError, match=words) as raised:
        reward(function, seconds=1).score([sample(index=3)])
    assert where in str(raised.value)
    assert "; if few samples fail, reward.on_error=leave_out goes on without them" in str(raised.value)


def test_last_words_are_part_of_the_error():
    with pytest.raises(RuntimeError, match=r"its last output:\n    these are my last words$"):
        reward("leaves").score([sample()])


def test_a_crash_in_foreign_code_shows_where():
    with pytest.raises(RuntimeError, match=r"(?s)Segmentation fault.*in crashes"):
        reward("crashes").score([sample()])


@pytest.mark.parametrize("returned", ["None", "math.nan", "-math.inf", "'1'", "[1.0]", "1j", "10**400"])
def test_what_is_no_finite_number_is_an_error_with_the_value_in_it(returned: str):
    text = returned.replace("math", "__import__('math')")
    with pytest.raises((ValueError, RuntimeError), match=r"'returns', prompt 'chain_sum/x', sample 0: (ret|OverflowE)"):
        reward("returns").score([sample(text)])


def test_numbers_of_all_kinds_arrive_bit_for_bit():
    kinds = [
        sample(text) for text in ("True", "3", "0.1", "-1 / 3", "5e-324", "__import__('fractions').Fraction(1, 4)")
    ]
    assert [each.total for each in reward("returns").score(kinds)] == [1.0, 3.0, 0.1, -1 / 3, 5e-324, 0.25]


def test_a_number_of_numpy_is_a_number_and_a_tensor_is_none_and_what_torch_draws_depends_on_the_sample():
    names = ("returns_single_precision", "returns_a_tensor", "draws_a_tensor")
    built = reward(*(f"tensor_functions:{name}" for name in names))
    assert [*built.terms[0].outcomes([sample()])] == [Verdict(0.5)]
    draws = [*built.terms[2].outcomes([sample(), sample(index=1)])]
    assert draws[0] != draws[1]
    assert [*built.terms[2].outcomes([sample(index=1)])] == draws[1:]
    with pytest.raises(ValueError, match=r"'returns_a_tensor', .* returned tensor\(1\.\)"):
        built.score([sample()])


def test_output_is_shown_up_to_a_limit_and_holds_nothing_up(capsys: pytest.CaptureFixture[str]):
    assert [each.total for each in reward("prints_megabytes").score([sample(), sample("abcd")])] == [3.0, 4.0]
    shown = capsys.readouterr().err
    assert shown.startswith("xxx")
    assert shown.endswith("the rest is not shown\n")
    assert shown.count("x") == user_functions.SHOWN_BYTES


def test_a_function_gets_a_copy_of_its_sample_and_others_see_the_original():
    terms = [RewardTerm("mutates", 0.0, "hostile_functions:mutates"), RewardTerm("boxed")]
    terms += [RewardTerm("length", 0.0, "hostile_functions:length")]
    mine = sample("rubbish")
    assert (
        build_reward(RewardConfig(terms, success="boxed")).score([mine, mine])
        == [Score(0.0, {"mutates": 1.0, "boxed": 0.0, "length": 7.0}, "boxed: no answer")] * 2
    )
    assert mine.text == "rubbish"


def test_what_a_function_changes_stays_in_its_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "5")
    before = os.getcwd(), [*sys.path], signal.getsignal(signal.SIGTERM)
    assert [each.total for each in reward("changes_everything").score([sample(), sample()])] == [3.0, 3.0]
    assert (os.getcwd(), sys.path, signal.getsignal(signal.SIGTERM), os.environ["RANK"]) == (*before, "5")


def test_a_fork_that_comes_back_from_the_function_ends_and_the_original_goes_on():
    built = reward("forks", "length")
    assert built.score([sample("a" * n) for n in range(1, 4)]) == [
        Score(1.0 + n, {"forks": 1.0, "length": float(n)}) for n in range(1, 4)
    ]


def test_what_a_function_keeps_is_there_at_the_next_call():
    assert [each.total for each in reward("count").score([sample(), sample(), sample()])] == [1.0, 2.0, 3.0]


def test_a_function_sees_which_rank_it_works_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "5")
    assert value("rank", sample()) == 5.0


def test_what_a_function_draws_depends_on_run_term_and_sample_and_on_nothing_else():
    samples = [sample(index=i, version=v) for i in range(3) for v in range(2)]
    draws = "drawing_functions:draws"
    together = [each.total for each in reward(draws).score(samples)]
    assert len(set(together)) == len(samples)
    random.seed(1)
    assert value(draws, samples[5]) == together[5], "not on earlier calls, nor on this process"
    assert value(draws, samples[0], seed=1) != together[0]
    two_terms = [RewardTerm(name, 1.0, draws) for name in ("draws", "other")]
    (score,) = build_reward(RewardConfig(two_terms, success="other")).score(samples[:1])
    assert score.terms["draws"] == together[0] != score.terms["other"]


def test_a_function_that_needs_no_torch_has_none():
    assert value("modules", sample("torch")) == 0.0
    assert value("modules", sample("grpo_mega.types")) == 1.0
    routed = replace(sample("torch"), experts=torch.zeros(4, 2, 2, dtype=torch.int16))
    assert value("modules", routed) == 0.0


def test_strings_are_hashed_alike_in_every_run():
    assert value("hashes", sample()) == value("hashes", sample())


def test_when_memory_runs_out_the_function_is_to_go_first():
    assert value("first_to_go", sample()) == 1000
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000


def test_signals_for_the_rank_do_not_end_the_functions_but_their_children_obey_them():
    others = psutil.Process().children(recursive=True)  # of other tests, which may obey
    built = reward("length", "terminates_its_child")
    for process in psutil.Process().children(recursive=True):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if process not in others else ():
            kill(process, number)
    assert built.score([sample()]) == [Score(3.0 - signal.SIGTERM, {"length": 3.0, "terminates_its_child": -15.0})]


@pytest.mark.parametrize(
    ("missing", "fix"),
    [("own", "to PYTHONPATH"), ("own.rewards", "to PYTHONPATH"), ("tools", "to PYTHONPATH"), ("owner", "install it")],
)
def test_a_missing_module_may_be_the_function_s_or_one_that_it_imports(missing: str, fix: str):
    assert fix in import_fix("own.rewards:brevity, tools:convert", f"ModuleNotFoundError: No module named '{missing}'")


def test_a_module_that_exits_cannot_be_imported_and_nothing_is_left_of_it():
    before = set(psutil.Process().children(recursive=True))
    with refused("reward term 'mine' | cannot import 'exits_on_import:f': SystemExit: 0"):
        build_reward(RewardConfig([RewardTerm("mine", 1.0, "exits_on_import:f")], success="mine"))
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_module_whose_import_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_functions, "IMPORT_SECONDS", limit(2.0))
    with refused("reward term 'mine' | cannot import 'hangs_on_import:f': not done within"):
        build_reward(RewardConfig([RewardTerm("mine", 1.0, "hangs_on_import:f")], success="mine"))


def started(told: Path) -> list[psutil.Process]:
    """The processes whose numbers `orphans` has written, those that are still there."""
    numbers = [int(number) for number in told.read_text().split()]
    assert len(numbers) == 4
    return there(numbers)


@pytest.mark.parametrize("end", ["close", "del"])
def test_children_that_nobody_waits_for_end_with_the_reward(tmp_path: Path, end: str):
    functions = UserFunctions({"orphans": UserFunction("hostile_functions:orphans")}, 0, 600)
    assert [*functions.outcomes("orphans", [sample(str(tmp_path / "told"))])] == [Verdict(1.0)]
    processes = started(tmp_path / "told")
    assert len(processes) == 4
    if end == "close":
        functions.close()
    del functions
    assert left(processes) == []


def test_children_end_with_a_function_that_leaves(tmp_path: Path):
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        reward("orphans_and_leaves").score([sample(str(tmp_path / "told"))])
    assert left(started(tmp_path / "told")) == []


OWNER = """
import os, signal, sys
from array import array
from grpo_mega.reward.user_functions import UserFunction, UserFunctions
from grpo_mega.types import Prompt, Sample
sys.path[:0] = sys.argv[2:]
functions = UserFunctions({"orphans": UserFunction("hostile_functions:orphans")}, 0, 600)
sample = Sample(Prompt("p", (1,), "?", "8", "t"), 0, array("i"), array("f"), "stop", ((0, 0),), sys.argv[1])
print(*functions.outcomes("orphans", [sample]))
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os._exit(4)", 4),
        ("sys.exit(5)", 5),
        # Helpers that hold copies of all descriptors, as those of checkpoints do, keep no worker alive.
        ("os.fork() or os.execlp('sleep', 'sleep', '20'); os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("0 if os.fork() else signal.pause(); os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_nothing_outlives_the_rank_however_it_ends(tmp_path: Path, ending: str, code: int):
    told = tmp_path / "told"
    program = [sys.executable, "-W", "ignore", "-c", OWNER + ending, str(told), str(HERE)]
    parent = subprocess.Popen(program, start_new_session=True)
    try:
        assert parent.wait() == code
        assert left(started(told)) == []
    finally:
        for process in [p for p in psutil.process_iter() if _session(p) == parent.pid]:
            kill(process)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def test_a_fork_of_the_rank_that_ends_leaves_the_functions_to_the_rank():
    built = reward("length")
    child = os.fork()
    if child == 0:
        built.terms[0].outcomes.func.__self__.close()  # what the end of an interpreter does
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert built.score([sample()]) == [Score(3.0, {"length": 3.0})]

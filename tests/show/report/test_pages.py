"""The page in a browser: it opens from disk, draws, computes the library's advantages, and is safe and usable."""

from __future__ import annotations

import json
import math
import re
import struct
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import CHROMIUM, WITHOUT, Browser, browser
from forks import REPOSITORY
from runs_made import group, lines, made_run, with_machines
from tour import pictures
from train_jobs import SMALL, Job

from grpo_mega.algorithm.advantage import group_advantages
from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.environment.conversation import Conversation
from grpo_mega.observe.samples import sample_record
from grpo_mega.show.report.page import write_report
from grpo_mega.show.report.read import read_run
from grpo_mega.types import Prompt, Sample, Score

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)

TEXTS = [["2", "+", "3"], ["5"], ["<think>", "é", "</think>", "6"], ["7", "8"]]
REWARDS = [1.0, 0.2, 0.0, 0.3]
CALCULATOR = "grpo_mega.environment.calculator:calculate"
SET = """((index, value) => {
    const slider = document.querySelectorAll('.completion input[type=range]')[index];
    slider.value = value; slider.dispatchEvent(new Event('input'));
    return Number(slider.value);
})"""
ADVANTAGES = "[...document.querySelectorAll('#completions .completion')].map((card) => Number(card.dataset.advantage))"
BLANK = """[...document.querySelectorAll('.plot')].filter((plot) => plot.clientWidth).map((plot) => {
    const canvas = plot.querySelector('canvas');
    if (!canvas) return plot.getAttribute('aria-label');
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return data.some((value) => value) ? '' : plot.getAttribute('aria-label');
}).filter(Boolean)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of this file."""
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def opened(page: Browser, *runs: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Path:
    """Writes the report of these runs beside the first of them, and opens it."""
    file = runs[0].parent / f"{'-'.join(run.name for run in runs)}.html"
    write_report([read_run(run) for run in runs], file)
    page.errors.clear()
    page.requests.clear()
    page.open(file, width, height, dark)
    return file


def with_a_group(folder: Path, rewards: list[float | None] = REWARDS, **algorithm: Any) -> Path:  # type: ignore[assignment]
    return made_run(folder, samples={3: group(0, "2+3=?", rewards, TEXTS)}, algorithm=algorithm)


def see_everything(page: Browser) -> None:
    """Makes the window as high as the page, so that every curve comes into sight."""
    page.size(page.run("innerWidth"), 9000)
    page.settle()


def test_a_real_run_leaves_a_page_that_opens(page: Browser, tmp_path: Path) -> None:
    settings = [*SMALL, "layout=single", "run.steps=2", "run.name=real", "run.tensorboard=false"]
    ended = Job(tmp_path, settings).finish()
    assert ended.code == 0, ended
    file = tmp_path / "runs" / "real" / "report.html"
    page.open(file)
    see_everything(page)
    assert page.errors == []
    assert {*page.requests} == {file.as_uri()}
    assert page.run("document.querySelector('h1').textContent").startswith("Accuracy on problems it never trained on")
    assert page.run("document.querySelectorAll('.plot canvas').length") > 4
    assert page.run(BLANK) == []
    assert page.run("document.querySelectorAll('#completions .completion').length") > 0
    assert page.run("document.querySelectorAll('.note li').length") == 0


@pytest.mark.parametrize(
    ("baseline", "std"),
    [
        ("mean", "sample"), ("mean", "population"), ("mean", "none"), ("mean", "mean"), ("leave_one_out", "none"),
        ("optimal", "none"), ("leave_one_out", "sample"), ("optimal", "population"),
    ],
)  # fmt: skip
def test_sliders_give_the_advantages_of_the_library(page: Browser, tmp_path: Path, baseline: str, std: str) -> None:
    opened(page, with_a_group(tmp_path / "run", advantage_baseline=baseline, advantage_std=std))
    rewards = [*REWARDS]
    lengths = [len(text) for text in TEXTS]
    for index, value in ((None, None), (0, 0.7), (2, 1.25), (3, 0.2), (1, 1 / 3), (0, 1e-9)):
        if index is not None:
            rewards[index] = page.run(f"{SET}({index}, {value})")
            assert rewards[index] == pytest.approx(value)
        expected = group_advantages(torch.tensor(rewards, dtype=torch.float64), std, baseline, lengths).tolist()
        assert page.run(ADVANTAGES) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for index in range(4):  # equal rewards: exactly 0
        page.run(f"{SET}({index}, 0.5)")
    assert page.run(ADVANTAGES) == [0, 0, 0, 0]
    assert "nothing to learn" in page.run("document.querySelector('.statistics').textContent")
    page.run("document.querySelector('.reset').click()")
    recorded = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), std, baseline, lengths).tolist()
    assert page.run(ADVANTAGES) == pytest.approx(recorded, rel=1e-6, abs=1e-6)


def test_a_sample_without_a_score_is_no_part_of_its_group(page: Browser, tmp_path: Path) -> None:
    opened(page, with_a_group(tmp_path / "run", [1.0, None, 0.0, 0.5]))
    expected = group_advantages(torch.tensor([1.0, 0.0, 0.5]).double(), "sample").tolist()
    found = page.run("[...document.querySelectorAll('#completions .completion')].map((card) => card.dataset.advantage)")
    assert found[1] == ""
    assert [float(each) for each in found if each] == pytest.approx(expected, rel=1e-6)
    assert page.run("document.querySelectorAll('.completion input')[1].disabled")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"advantage_baseline": "critic"}, "a critic says"),
        ({"advantage_baseline": "batch"}, "all samples of the step"),
        ({"advantage_std": "batch"}, "a deviation over the whole step"),
        ({"terms_apart": True}, "each term is normalised apart"),
        ({"supervision": "process"}, "the steps of a completion"),
        ({"kl_in": "reward", "kl_coef": 0.1}, "the KL term"),
        ({"advantage_std": "median"}, "does not know this estimator"),
    ],
)
def test_estimators_that_need_more_than_the_group_say_so(
    page: Browser, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    opened(page, with_a_group(tmp_path / "run", **settings))
    assert reason in page.run("document.querySelector('.statistics').textContent")
    assert page.run("[...document.querySelectorAll('.completion input')].every((slider) => slider.disabled)")
    assert page.errors == []


def test_tokens_take_the_colours_that_are_chosen(page: Browser, tmp_path: Path) -> None:
    opened(page, with_a_group(tmp_path / "run"))
    colours = "[...document.querySelectorAll('.completion .text span')].map((span) => span.style.background)"
    names = page.run("[...document.querySelectorAll('#completions select')].at(-1).length")
    assert names == 6, "advantage, push, ratio, engine, entropy, surprise; and no reference"
    seen = {json.dumps(page.run(colours))}
    for index in range(1, names):
        page.run(
            f"(() => {{ const s = [...document.querySelectorAll('#completions select')].at(-1);"
            f" s.selectedIndex = {index};"
            " s.dispatchEvent(new Event('change')); })()"
        )
        seen.add(json.dumps(page.run(colours)))
    assert len(seen) == names
    assert page.errors == []


def test_given_tokens_are_marked_and_have_no_numbers(page: Browser, tmp_path: Path) -> None:
    run = with_a_group(tmp_path / "run")
    records = group(0, "2+3=?", REWARDS, TEXTS)
    records[0]["given"] = [[1, 2]]
    for name in ("engine_logprobs", "old_logprobs", "new_logprobs", "entropies"):
        records[0][name][1] = None
    (run / "samples" / "step-000003.jsonl").write_text(lines(records))
    opened(page, run)
    spans = "[...document.querySelectorAll('.completion .text')[0].children]"
    first = f"{spans}.map((span) => [span.className, span.style.background])"
    (own, own_colour), given, _ = page.run(first)
    assert own == ""
    assert own_colour
    assert given == ["given", ""]
    page.run("document.querySelector('.completion .text').focus()")
    page.press("ArrowRight", 2)
    assert page.run("document.querySelector('.completion .text ~ .read').textContent").endswith("given, not learned ")
    assert page.errors == []


def test_calls_and_replies_are_blocks_and_errors_are_coloured(page: Browser, tmp_path: Path) -> None:
    run = with_a_group(tmp_path / "run")
    tokenizer = CharTokenizer([*"[]; ", *"abcdefghijklmnopqrstuvwxyz"])
    calculator = EnvironmentConfig(CALCULATOR, open="[", close="]", reply="{reply};", max_reply_tokens=16, at_once=1)
    begun = Sample(Prompt("p", (1,), "?", "5", "sums"), 0, array("i"), array("f"), "stop", ((0, 0),), "")
    with closing(Conversation(calculator, tokenizer, 200, 0)) as conversation:
        for turn in ("3=[37*48]", "[3*]", "5[1+1]", "6"):
            ids = array("i", tokenizer.encode(turn))
            said = replace(
                begun, token_ids=begun.token_ids + ids, logprobs=begun.logprobs + array("f", [-1.0] * len(ids))
            )
            (begun,) = conversation.go_on([replace(said, finish_reason="stop")], 200)
    # As if an agent had changed its chat after the last call.
    ended = replace(begun, text=tokenizer.decode(begun.token_ids), restarts=(begun.given[2][0],))
    record = sample_record(ended, Score(1.0, {"accuracy": 1.0}), 0, tokenizer.decode)
    assert [call["error"] for call in record["calls"]] == [False, True, False]
    (run / "samples" / "step-000003.jsonl").write_text(lines([record, *group(0, "2+3=?", REWARDS, TEXTS)[1:]]))
    opened(page, run)
    text = "document.querySelectorAll('.completion .text')[0]"
    blocks = page.run(f"[...{text}.querySelectorAll('.turn')].map((one) => [one.dataset.what, one.textContent])")
    assert [what for what, _ in blocks] == ["call", "reply", "call", "error", "call", "new context"]
    assert [said for what, said in blocks if what == "call"] == ["37*48]", "3*]", "1+1]"]
    assert (blocks[1][1], blocks[3][1][:6], blocks[5][1]) == ("1776;", "error:", "2;")
    assert page.run(f"{text}.textContent") == ended.text
    reply, error = (
        page.run(f"getComputedStyle({text}.querySelector('.{what}')).backgroundColor") for what in ("reply", "error")
    )
    assert reply != error
    page.run(f"{text}.focus()")
    page.press("ArrowRight", 4)
    assert page.run(f"{text}.querySelector('.now').parentElement.dataset.what") == "call"
    assert page.errors == []


def test_tokens_of_earlier_weights_are_coloured_by_their_age(page: Browser, tmp_path: Path) -> None:
    """In a run without slices no completion has ages, and there is nothing to choose."""
    run = with_a_group(tmp_path / "run")
    records = group(0, "2+3=?", REWARDS, TEXTS)
    records[2]["ages"] = [4, 2, None, 0]
    (run / "samples" / "step-000003.jsonl").write_text(lines(records))
    opened(page, run)
    select = "[...document.querySelectorAll('#completions select')].at(-1)"
    assert page.run(f"{select}.options[{select}.length - 1].textContent").startswith("Age: ")
    page.run(f"(() => {{ const s = {select}; s.value = 'age'; s.dispatchEvent(new Event('change')); }})()")
    texts = "[...document.querySelectorAll('.completion .text')]"
    colours = page.run(f"{texts}.map((text) => [...text.children].map((span) => span.style.background))")
    older, old, given, newest = colours.pop(2)
    assert "" != older != old != ""
    assert {given, newest, *(colour for of_answer in colours for colour in of_answer)} == {""}
    assert page.run("document.querySelector('.legend').textContent").endswith("older than those of the step.04")
    page.run(f"{texts}[2].focus()")
    page.press("ArrowRight", 2)
    assert page.run(f"{texts}[2].nextSibling.textContent").endswith("age +2")
    assert page.errors == []


def test_tokens_that_have_advantages_of_their_own_are_coloured_by_them(page: Browser, tmp_path: Path) -> None:
    run = with_a_group(tmp_path / "run", advantage_baseline="critic")
    records = group(0, "2+3=?", REWARDS, TEXTS)
    for record, texts in zip(records, TEXTS, strict=True):
        record["advantages"] = [1.0 - at for at in range(len(texts))]
    (run / "samples" / "step-000003.jsonl").write_text(lines(records))
    opened(page, run)
    page.run("document.querySelector('.completion .text').focus()")
    page.press("ArrowRight", 3)
    assert page.run("document.querySelector('.completion .text ~ .read').textContent").startswith(
        "“3” advantage \u22121"
    )
    first = "[...document.querySelectorAll('.completion .text')[0].children].map((span) => span.style.background)"
    up, none, down = page.run(first)
    assert len({up, none, down}) == 3
    assert none == ""


def test_the_keyboard_reaches_everything(page: Browser, tmp_path: Path) -> None:
    opened(page, with_machines(with_a_group(tmp_path / "run")))
    reachable = page.run(
        "[...document.querySelectorAll('a, button, select, input, summary, [tabindex=\"0\"]')]"
        ".filter((element) => !element.disabled && element.checkVisibility()).length"
    )
    page.run("window.reached = new Set()")
    for _ in range(reachable + 3):
        page.press("Tab")
        page.run("window.reached.add(document.activeElement) && 1")
    page.run("window.reached.delete(document.body)")
    assert page.run("window.reached.size") == reachable
    page.run("document.querySelector('.plot').focus()")
    page.press("ArrowRight", 2)
    assert page.run("document.querySelector('.chart .read').textContent").startswith("Step 2 ·")
    page.press("End")
    assert page.run("document.querySelector('.chart .read').textContent").startswith("Step 8 ·")
    before = page.run(ADVANTAGES)
    page.run("document.querySelector('.completion input').focus()")
    page.press("ArrowLeft", 5)
    assert page.run(ADVANTAGES) != before
    page.run("document.querySelector('.completion .text').focus()")
    page.press("ArrowRight", 2)
    assert page.run("document.querySelector('.completion .text ~ .read').textContent").startswith("“+” advantage")
    page.run("document.querySelector('#experts .map').focus()")
    page.press("ArrowLeft", 2)
    page.press("ArrowDown")
    assert page.run("document.querySelector('#experts .read').textContent").startswith("Step 7 · layer 2 · ")
    page.run("document.getElementById('theme').focus()")
    page.press("Enter")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    ink = "getComputedStyle(document.querySelector('.tile')).backgroundColor"
    on_screen = page.run(ink)
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run(ink) == "rgb(255, 255, 255)" != on_screen, "paper is light"
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run(ink) == on_screen


HOSTILE = [
    "</script><script>window.hurt = 1</script>", "<img src=x onerror='window.hurt = 1'>", "<!-- <script>",
    "\u2028\u2029]]>{{7*7}}", "\u202etxt.exe\u202c\u200f", "\x00\x07\x1b[31m\x7f\r", "\ud800 lone", "x" * 1_000_000,
    "W" * 5000, "\n" * 3000, "javascript:window.hurt=1", "@@SCRIPT@@", "مرحبا بالعالم",
]  # fmt: skip


def test_hostile_text_is_inert(page: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    records = group(0, HOSTILE[0], [1.0, *([0.0] * (len(HOSTILE) - 1))], [[text] for text in HOSTILE])
    for record, text in zip(records, HOSTILE, strict=True):
        record |= {"reason": text, "answer": HOSTILE[1], "terms": {HOSTILE[1]: 1.0}, "finish_reason": text}
    (run / "samples" / "step-000001.jsonl").write_text(lines(records))
    (run / "samples" / "followed-000000.jsonl").write_text(lines(records))
    alarm = {"step": 2, "name": HOSTILE[0], "value": 1.0, "threshold": 0.5, "message": HOSTILE[1], "action": HOSTILE[4]}
    (run / "alarms.jsonl").write_text(lines([alarm, {"step": 3, "name": HOSTILE[0], "cleared": True}]))
    (run / "metrics.jsonl").open("a").write(lines([{"step": 9, HOSTILE[1]: 1.0}]) + HOSTILE[0])
    with_machines(run, [text for text in HOSTILE if len(text) < 100])
    (run / "experts.jsonl").open("a").write(lines([{"step": 9, "loads": {HOSTILE[0]: [HOSTILE[1]]}}]))
    for width in (1280, 390):
        file = opened(page, run, width=width)
        see_everything(page)
        assert page.errors == []
        assert {*page.requests} == {file.as_uri()}
        assert page.run("window.hurt") is None
        assert page.run("document.querySelectorAll('img, script:not([id]), iframe, object').length") == 2
        assert page.run("document.documentElement.scrollWidth") == width
        assert page.run("document.querySelectorAll('#completions .completion').length") == len(HOSTILE)
        assert "\u202e" not in page.run("document.body.innerText")
    assert file.stat().st_size < 1_000_000


OF_OBJECTS = ("constructor", "__proto__", "toString", "hasOwnProperty", "valueOf")
"""Names that every ordinary object of JavaScript has."""


def test_names_that_objects_have_are_names_like_others(page: Browser, tmp_path: Path) -> None:
    """Of two runs, only one has metrics, terms, phases and results of these names."""
    named = dict.fromkeys(OF_OBJECTS, 0.25)
    records = group(0, "2+3=?", [1.0, 0.0], [["5"], ["6"]])
    records[0]["terms"] = named
    run = made_run(tmp_path / "run", samples={8: records, 7: records})
    (run / "samples" / "followed-000000.jsonl").write_text(lines(records))
    times = {f"time/{name}": 0.25 for name in OF_OBJECTS}
    (run / "metrics.jsonl").open("a").write(lines([{"step": 9, **named, **times}]))
    (run / "summary.json").write_text(json.dumps(named))
    alarms = [{"step": 2, "name": name, "message": name} for name in OF_OBJECTS]
    (run / "alarms.jsonl").write_text(lines(alarms))
    for runs in ([run], [run, made_run(tmp_path / "other", algorithm={"group_size": 2})]):
        opened(page, *runs)
        page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; }); 1")
        see_everything(page)
        assert page.errors == []
        assert page.run(BLANK) == []
        for name in OF_OBJECTS:
            label = f"document.querySelector('[data-metric=\"{name}\"] .plot').getAttribute('aria-label')"
            assert page.run(label) == f"{name}. run: 0.25 at step 9, 0.25 at step 9. Arrow keys read single steps."
            assert f"{name} 0.25" in page.run(
                "document.querySelector('.chips').textContent.replaceAll('0.25', '0.25 ')"
            )
            assert name in page.run("document.getElementById('time').innerText")
        if len(runs) > 1:
            rows = page.run("[...document.querySelectorAll('#comparison tbody tr')].map((row) => row.innerText)")
            assert {f"{name}\t0.25\t\u2013" for name in OF_OBJECTS} <= {*rows}


def test_the_largest_numbers_are_drawn(page: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", samples={8: group(0, "2+3=?", [1e300, -1e300, 1e308], [["5"], ["6"], ["7"]])})
    large = {"a": 1e300, "b": -1e300, "time/x": 1e300, "time/y": 1e300}
    (run / "metrics.jsonl").open("a").write(lines([{"step": 9, **large}, {"step": 10, "a": -1e300, "time/x": 1e300}]))
    (run / "summary.json").write_text(json.dumps({"world_size": 1e300, "seconds": {"a": 1e308, "b": 1e300}}))
    opened(page, run)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; }); 1")
    see_everything(page)
    assert page.errors == []
    text = page.run("document.body.innerText")
    assert "1e+300 processes" in text
    assert "NaN" not in text


def test_alarms_stand_at_their_step(page: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    alarm = {"step": 2, "name": "entropy_collapse", "value": 0.1, "threshold": 0.2, "message": "low", "action": "raise"}
    (run / "alarms.jsonl").write_text(lines([alarm, {"step": 5, "name": "entropy_collapse", "cleared": True}]))
    opened(page, run)
    text = page.run("document.getElementById('alarms').textContent")
    assert text == "1 alarmStep 2: entropy_collapse low raise Over at step 5."
    page.run("document.querySelector('.plot').focus()")
    page.press("ArrowRight", 2)
    assert page.run("document.querySelector('.chart .read').textContent").endswith("alarm: entropy_collapse")


def test_earlier_stages_have_curves_of_their_own(page: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    alarm = {"step": 2, "name": "entropy_collapse", "value": 0.1, "threshold": 0.2, "message": "low", "action": "raise"}
    (run / "alarms.jsonl").write_text(lines([alarm]))
    opened(page, run)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    see_everything(page)
    read = """((metric) => {
        const card = document.querySelector(`[data-metric="${metric}"]`), plot = card.querySelector('.plot');
        for (const key of ['Home', 'ArrowRight']) plot.dispatchEvent(new KeyboardEvent('keydown', { key }));
        return card.querySelector('.read').textContent;
    })"""
    seconds = read_run(run).metrics[2]["time/step"]
    assert page.run(f"{read}('time/step')") == f"Step 2 · {seconds:.4g} s · alarm: entropy_collapse"
    assert page.run(f"{read}('sft: time/step')") == "Step 2 · 500 s"
    assert page.run(f"{read}('sft/loss')").startswith("Step 2 · 0.5")
    assert "alarm" not in page.run(f"{read}('sft/loss')")
    assert "Others" not in page.run("document.getElementById('curves').textContent")
    assert "sft" not in page.run("document.getElementById('time').textContent")


def test_pushes_know_no_bound(page: Browser, tmp_path: Path) -> None:
    """The first token has a ratio of e at a positive advantage, the second of 1 / e at a negative one."""
    records = group(0, "2+3=?", [1.0, 0.0], [["a"], ["b"]])
    for record, log in zip(records, (1.0, -1.0), strict=True):
        record |= {"old_logprobs": [-2.0], "new_logprobs": [log - 2.0]}
    up, down = math.sqrt(0.5) * math.e, -math.sqrt(0.5) / math.e
    for name, bounds, pushes in (
        ("high", {"clip_high": math.inf}, (up, 0.0)),
        ("low", {"clip_low": math.inf, "clip_high": 0.2}, (0.0, down)),
    ):
        opened(page, made_run(tmp_path / name, samples={1: records}, algorithm=bounds))
        for index, push in enumerate(pushes):
            page.run(f"document.querySelectorAll('#completions .completion .text')[{index}].focus()")
            page.press("ArrowRight")
            read = page.run(f"document.querySelectorAll('#completions .completion .read')[{index}].textContent")
            shown = re.search(r"push (\S+)", read.replace("\u2212", "-"))
            assert shown is not None, read
            assert float(shown[1]) == pytest.approx(push, rel=1e-3)
        assert page.errors == []


def test_a_teacher_decides_token_by_token(page: Browser, tmp_path: Path) -> None:
    records = group(0, "2+3=?", REWARDS, TEXTS)
    run = made_run(tmp_path / "run", samples={3: records}, distill={"teacher": "runs/large", "reward_coef": 0.0})
    opened(page, run)
    assert "a teacher's log-probabilities decide" in page.run("document.querySelector('.statistics').textContent")
    assert page.run("[...document.querySelectorAll('.completion input')].every((slider) => slider.disabled)")
    summary = page.run("document.getElementById('summary').textContent")
    assert "problems and moved towards what its teacher finds likely." in summary


def test_followed_problems_say_what_is_left_out(page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run")
    records = [record for number in range(4) for record in group(number, f"{number}?", [1.0, 0.0], [["5"], ["6"]])]
    for step in range(6):
        (run / "samples" / f"followed-{step:06d}.jsonl").write_text(lines(records))
    size = (run / "samples" / "followed-000000.jsonl").stat().st_size
    opened(page, run)
    assert page.run("document.querySelectorAll('#followed .note').length") == 0
    monkeypatch.setattr("grpo_mega.show.report.read.SAMPLES_BUDGET", 3 * size)
    monkeypatch.setattr("grpo_mega.show.report.pack.SAMPLES_BUDGET", 3)
    opened(page, run)
    note = page.run("document.querySelector('#followed .note').textContent")
    assert note.startswith("Completions of 3 of 6 evaluations are in this page")
    assert "9 groups of these evaluations are left out" in note


@pytest.mark.parametrize(
    "lost", [["config.yaml"], ["metrics.jsonl"], ["summary.json"], ["config.yaml", "summary.json"]]
)
def test_what_is_not_whole_is_shown_as_it_is(page: Browser, tmp_path: Path, lost: list[str]) -> None:
    run = with_a_group(tmp_path / "run")
    for name in lost:
        (run / name).unlink()
    opened(page, run)
    see_everything(page)
    assert page.errors == []
    notes = page.run("document.querySelector('.note').textContent")
    assert all(name in notes for name in lost)


def test_several_runs_and_seeds(page: Browser, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"seed{seed}", seed=seed) for seed in range(3)]
    other = made_run(tmp_path / "other", algorithm={"advantage_std": "none"})
    opened(page, *runs, other)
    see_everything(page)
    assert page.errors == []
    assert page.run(BLANK) == []
    text = page.run("document.getElementById('comparison').innerText")
    assert "seed0 and 2 other seeds" in text
    assert "algorithm.advantage_std" in text
    assert "3 seeds)" in text


def test_runs_of_one_seed_are_no_seeds(page: Browser, tmp_path: Path) -> None:
    opened(page, made_run(tmp_path / "a"), made_run(tmp_path / "b"))
    text = page.run("document.getElementById('comparison').innerText")
    assert "a and 1 other run" in text
    assert "other seed" not in text


@pytest.mark.long
def test_seeds_of_unequal_length_are_one_line_between_them(page: Browser, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"seed{seed}", steps=steps, seed=seed) for seed, steps in enumerate((10_000, 9_000))]
    for run, level in zip(runs, (1.0, 3.0), strict=True):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text(
            lines([record | {"policy/kl": level} if "policy/kl" in record else record for record in records])
        )
    opened(page, *runs)
    curve = page.run("curveOf(families(data.runs)[0], 'policy/kl')")
    assert curve["band"]
    assert (curve["steps"][0], curve["steps"][-1]) == (1, 10_000)
    both = [index for index, step in enumerate(curve["steps"]) if step <= 9_000]
    assert len(both) > 600, "points of both"
    for part, level in (("mean", 2.0), ("low", 1.0), ("high", 3.0)):
        assert [curve[part][index] for index in both] == pytest.approx([level] * len(both))
        assert {*curve[part][len(both) :]} == {1.0}, "where one seed is left"
    assert page.errors == []


AXE = (files("axe_core_python") / "axe.min.js").read_text()
VIOLATIONS = """axe.run().then(({ violations }) => violations.flatMap(
    ({ id, impact, nodes }) => nodes.map((node) => `${impact} ${id}: ${node.html.slice(0, 200)}`)))"""


def violations(page: Browser) -> list[str]:
    """What axe-core finds in the page that keeps people from using it, one with closed eyes or weak ones among them."""
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    see_everything(page)
    page.run(f"{AXE}; 1")
    return page.run(VIOLATIONS)


@pytest.mark.parametrize(
    ("width", "dark"),
    [(1280, False), (390, True), *(pytest.param(*each, marks=pytest.mark.long) for each in
     ((1280, True), (768, False), (768, True), (390, False)))],
)  # fmt: skip
def test_everybody_can_use_it_at_any_width(page: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    run = with_a_group(tmp_path / "run")
    (run / "samples" / "followed-000000.jsonl").write_text(lines(group(0, "2+3=?", REWARDS, TEXTS)))
    (run / "summary.json").unlink()
    opened(page, with_machines(run), width=width, dark=dark)
    assert violations(page) == []
    assert page.run("document.documentElement.scrollWidth") == width
    assert page.run(BLANK) == []
    assert page.errors == []


def test_everybody_can_use_a_comparison(page: Browser, tmp_path: Path) -> None:
    opened(page, with_a_group(tmp_path / "a"), made_run(tmp_path / "b", steps=5, seed=1))
    assert violations(page) == []
    page.run("document.querySelector('#curves header h3').style.color = '#bbbbbb'; 1")
    assert [found[: found.index(":")] for found in violations(page)] == ["serious color-contrast"], "axe looks"


def test_a_search_finds_curves_by_name_and_meaning(page: Browser, tmp_path: Path) -> None:
    opened(page, with_a_group(tmp_path / "run"))
    page.run("(() => { const s = document.querySelector('input[type=search]'); s.value = 'entropy';"
             " s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    page.settle()
    names = (
        "[...document.querySelectorAll('#curves .chart')].filter((c) => c.offsetParent).map((c) => c.dataset.metric)"
    )
    assert page.run(names) == ["policy/entropy"]


@pytest.mark.long
def test_ten_thousand_steps_are_one_small_page(page: Browser, tmp_path: Path) -> None:
    ten = [*REWARDS, *REWARDS, 0.1, 0.9], [*TEXTS, *TEXTS, ["1"], ["2"]]
    run = made_run(tmp_path / "run", steps=10_000, samples={n: group(0, "2+3=?", *ten) for n in range(1, 10_001)})
    with_machines(run, experts=4096)
    file = opened(page, run)
    see_everything(page)
    assert file.stat().st_size < 15_000_000
    assert page.errors == []
    assert page.run(BLANK) == []
    text = page.run("document.body.innerText")
    assert "of up to 10,000 steps are drawn with fewer points" in text
    assert "of 10,000 steps are in this page, evenly spread" in text
    points = page.run(
        "[...document.querySelectorAll('.chart')].filter((card) => card.innerText.includes("
        "'Each point is up to 17 steps: line their mean, band from lowest to highest.'"
        ")).map((card) => card.dataset.metric)"
    )
    assert "reward/mean" in points
    assert "eval/heldout/accuracy" not in points


@pytest.mark.long
def test_the_tour_has_a_picture_for_each_of_its_steps(tmp_path: Path) -> None:
    run = with_a_group(tmp_path / "run")
    (run / "samples" / "followed-000000.jsonl").write_text(lines(group(0, "2+3=?", REWARDS, TEXTS)))
    taken = pictures(run, tmp_path / "tour")
    told = re.findall(r"images/tour/(\S+\.png)", (REPOSITORY / "docs" / "tour.md").read_text())
    assert [file.name for file in taken] == told
    assert len(told) == 10
    for file in taken:
        width, height = struct.unpack(">II", file.read_bytes()[16:24])  # of PNG's first chunk
        assert min(width, height) > 100, file.name

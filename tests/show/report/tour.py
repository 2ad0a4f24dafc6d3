"""Takes the pictures of docs/tour.md of a run's report, in a headless Chromium.

    PYTHONPATH=.:tests:tests/show/report python tests/show/report/tour.py runs/tiny docs/images/tour

The run needs completions of some steps, evaluations and log-probs of tokens, as any run with the usual settings has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import Browser, browser

from grpo_mega.show.report.page import write_report
from grpo_mega.show.report.read import read_run

WIDTH = 1000
GROUP = "#completions > div:last-of-type"
A_GROUP_THAT_TEACHES = """(() => {
    const says = (words) => document.querySelector('#completions .statistics').textContent.includes(words);
    const earlier = () => document.querySelector('[data-walk="-1"]');
    while (says('nothing to learn') && !earlier().disabled) earlier().click();
})()"""
COLOUR_BY_PUSH = """(() => {
    const labels = [...document.querySelectorAll('#completions label')];
    const select = labels.find((label) => label.textContent.startsWith('Colour tokens by')).control;
    select.value = [...select.options].find((option) => option.text.startsWith('Push')).value;
    select.dispatchEvent(new Event('change'));
})()"""
READ_A_TOKEN_OF_THE_BEST = """(() => {
    const cards = [...document.querySelectorAll('#completions .completion')];
    const best = cards.reduce((a, b) => (Number(b.dataset.advantage) > Number(a.dataset.advantage) ? b : a));
    best.id = 'best';
    best.querySelectorAll('.text span')[1].dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
})()"""
TAKE_ITS_REWARD_AWAY = """(() => {
    const slider = document.querySelector('#best input[type=range]');
    slider.value = 0;
    slider.dispatchEvent(new Event('input'));
})()"""
PICTURES = {
    "1-summary": ("#summary", ""),
    "2-curves": ("#curves .grid:not(:empty)", ""),
    "3-a-step": ("#curves .chart", "document.querySelector('#curves .plot').focus()"),
    "4-time": ("#time", ""),
    "5-followed": ("#followed", ""),
    "6-a-group": ("#completions", A_GROUP_THAT_TEACHES),
    "7-push": (GROUP, COLOUR_BY_PUSH),
    "8-a-token": ("#best", READ_A_TOKEN_OF_THE_BEST),
    "9-another-reward": (GROUP, TAKE_ITS_REWARD_AWAY),
    "10-settings": ("#settings", "document.querySelector('#settings details').open = true"),
}
"""Name of a picture -> the part of the page that it shows, and what is done to the page before."""
HIGHEST = 900
"""Pixels; of a longer part the picture shows the beginning."""


def pictures(run: Path, folder: Path) -> list[Path]:
    """Writes the pictures of a run into the folder, which is made; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as own:
        write_report([read_run(run)], Path(own) / "report.html")
        with browser(Path(own) / "profile") as page:
            page.open(Path(own) / "report.html", WIDTH)
            page.size(WIDTH, 9000)  # every curve comes into sight, and is drawn
            page.settle()
            return [_picture(page, folder / f"{name}.png", *PICTURES[name]) for name in PICTURES]


def _picture(page: Browser, file: Path, part: str, script: str) -> Path:
    if script:
        page.run(f"{script}; 1")
    if "focus" in script:
        page.press("End")
    page.settle()
    at = page.run(f"document.querySelector('{part}').getBoundingClientRect().toJSON()")
    top = at["y"] + page.run("scrollY")
    clip = {"x": at["x"] - 8, "y": top - 8, "width": at["width"] + 16, "height": min(HIGHEST, at["height"] + 16)}
    page.picture(file, clip=clip | {"scale": 1})
    return file


if __name__ == "__main__":
    for file in pictures(Path(sys.argv[1]), Path(sys.argv[2])):
        print(f"{file} ({file.stat().st_size / 1e3:.0f} kB)")

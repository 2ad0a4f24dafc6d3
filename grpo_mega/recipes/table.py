"""A recipe's progress as text: a line for each stage."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_mega.recipes.progress import DONE, RecipeProgress
from grpo_mega.recipes.recipe import Recipe

SHARES = ("accuracy", "format", "pair_accuracy")
"""Results shown in percent."""


def table(recipe: Recipe, known: Mapping[str, RecipeProgress]) -> list[str]:
    """A line about the recipe, and one for each stage: state, seconds of its last start, results."""
    done = [one for one in known.values() if one.state == DONE]
    width = max(map(len, known))
    lines = [f"{recipe.name} in {recipe.root}: {len(done)} of {len(known)} stages are done"]
    for number, (name, one) in enumerate(known.items(), start=1):
        seconds = one.report.get("seconds", 0)
        took = f"{seconds:6,.0f} s" if seconds else " " * 8
        lines.append(f"{number:4}  {name:{width}}  {one.state:7}  {took}  {_words(one)}".rstrip())
    return lines


def _words(one: RecipeProgress) -> str:
    if one.why:
        return one.why
    if one.report and one.report["words"] is None:
        return f"put in its place by hand: {one.product}"
    return ", ".join(_written(name, value) for name, value in one.report.get("achieved", {}).items())


def _written(name: str, value: float) -> str:
    words = name.replace("_", " ")
    if name in SHARES:
        return f"{words} {value:.1%}"
    return f"{value:,} {words}" if isinstance(value, int) else f"{words} {value:.4g}"

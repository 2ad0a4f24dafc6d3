"""The library reasoning-gym (Stojanovski et al., 2025, arXiv 2505.24760): its tasks, generated items, and scorers.

An item is a function of the task, its settings, a seed and its number, so every rank and every restart generates the
same problems, regardless of the run's seed. Answers are untrusted text read by third-party code: only vetted tasks are
scored, whose scorers never execute the answer, and only in the guarded process of `reward`. Each task was reviewed
in the release `RELEASE`: other releases are refused, as their scorers may differ. The library is optional, and imported
only when a source or a reward term asks for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib import metadata
from io import StringIO
from typing import Any

from grpo_mega.errors import InputError

COLUMN = "reasoning_gym"
"""Column of generated rows, and key of a prompt's metadata, with the input of the task's scorer:
{"task": name, "entry": {"question", "answer", "metadata"}}."""

RELEASE = "0.1.25"

VETTED: tuple[str, ...] = (
    "ab", "advanced_geometry", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "bf", "binary_alternation",
    "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "color_cube_rotation", "count_bits",
    "count_primes", "course_schedule", "cryptarithm", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "fraction_simplification", "gcd", "group_anagrams", "jugs", "kakurasu", "knights_knaves",
    "largest_island", "lcm", "leg_counting", "letter_counting", "mahjong_puzzle", "manipulate_matrix", "maze",
    "mini_sudoku", "modulo_grid", "needle_haystack", "number_filtering", "number_sequence", "palindrome_generation",
    "palindrome_partitioning", "path_star", "power_function", "prime_factorization", "products", "quantum_lock",
    "rectangle_count", "rotate_matrix", "rotten_oranges", "self_reference", "sentence_reordering", "shortest_path",
    "simple_equations", "simple_geometry", "spell_backward", "string_manipulation", "string_splitting",
    "string_synthesis", "sudoku", "survo", "syllogism", "time_intervals", "tower_of_hanoi", "tsumego",
    "word_sequence_reversal",
)  # fmt: skip
"""Vetted tasks: items are a function of seed and number; scorers execute nothing, give the full score to the reference
answer and, except for the rounding that a task allows, to no wrong one."""

_EXECUTES = "its scorer executes the answer, or what a file of problems says"
_GENEROUS = "its scorer gives the full score to wrong answers"
_DRAWS = "it makes other problems in every process"
_FOREIGN = "its scorer does not give the full score to its own answer, once that has been stored as JSON"
_SLOW = "making or scoring one problem takes tenths of a second or more"
REFUSED: dict[str, str] = (
    dict.fromkeys(
        ("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens",
         "number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
         "string_insertion"),
        _EXECUTES,
    )
    | dict.fromkeys(
        ("complex_arithmetic", "decimal_arithmetic", "figlet_font", "game_of_life", "game_of_life_halting",
         "letter_jumble", "number_format", "polynomial_equations", "pool_matrix", "word_sorting"),
        _GENEROUS,
    )
    | dict.fromkeys(("isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder"), _DRAWS)
    | dict.fromkeys(
        ("arc_agi", "boxnet", "graph_color", "gsm_symbolic", "propositional_logic", "rearc", "rubiks_cube",
         "rush_hour"),
        _FOREIGN,
    )
    | {
        "codeio": "it runs the programs of a data set to make its problems",
        "composite": "it combines several tasks, each of which can be a separate source",
    }
    | dict.fromkeys(("acre", "coin_flip", "futoshiki", "sokoban", "zebra_puzzles"), _SLOW)
)  # fmt: skip
"""Tasks that cannot be trained on -> reason."""


def why_refused(task: str) -> str:
    """Why a task cannot be trained on, and what to choose instead; empty when it can."""
    if task in VETTED:
        return ""
    why = REFUSED.get(task, f"reasoning-gym {RELEASE} has no such task")
    return f"{why}; choose one of {', '.join(VETTED)}"


def check_installed() -> None:
    """Raises InputError unless the library is installed in the reviewed release."""
    try:
        release = metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        release = "none"
    if release != RELEASE:
        raise InputError(
            "reasoning-gym",
            f"tasks were reviewed in release {RELEASE}, and {release} is installed",
            f"pip install reasoning-gym=={RELEASE}",
        )


class PuzzleItems:
    """Items of a task, by number from 0: {"prompt", "answer", COLUMN: input of the scorer}."""

    def __init__(self, task: str, options: Mapping[str, Any], seed: int, size: int, where: str) -> None:
        """Raises InputError, which begins with the setting `where`, when the task rejects the options."""
        import reasoning_gym

        self._task, self._options, self._seed, self._where = task, options, seed, f"{where}={options}"
        # Some tasks print, and constructors report wrong settings by exceptions of any type, assertions among them.
        try:
            with redirect_stdout(StringIO()):
                self._items = reasoning_gym.create_dataset(task, **options, seed=seed, size=size)
        except Exception as error:
            raise InputError(self._where, f"{task} rejects them: {error}", "correct them") from error

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One item, converted to JSON, as the scorer will get it. Raises InputError when the task cannot make it."""
        try:
            with redirect_stdout(StringIO()):
                item = self._items[number]
            # The scorer must see exactly what it will see after the item has been stored as JSON: a tuple is a list
            # then.
            entry = json.loads(json.dumps({name: item[name] for name in ("question", "answer", "metadata")}))
        # Some settings fail only when an item is made.
        except Exception as error:
            what = f"{self._task} cannot make item {self._seed + number} with them: {error!r}"
            raise InputError(self._where, what, "choose different options") from error
        return {"prompt": item["question"], "answer": item["answer"], COLUMN: {"task": self._task, "entry": entry}}


def checked_entry(puzzle: object) -> tuple[str, dict[str, Any]]:
    """Task and entry in a prompt's metadata. Raises InputError when it has none, or the task is not vetted."""
    where = f"metadata[{COLUMN!r}]"
    if not isinstance(puzzle, dict) or not isinstance(puzzle.get("entry"), dict):
        raise InputError(where, "missing", "take the problem from a source with data.sources.NAME.reasoning_gym=TASK")
    task, entry = puzzle.get("task"), puzzle["entry"]
    if why := why_refused(str(task)):
        what, _, fix = why.partition("; ")
        raise InputError(f"{where}['task']={task!r}", what, fix)
    if missing := {"question", "answer", "metadata"} - entry.keys():
        raise InputError(f"{where}['entry']", f"has no {min(missing)!r}", "generate the problem again")
    return str(task), entry


@functools.cache
def scorer_of(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The task's scorer of (answer, entry), with its default settings, which no vetted scorer reads.

    It may raise anything; call it in the guarded process only.
    """
    import reasoning_gym

    scorer = reasoning_gym.get_score_answer_fn(task)

    def silent(answer: str, entry: dict[str, Any]) -> float:
        # Some scorers print what is wrong.
        with redirect_stdout(StringIO()):
            return float(scorer(answer, entry))

    return silent

"""Tasks of the library reasoning-gym that can be trained on.

Each was reviewed in the release `RELEASE`: other releases are refused, as their scorers may differ.
"""

from __future__ import annotations

from importlib import metadata

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
_SLOW = "it takes tenths of a second to make or to score one problem, or more"
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
        "composite": "it is several tasks, each of which can be a source of its own",
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
    """Raises ValueError, with the fix, unless the library is installed in the reviewed release."""
    try:
        release = metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        release = "none"
    if release != RELEASE:
        raise ValueError(
            f"tasks of reasoning-gym were looked at in release {RELEASE}, and {release} is installed: "
            f"pip install reasoning-gym=={RELEASE}"
        )

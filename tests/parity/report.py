"""The numbers of docs/parity.md: how far layouts are from one process by instruction set, and what shows each mutation.

    PYTHONPATH=tests python tests/parity/report.py spread [SET...]
    PYTHONPATH=tests python tests/parity/report.py mutations

`spread` runs every case under each set of INSTRUCTIONS, or those given, and prints the largest difference of each
quantity and its case; a CPU without a set takes what it has. `mutations` prints what was beyond its limit. Both take
`--cases TEXT` for those only whose name holds it.
"""

import argparse
import tempfile
from pathlib import Path

import pytest
from mutations import MUTATIONS
from parity_cases import COMPARED, one_process
from parity_runs import LIMITS, differences, excesses, limits, run_cases

INSTRUCTIONS = {
    "as they are": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE4": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Name -> environment; MKL and oneDNN multiply matrices, ATen does the rest."""


def spread(sets: list[str], text: str) -> None:
    """A line for each quantity, a column for each set of instructions; of cases whose name holds `text`."""
    cases = [case for case in COMPARED if text in case]
    columns = [widest(INSTRUCTIONS[name], cases) for name in sets]
    print("| | limit |", " | ".join(sets), "|")
    for kind, quantities in LIMITS.items():
        for quantity, limit in quantities.items():
            if (kind, quantity) not in columns[0]:
                continue
            widest_of = (column[kind, quantity] for column in columns)
            cells = (f"{off:.1e} {case}" if off else "0" for off, case in widest_of)
            print(f"| {kind}: {quantity} | {limit:g} |", " | ".join(cells), "|")


def widest(environment: dict[str, str], cases: list[str]) -> dict[tuple[str, str], tuple[float, str]]:
    """(Key of LIMITS, quantity) -> the largest difference and its case."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        found = run_cases(cases, Path(folder))
    seen: dict[tuple[str, str], tuple[float, str]] = {}
    for case in cases:
        off, allowed = differences(found[case], found[one_process(case)]), limits(case)
        kind = next(kind for kind, quantities in LIMITS.items() if allowed.items() <= quantities.items())
        for quantity in allowed:
            seen[kind, quantity] = max(seen.get((kind, quantity), (0.0, "")), (off[quantity][0], case))
    return seen


def mutations(text: str) -> None:
    """A line for each bug and case whose name, BUG@CASE, holds `text`."""
    planted = [f"{name}@{case}" for name, mutation in MUTATIONS.items() for case in mutation.cases]
    planted = [name for name in planted if text in name]
    with tempfile.TemporaryDirectory() as folder:
        found = run_cases(planted, Path(folder))
    for name in planted:
        bug, _, case = name.partition("@")
        beyond = (f"{quantity} {off:.1e}" for quantity, off in excesses(found, name).items())
        print(f"| {MUTATIONS[bug].plant.__doc__.rstrip('.')} | {case} | {'; '.join(beyond) or 'NOTHING'} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["spread", "mutations"])
    parser.add_argument("sets", nargs="*", metavar="SET", default=list(INSTRUCTIONS), help=f"{', '.join(INSTRUCTIONS)}")
    parser.add_argument("--cases", metavar="TEXT", default="", help="only those whose name holds this")
    options = parser.parse_args()
    if options.table == "spread":
        spread(options.sets, options.cases)
    else:
        mutations(options.cases)

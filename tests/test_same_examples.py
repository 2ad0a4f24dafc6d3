"""`make test` tries the same examples in every process, whatever ran there before; parts of a suite are all of it."""

import re
import subprocess
import sys
from pathlib import Path

DRAWS = """
from hypothesis import given, strategies as st

{imports}

@given(st.integers(), st.floats(), st.text())
def test_draws(whole, real, text):
    print(ascii((whole, real, text)))
"""
MODULES = "import grpo_mega.config.listing, grpo_mega.observe.metric_table  # whose numbers and words could be drawn"


def drawn(folder: Path, imports: str) -> list[str]:
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (folder / "test_draws.py").write_text(DRAWS.format(imports=imports))
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith("(")]


def test_examples_do_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    (alone := tmp_path / "alone").mkdir()
    (after := tmp_path / "after").mkdir()
    examples = drawn(alone, "")
    assert len(examples) == 100
    assert drawn(after, MODULES) == examples


def test_each_test_is_in_one_part(tmp_path: Path) -> None:
    """Those of a file in the same, also where -m chooses among them."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    for number in range(7):
        marked = "import pytest\n\n@pytest.mark.long\n" if number % 3 else ""
        tests = [f"def test_{one}(): pass\n" for one in range(number + 1)]
        (tmp_path / f"test_file{number}.py").write_text(marked + "\n".join(tests))
    found: list[list[str]] = []
    for part in ("1/3", "2/3", "3/3", "1/1"):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "not long"]
        command += ["--part", part, "--rootdir", tmp_path, tmp_path]
        found.append(
            re.findall("^test_file.*::.*", subprocess.run(command, capture_output=True, text=True).stdout, re.M)
        )
    *parts, everything = found
    assert sorted(test for part in parts for test in part) == sorted(everything)
    assert len(everything) == 28 - 4, "the first of some files is long"
    assert [*map(len, parts)] == [8, 8, 8]
    files = [{test.partition("::")[0] for test in part} for part in parts]
    assert sum(map(len, files)) == len(set().union(*files))

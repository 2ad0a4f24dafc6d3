"""`make test` tries the same examples in every process, whatever ran there before."""

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

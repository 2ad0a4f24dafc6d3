"""Which Transformer Engine is good enough, on planted ones: each in a process, a fork, that can find it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires

import pytest
from forks import run_python
from ranks import REPOSITORY

from grpo_mega.forecast.doctor import packages
from grpo_mega.platform import transformer_engine

ASK = """
import os, sys
from grpo_mega.platform.transformer_engine import usable_transformer_engine as ask

for folder in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        sys.path.insert(0, folder)
        try:
            print(ask(), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".splitlines()[-1], flush=True)
        os._exit(0)
    os.wait()
"""
"""Prints what the function returns, or the error, with each of these folders first among those of imports."""
USED = ("2.9.0", "2.11.0+8f2ab1c", "2.10.1.dev0")
REFUSED = ("2.8.3", "2.12.0", "2.20.2", "1.13")
ERRORS = ("ImportError('undefined symbol: cublasLtGrouped')", "OSError('no libcudart')")
Answers = dict[tuple[str, bool, str], str]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What is said of a release, with its name in the package's metadata or not, whose import runs this code."""
    planted = [(version, named, "") for version in (*USED, *REFUSED) for named in (True, False)]
    planted += [("2.11.0", True, f"raise {error}") for error in ERRORS] + [("", False, "")]
    root = tmp_path_factory.mktemp("planted")
    (root / "ask.py").write_text(ASK)
    for number, (version, named, code) in enumerate(planted):
        module, about = root / f"{number}" / "transformer_engine", f"transformer_engine-{version}.dist-info"
        module.parent.mkdir()
        if not version:
            continue
        module.mkdir()
        (module / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (module / "pytorch.py").write_text(code)
        if named:
            (module.parent / about).mkdir()
            (module.parent / about / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n"
            )
    done = run_python(root / "ask.py", *(root / f"{number}" for number in range(len(planted))))
    return dict(zip(planted, done.stdout.splitlines(), strict=True))


def test_none_is_fine(answers: Answers) -> None:
    assert answers["", False, ""] == "False"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("version", USED)
def test_one_of_these_is_used(version: str, named: bool, answers: Answers) -> None:
    assert answers[version, named, ""] == "True"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("version", REFUSED)
def test_others_are_refused(version: str, named: bool, answers: Answers) -> None:
    said = answers[version, named, ""]
    assert f"InputError: Transformer Engine {version}: megatron-core works with 2.9 to" in said
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12'" in said


@pytest.mark.parametrize("error", ERRORS)
def test_one_that_cannot_be_imported_is_refused(error: str, answers: Answers) -> None:
    kind, reason = error.rstrip("')").split("('")
    said = answers["2.11.0", True, f"raise {error}"]
    assert f"Transformer Engine 2.11.0: installed, but cannot be imported ({kind}: {reason})" in said


def test_every_place_names_the_same_versions_and_megatron_allows_them() -> None:
    """pyproject.toml, the doctor, the documentation, and what the installed megatron-core declares."""
    bounds = ">=2.9,<2.12"
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    package = f"transformer-engine[pytorch]{bounds}"
    assert package in extra
    assert (transformer_engine.OLDEST, transformer_engine.BEFORE) == ((2, 9), (2, 12))
    (named,) = [one for one in packages.PACKAGES if one.name == "transformer-engine"]
    assert (named.bounds, named.install) == (bounds, transformer_engine.INSTALL)
    assert package in transformer_engine.INSTALL
    text = (REPOSITORY / "docs" / "clusters.md").read_text()
    assert text.count(package) == text.count("transformer-engine[pytorch]") == 2
    declared = next(line for line in requires("megatron-core") or [] if line.startswith("transformer-engine"))
    assert {"<2.12.0", ">=2.9.0a0"} == set(re.findall(r"[<>]=?[\w.]+", declared.split(";")[0]))

"""Which Transformer Engine is good enough, on planted ones: each in a process, a fork, that can find it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path
from select import select

import pytest
from limits import limit
from ranks import REPOSITORY

from grpo_mega.doctor import packages
from grpo_mega.platform import transformer_engine

ASK = """
import os, sys
from grpo_mega.platform.transformer_engine import usable_transformer_engine as ask

for folder in sys.stdin:
    if not os.fork():
        sys.path.insert(0, folder.rstrip())
        try:
            print(ask(), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".splitlines()[-1], flush=True)
        os._exit(0)
    os.wait()
"""
"""Answers for one folder a line: importing torch takes longer than all answers."""
Answer = Callable[[Path], str]


@pytest.fixture(scope="module")
def answer() -> Iterator[Answer]:
    """What the function returns, or the error, with a folder first among those that Python imports from."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(REPOSITORY)])
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", ASK], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as asked:

        def ask(folder: Path) -> str:
            print(folder, file=asked.stdin, flush=True)
            if not select([asked.stdout], [], [], limit(120))[0]:
                asked.kill()
                raise TimeoutError(f"no answer for {folder}")
            return asked.stdout.readline().strip()

        yield ask
        asked.stdin.close()


def plant(folder: Path, version: str, code: str = "", named: bool = True) -> None:
    module = folder / "transformer_engine"
    module.mkdir()
    (module / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (module / "pytorch.py").write_text(code)
    if named:
        about = folder / f"transformer_engine-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")


def test_none_is_fine(tmp_path: Path, answer: Answer) -> None:
    assert answer(tmp_path) == "False"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("version", ["2.9.0", "2.11.0+8f2ab1c", "2.10.1.dev0"])
def test_one_of_these_is_used(version: str, named: bool, tmp_path: Path, answer: Answer) -> None:
    plant(tmp_path, version, named=named)
    assert answer(tmp_path) == "True"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("version", ["2.8.3", "2.12.0", "2.20.2", "1.13"])
def test_others_are_refused(version: str, named: bool, tmp_path: Path, answer: Answer) -> None:
    plant(tmp_path, version, named=named)
    said = answer(tmp_path)
    assert said.startswith(
        f"ValueError: Transformer Engine {version} is installed, and megatron-core works with 2.9 to"
    )
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12'" in said


@pytest.mark.parametrize("error", ["ImportError('undefined symbol: cublasLtGrouped')", "OSError('no libcudart')"])
def test_one_that_cannot_be_imported_is_refused(error: str, tmp_path: Path, answer: Answer) -> None:
    plant(tmp_path, "2.11.0", f"raise {error}")
    kind, reason = error.rstrip("')").split("('")
    assert f"Transformer Engine 2.11.0 is installed and cannot be imported ({kind}: {reason})" in answer(tmp_path)


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

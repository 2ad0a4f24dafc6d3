"""A missing or old SGLang is seen before anything starts. Only what is installed is looked at: names and versions."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path

import pytest

from grpo_mega.config.schema import RolloutConfig, SGLangConfig
from grpo_mega.errors import InputError
from grpo_mega.rollout.sglang.release import check_installed


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package that is called sglang, of some release, before all others."""

    def install(release: str) -> None:
        (tmp_path / "sglang").mkdir()
        (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('it must not be imported')")
        (tmp_path / f"sglang-{release}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n"
        (tmp_path / f"sglang-{release}.dist-info" / "METADATA").write_text(metadata)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    return install


def rollout(**sglang: object) -> RolloutConfig:
    return RolloutConfig(engine="sglang", sglang=SGLangConfig(**sglang))  # type: ignore[arg-type]


REPLAY, COPIES = {"routing_replay": True}, {"arguments": {"enable_dp_attention": True}}


@pytest.mark.parametrize(
    ("release", "settings"),
    [("0.5.6", {}), ("0.5.10rc0", COPIES), ("0.5.9.post1", REPLAY), ("0.5.23", REPLAY | COPIES), ("1.0", REPLAY)],
)
def test_releases_that_can_serve_are_accepted(installed, release: str, settings: dict[str, object]) -> None:
    installed(release)
    check_installed(rollout(**settings))


@pytest.mark.parametrize(
    ("release", "settings", "field", "oldest"),
    [
        ("0.5.5", {}, "rollout.engine", "0.5.6"),
        ("0.4.10", {}, "rollout.engine", "0.5.6"),
        ("0.5.8", REPLAY, "rollout.sglang.routing_replay", "0.5.9"),
        ("0.5.9", COPIES, "rollout.sglang.arguments.enable_dp_attention", "0.5.10"),
    ],
)
def test_releases_that_are_too_old_are_refused(
    installed, release: str, settings: dict, field: str, oldest: str
) -> None:
    installed(release)
    with pytest.raises(InputError, match="pip install sglang==") as refused:
        check_installed(rollout(**settings))
    assert refused.value.field == field
    assert refused.value.what == f"it needs SGLang {oldest} or newer, and this is {release}"


def test_the_embedded_engine_needs_none(installed) -> None:
    installed("0.1")
    check_installed(RolloutConfig())


@pytest.mark.skipif(any(metadata.distributions(name="sglang")), reason="SGLang is installed here")
def test_without_sglang_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()  # a clone of its sources
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"not installed here; install it with `\S+ -m pip install sglang==0\.5"):
        check_installed(rollout())

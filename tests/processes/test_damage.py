"""Any damage to any file of a cache: the answers stay right, the damage is repaired, and nothing crashes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import ranks_kit as kit
import torch
from launch_kit import Launch
from torch import nn

from aitune_hf import TuneConfig, stats
from aitune_hf.cache import LocalStore

Damage = Callable[[Path, Path], object]


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Damage] = {
    "empty": lambda path, other: path.write_bytes(b""),
    "half": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one byte flipped": flip,
    "deleted": lambda path, other: path.unlink(),
    "another one's": lambda path, other: path.write_bytes(other.read_bytes()),
}
KINDS = ["manifest.json", "engine.json", "verdict", "pipelines"]
REAL_KINDS = ["manifest.json", "model.pt2", "residuals.safetensors", "verdict", "pipelines"]


def files_of(cache: Path, kind: str) -> list[Path]:
    """The files of one kind: of two entries, two verdicts, or the one record of the target."""
    base = cache / "aitune/v1"
    pattern = {"verdict": "**/verdict-*.json", "pipelines": "pipelines/*.json"}.get(kind, f"**/{kind}")
    return sorted(base.glob(pattern))


@dataclass
class Scene:
    """A target that was tuned into a cache; the cache is a copy that may be damaged.

    Attributes:
        spare: the cache of another target, to take a record from that belongs elsewhere.
    """

    cache: Path
    spare: Path
    make: Callable[[], dict[str, nn.Module]]
    config: TuneConfig
    expected: dict[str, torch.Tensor]

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.cache)

    def damage(self, kind: str, how: str, index: int = 0) -> None:
        files = files_of(self.cache, kind)
        path = files.pop(min(index, len(files) - 1))
        other = (files or files_of(self.spare, kind))[0]
        assert path.read_bytes() != other.read_bytes()
        DAMAGE[how](path, other)

    def check_restore(self) -> int:
        """A new process's start: whatever the cache is worth, the answers are right and nothing is built."""
        parts = self.make()
        taken = kit.restore_parts(parts, self.config)
        assert kit.is_right(parts, self.expected, calls=3)
        assert all(stats(part).builds == 0 for part in parts.values())
        assert sum(stats(part).engine_calls for part in parts.values()) == 2 * taken
        return taken

    def check_tune(self, builds: int) -> None:
        """Tuning again repairs it: what is missing is built once, and then all is there."""
        parts = self.make()
        report = kit.tune_parts(parts, self.config)
        assert (report.builds, report.loads) == (builds, 2 - builds)
        assert kit.is_right(parts, self.expected)
        assert sum(stats(part).engine_calls for part in parts.values()) == 4
        assert self.store.verify() == []
        assert len(self.store.entries()) == 2
        assert self.check_restore() == 2
        assert kit.tune_parts(self.make(), self.config).builds == 0


# -- every file, with a backend that needs no compiler -----------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the cache of two parts, and one of another target."""
    folder = tmp_path_factory.mktemp("tuned")
    for name, widths in (("cache", (16, 15)), ("spare", (16,))):
        config = kit.settings(folder / name, kit.LoggingBackend(folder / "log"), strategy="first_working")
        kit.tune_parts(kit.make_parts(widths), config)
    return folder


@pytest.fixture
def scene(tuned: Path, tmp_path: Path) -> Scene:
    cache = tmp_path / "cache"
    shutil.copytree(tuned / "cache", cache)

    def make() -> dict[str, nn.Module]:
        return kit.make_parts((16, 15))

    config = kit.settings(cache, kit.LoggingBackend(tmp_path / "log"), strategy="first_working")
    return Scene(cache, tuned / "spare", make, config, kit.run(make()))


def test_the_files_of_a_cache_are_those_that_are_damaged_here(scene: Scene) -> None:
    found = [path for path in (scene.cache / "aitune/v1").rglob("*") if path.is_file()]
    assert sorted(found) == sorted(path for kind in KINDS for path in files_of(scene.cache, kind))
    assert [len(files_of(scene.cache, kind)) for kind in KINDS] == [2, 2, 2, 1]
    assert scene.check_restore() == 2


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_tuning_repairs_any_damage(scene: Scene, kind: str, how: str, index: int) -> None:
    scene.damage(kind, how, index)
    scene.check_tune(builds=1 if kind in ("manifest.json", "engine.json") else 0)


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_start_with_any_damage_is_right_and_tuning_repairs_it(scene: Scene, kind: str, how: str) -> None:
    scene.damage(kind, how)
    scene.check_restore()
    scene.check_tune(builds=1 if kind in ("manifest.json", "engine.json") else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_while_the_engines_are_at_work_is_not_even_seen(scene: Scene, kind: str) -> None:
    parts = scene.make()
    kit.tune_parts(parts, scene.config)
    scene.damage(kind, "empty")
    assert kit.is_right(parts, scene.expected)
    assert sum(stats(part).engine_calls for part in parts.values()) == 4


def test_a_cache_with_everything_damaged_is_as_good_as_an_empty_one(scene: Scene) -> None:
    for path in (scene.cache / "aitune/v1").rglob("*.*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[::-1])
    assert scene.check_restore() == 0
    scene.check_tune(builds=2)


# -- with the real compiler --------------------------------------------------------------------------------------------


@pytest.fixture
def real_scene(real_launch: Launch, tmp_path: Path) -> Scene:
    cache, spare = tmp_path / "cache", tmp_path / "spare"
    for copy in (cache, spare):
        shutil.copytree(real_launch.cache, copy)
    for record in files_of(spare, "pipelines"):
        record.unlink()
    kit.tune_parts(kit.make_plain((8,)), kit.settings(spare, "inductor", strategy="first_working"))
    config = kit.settings(cache, "inductor", strategy="first_working")
    return Scene(cache, spare, kit.make_plain, config, kit.run(kit.make_plain()))


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", REAL_KINDS)
def test_a_start_with_any_damage_to_real_engines_is_right(real_scene: Scene, kind: str, how: str) -> None:
    real_scene.damage(kind, how, index=0)
    # One of two engines is lost where it is damaged; without the record, nobody knows that there are any.
    assert real_scene.check_restore() == (0 if kind == "pipelines" else 1)
    if kind != "pipelines" and how != "another one's":
        real_scene.damage(kind, how, index=1)
        assert real_scene.check_restore() == 0


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_records_of_real_engines_are_repaired_without_a_build(real_scene: Scene, how: str) -> None:
    real_scene.damage("verdict", how)
    real_scene.damage("pipelines", how)
    real_scene.check_tune(builds=0)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("model.pt2", "half"),
        ("residuals.safetensors", "one byte flipped"),
        ("manifest.json", "another one's"),
    ],
)
@pytest.mark.slow
def test_a_damaged_real_engine_is_built_again_once(real_scene: Scene, kind: str, how: str) -> None:
    real_scene.damage(kind, how)
    real_scene.check_tune(builds=1)

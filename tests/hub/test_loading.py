"""Engines that come with ``from_pretrained``, and the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hub_server import FakeHub, Fault
from sharing_kit import Machine

from aitune_hf import AITuneModel, AITunePipeline
from aitune_hf.cli import main
from aitune_hf.errors import ConfigError, HubError
from aitune_hf.hub.target import Target
from aitune_hf.target import modules_of, push_target

REPO = "me/tuned"
Machines = Callable[[str], Machine]
CALL = {"batch_size": 1, "num_inference_steps": 2, "output_type": "np"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of the smallest size."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(4, 4),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=2,
        attention_head_dim=2,
    )
    made = tmp_path_factory.mktemp("ddpm")
    DDPMPipeline(unet=unet, scheduler=DDPMScheduler()).save_pretrained(made)
    return made


def draw(pipe: object) -> object:
    return pipe(**CALL, generator=torch.Generator().manual_seed(0)).images  # type: ignore[operator]


def test_a_pipeline_comes_with_its_engines(hub: FakeHub, machine: Machines, folder: Path) -> None:
    mine = AITunePipeline.from_pretrained(folder, config=machine("mine").config())
    mine.set_progress_bar_config(disable=True)
    before = draw(mine)
    mine.tune([CALL])
    pushed = mine.push_to_hub(REPO)
    assert len(pushed.added) == 1

    theirs = AITunePipeline.from_pretrained(folder, config=machine("theirs").config(), tuned=REPO, trust=REPO)
    theirs.set_progress_bar_config(disable=True)
    after = draw(theirs)
    assert (before == after).all()  # type: ignore[attr-defined, union-attr]
    assert theirs.tuning_stats().engine_calls == 1  # of two: the first was checked against eager
    assert theirs.tuning_stats().builds == 0
    assert theirs.pull_tuned(REPO).confirm()


def test_a_hub_that_fails_does_not_stop_loading(
    hub: FakeHub, machine: Machines, folder: Path, lines: Callable[[], list[str]]
) -> None:
    hub.faults = [Fault("GET ", status=403)]
    pipe = AITunePipeline.from_pretrained(folder, config=machine("mine").config(), tuned=["me/a", "me/b"], trust=None)
    assert len(lines()) == 1
    assert "your token may not read me/a" in lines()[0]
    pipe.set_progress_bar_config(disable=True)
    draw(pipe)


def test_a_wrong_argument_does(hub: FakeHub, machine: Machines, folder: Path) -> None:
    with pytest.raises(ConfigError, match="is no place for engines"):
        AITunePipeline.from_pretrained(folder, config=machine("mine").config(), tuned="nonsense")
    with pytest.raises(ConfigError, match="trust="):
        AITunePipeline.from_pretrained(folder, config=machine("mine").config(), tuned=REPO, trust=5)


def test_a_wrong_argument_is_found_before_anything_is_loaded(hub: FakeHub, tmp_path: Path) -> None:
    for load in (AITunePipeline.from_pretrained, AITuneModel.from_pretrained):
        with pytest.raises(ConfigError, match="is no place for engines"):
            load(tmp_path / "nothing", tuned="nonsense")
        with pytest.raises(ConfigError, match="trust="):
            load(tmp_path / "nothing", tuned=REPO, trust="no/such/thing")
        with pytest.raises(ConfigError, match="trust="):
            load(tmp_path / "nothing", trust=5)


def test_weights_go_along_when_asked(hub: FakeHub, machine: Machines, folder: Path) -> None:
    pipe = AITunePipeline.from_pretrained(folder, config=machine("mine").config())
    pipe.tune([CALL])
    pipe.push_to_hub("me/all", weights=True)
    files = set(hub.repos["me/all"].head.files)
    assert {"model_index.json", "unet/config.json"} <= files
    assert any(path.endswith("manifest.json") for path in files)
    card = hub.repos["me/all"].head.files["README.md"][0].decode()
    assert "library_name: diffusers" in card
    assert "## Tuned engines for DDPMPipeline" in card


def test_weights_wait_for_engines_that_may_be_pushed(hub: FakeHub, machine: Machines, folder: Path) -> None:
    pipe = AITunePipeline.from_pretrained(folder, config=machine("mine").config())
    with pytest.raises(HubError, match="no engines of DDPMPipeline to push"):
        pipe.push_to_hub("me/all", weights=True)
    assert "me/all" not in hub.repos
    pipe.tune([CALL])
    pipe.register_to_config(_name_or_path="org/secret")  # which nobody can see
    with pytest.raises(HubError, match="org/secret is private or gated, or gone"):
        pipe.push_to_hub("me/all", weights=True)
    assert "me/all" not in hub.repos
    pipe = AITunePipeline.from_pretrained(folder, config=machine("mine").config())
    path = f"aitune/v1/pipelines/{Target(modules_of(pipe), machine('mine').config(), 'x').pipeline_hash}.json"
    hub.add("me/all", {path: b"{}"})
    with pytest.raises(HubError, match="cannot be read, so it cannot be added to"):
        push_target(pipe, "me/all", machine("mine").config(), first=lambda: pytest.fail("weights were uploaded"))


def test_what_the_classes_own_upload_cannot_do_is_an_error_at_once(
    hub: FakeHub, machine: Machines, folder: Path
) -> None:
    pipe = AITunePipeline.from_pretrained(folder, config=machine("mine").config())
    pipe.tune([CALL])
    with pytest.raises(ConfigError, match="push_to_hub takes no revision"):
        pipe.push_to_hub("me/all", weights=True, revision="next")
    with pytest.raises(ConfigError, match="push_to_hub takes no colour"):
        pipe.push_to_hub("me/all", weights=True, colour="red")
    with pytest.raises(ConfigError, match="takes no safe_serialization; with weights=True"):
        pipe.push_to_hub("me/all", safe_serialization=False)
    assert "me/all" not in hub.repos
    pipe.push_to_hub("me/all", weights=True, variant="fp32")
    assert "unet/diffusion_pytorch_model.fp32.safetensors" in hub.repos["me/all"].head.files


def test_a_model_comes_with_its_engines(hub: FakeHub, machine: Machines, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16)
    BertModel(config).save_pretrained(tmp_path / "bert")
    ids = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    mine = AITuneModel.from_pretrained(tmp_path / "bert", config=machine("mine").config())
    mine.tune([ids])
    mine.push_to_hub(REPO)
    theirs = AITuneModel.from_pretrained(tmp_path / "bert", config=machine("theirs").config(), tuned=REPO, trust=True)
    with torch.no_grad():
        theirs(**ids)
        theirs(**ids)
    assert theirs.tuning_stats().engine_calls == 1


def test_the_command_line(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AITUNE_HF_CACHE", str(tmp_path / "cache"))
    assert main(["push", REPO, str(folder)]) == 2
    assert "no engines of DDPMPipeline to push" in capsys.readouterr().err
    hub.add(REPO)
    for command in ("lookup", "pull"):
        assert main([command, REPO, str(folder)]) == 1
        assert "no engines for this pipeline structure" in capsys.readouterr().out
    assert main(["explain", REPO, str(folder)]) == 0
    assert "it has none at all" in capsys.readouterr().out


def test_keygen_writes_a_key_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography")
    from aitune_hf.hub.signature import PublicKey, sign_manifest, verify

    path = tmp_path / "private.pem"
    assert main(["keygen", str(path)]) == 0
    shown = capsys.readouterr().out
    assert path.stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in shown
    assert verify(PublicKey.from_pem(shown.encode()), b"text", sign_manifest(path.read_bytes(), b"text"))
    before = path.read_bytes()
    assert main(["keygen", str(path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["push", REPO, "nothing", "--signing-key", "missing.pem"], "the signing key missing.pem cannot be read"),
        (["push", "nonsense", "nothing"], "is no place for engines"),
        (["pull", REPO, "nothing", "--trust", "no/such/thing"], "trust='no/such/thing' is neither"),
    ],
)
def test_a_wrong_argument_on_the_command_line_is_one_line(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], command: list[str], said: str
) -> None:
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert hub.requests == []

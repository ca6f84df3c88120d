"""Engines in an older form of a backend's artefacts are not found, and built anew, rather than found and not read."""

from __future__ import annotations

from pathlib import Path

import torch
from tuning_kit import QuickBackend, Waiting, settings

from aitune_hf import tune
from aitune_hf.backends.base import full_version, unread_format
from aitune_hf.jit.patcher import unpatch_tree

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Second(QuickBackend):
    """The same backend after a change of its artefacts."""

    format = 2


def test_the_first_format_goes_without_saying() -> None:
    assert full_version(QuickBackend()) == "1"
    assert full_version(Second()) == "1+format2"


def test_another_format_is_another_engine(tmp_path: Path) -> None:
    model = Waiting().eval()
    config = settings(tmp_path, old := QuickBackend())
    assert tune(model, [X], config).builds == 1
    unpatch_tree(model)
    report = tune(model, [X], settings(tmp_path, new := Second()))
    assert (report.builds, report.rows[0].backend) == (1, "quick")
    assert (len(old.builds), len(new.builds)) == (1, 1)
    unpatch_tree(model)
    assert tune(model, [X], settings(tmp_path, Second())).builds == 0
    unpatch_tree(model)
    assert tune(model, [X], config).builds == 0, "both stay in the cache"


def test_formats_are_told_apart_in_versions() -> None:
    assert unread_format(QuickBackend(), "1") is None
    assert unread_format(QuickBackend(), "2026.4.1+cpu") is None
    assert unread_format(Second(), "7.1+format2") is None
    assert unread_format(Second(), "1") == "in quick's format 1, here 2 is read"
    assert unread_format(QuickBackend(), "1+format2") == "in quick's format 2, here 1 is read"

"""What stands between this package and torch's private loader, and what is done to a library before it is shared."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from aitune_hf.backends import aoti_package
from aitune_hf.backends.aoti_archive import rewrite_package
from aitune_hf.backends.aoti_package import AOTIPackage, missing_loader
from aitune_hf.backends.elf import clean_library, has_executable_stack, scrub_paths
from aitune_hf.errors import BuildError, EngineLoadError


class FakeLoader:
    """As torch's, by what it is asked for."""

    def __init__(self, path: str, name: str, single: bool, runners: int, device_index: int) -> None:
        self.asked = (path, name, single, runners, device_index)

    def get_constant_fqns(self) -> list[str]:
        return ["w"]

    def load_constants(self, tensors: Any, inactive: bool, full: bool, user_managed: bool) -> None:
        if "w" not in tensors:
            raise RuntimeError("Cannot find constants w\nsecond line")

    def boxed_run(self, inputs: list[Any]) -> list[Any]:
        return [inputs.pop()]


class Older(FakeLoader):
    boxed_run = None  # type: ignore[assignment]

    def run(self, inputs: list[Any]) -> list[Any]:
        return list(inputs)


class Changed(FakeLoader):
    def __init__(self, path: str) -> None:
        raise TypeError("takes 1 argument\nmore")


class Copying(FakeLoader):
    def load_constants(self, tensors: Any, inactive: bool, full: bool) -> None:  # type: ignore[override]
        pass


def use(monkeypatch: pytest.MonkeyPatch, native: Any, public: Any = None) -> None:
    monkeypatch.setattr(aoti_package, "_native_loader", lambda: native)
    monkeypatch.setattr(aoti_package, "_public_module", lambda: public)


def test_this_torch_has_what_is_used() -> None:
    loader = aoti_package._native_loader()
    assert missing_loader() is None
    for name in ("get_constant_fqns", "load_constants", "boxed_run"):
        assert hasattr(loader, name)


def test_the_private_loader_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLoader)
    package = AOTIPackage(Path("a.pt2"), 3, 1)
    assert package._loader.asked == ("a.pt2", "model", False, 3, 1)
    assert package.names == ("w",)
    package.bind({"w": torch.ones(1)})
    assert package.run([torch.ones(2)])[0].shape == (2,)
    with pytest.raises(EngineLoadError, match=r"^the weights cannot be bound: Cannot find constants w$"):
        package.bind({})


def test_an_older_loader_without_boxed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Older)
    assert len(AOTIPackage(Path("a.pt2")).run([torch.ones(2)])) == 1


@pytest.mark.parametrize("native", [None, Changed])
def test_the_public_loader_is_the_fallback(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Public:
        @staticmethod
        def aoti_load_package(path: str, num_runners: int, device_index: int) -> Any:
            class Model:
                loader = FakeLoader(path, "model", False, num_runners, device_index)

            return Model

    use(monkeypatch, native, Public)
    assert AOTIPackage(Path("a.pt2"), 2)._loader.asked == ("a.pt2", "model", False, 2, -1)


@pytest.mark.parametrize("native", [None, Changed])
def test_no_loader_at_all(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, native)
    with pytest.raises(EngineLoadError, match="has no loader for AOTInductor packages"):
        AOTIPackage(Path("a.pt2"))
    assert (missing_loader() is None) == (native is not None)


def test_a_loader_that_only_copies_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Copying)
    with pytest.raises(EngineLoadError, match="cannot be bound"):
        AOTIPackage(Path("a.pt2")).bind({"w": torch.ones(1)})


def test_a_file_that_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"no zip")
    with pytest.raises(EngineLoadError, match=r"^model.pt2 cannot be loaded: ") as info:
        AOTIPackage(tmp_path / "model.pt2")
    assert "\n" not in str(info.value)


def library(flags: int = 7, tail: bytes = b"debug info") -> bytes:
    """A 64-bit ELF file with one segment of code, one that asks for a stack, and a tail that nothing refers to."""
    code = b"see /home/someone/build/a.cpp\0"
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 999, 0, 64, 56, 2, 64, 9, 8)
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 176, 0, 0, len(code), len(code), 16)
    stack = struct.pack("<IIQQQQQQ", 0x6474E551, flags, 0, 0, 0, 0, 0, 16)
    return header + load + stack + code + tail


def test_a_library_is_stripped_and_asks_for_no_executable_stack() -> None:
    assert has_executable_stack(library())
    clean = clean_library(library(), ["/home/someone/build"])
    assert not has_executable_stack(clean)
    assert clean.endswith(b"see " + b"/" * 19 + b"/a.cpp\0")
    assert clean == clean_library(library(flags=6, tail=b""), ["/home/someone/build"])
    assert struct.unpack_from("<Q", clean, 40) == (0,)


def test_what_is_no_library() -> None:
    with pytest.raises(ValueError, match="ELF"):
        clean_library(b"MZ" + bytes(100))


def test_short_prefixes_are_left_alone() -> None:
    assert scrub_paths(b"/usr/include", ["/usr", "/"]) == b"/usr/include"


def test_what_is_kept_of_a_package(tmp_path: Path) -> None:
    folder = "x/data/aotinductor/model/"
    with zipfile.ZipFile(tmp_path / "raw.pt2", "w") as package:
        package.writestr(folder + "c1.wrapper.so", library())
        package.writestr(folder + "c1.wrapper.cpp", "// /home/someone/build")
        package.writestr(folder + "c1.wrapper_metadata.json", '{"at": "/home/someone/build"}')
        package.writestr(folder + "c1.wrapper_compile_flags.json", "{}")
        package.writestr(folder + "c2.kernel.cpp", "//")
        package.writestr("x/archive_format", "pt2")
    rewrite_package(tmp_path / "raw.pt2", tmp_path / "a.pt2", ["/home/someone/build"])
    with zipfile.ZipFile(tmp_path / "a.pt2") as package:
        names = package.namelist()
        assert all(package.getinfo(name).compress_type == zipfile.ZIP_STORED for name in names)
    model = "model/data/aotinductor/model/model.wrapper"
    assert names == sorted(["model/archive_format", f"{model}.cpp", f"{model}.so", f"{model}_metadata.json"])
    assert b"someone" not in (tmp_path / "a.pt2").read_bytes()


def test_a_package_without_a_library(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "raw.pt2", "w") as package:
        package.writestr("x/archive_format", "pt2")
    with pytest.raises(BuildError, match="0 libraries"):
        rewrite_package(tmp_path / "raw.pt2", tmp_path / "a.pt2", [])


def test_a_built_library_is_clean(bert: Any) -> None:
    with zipfile.ZipFile(bert.request.workdir / "model.pt2") as package:
        content = package.read("model/data/aotinductor/model/model.wrapper.so")
    assert not has_executable_stack(content)
    assert b".debug_info" not in content

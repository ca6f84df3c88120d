"""The project's own house: its commands, its version, and what the set-up says when something is missing.

The set-up script runs here with stand-ins for Python, pip and g++, so these tests install nothing and need no
network.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = [name for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE) for name in line.split()]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Flags of an outer make (`make test`) are not for this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_planned(target: str) -> None:
    run = make("-n", target)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_the_commands_set_themselves_up(target: str) -> None:
    lines = make("-n", target).stdout.splitlines()
    assert "setup_venv.sh" in lines[0]
    assert len(lines) > 1


def test_demo_and_test_pass_arguments_on() -> None:
    assert "examples/demo.py --quick" in make("-n", "demo", "ARGS=--quick").stdout
    assert "pytest -k cache" in make("-n", "test", "ARGS=-k cache").stdout


def test_help_is_the_default_and_names_every_target() -> None:
    run = make()
    assert run.stdout == make("help").stdout
    described = dict(line.split(maxsplit=1) for line in run.stdout.splitlines())
    assert sorted(described) == sorted(TARGETS)


def test_every_marker_has_a_target() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    markers = re.search(r"^markers = \[\n(.*?)^\]", settings, re.MULTILINE | re.DOTALL)
    assert markers is not None
    names = re.findall(r'^ +"(\w+):', markers.group(1), re.MULTILINE)
    assert names
    for name in names:
        assert f"pytest -m {name}" in make("-n", f"test-{name}").stdout


def test_the_version_is_the_one_of_pyproject() -> None:
    written = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert written is not None
    package = importlib.import_module("aitune_hf")
    assert package.__version__ == written.group(1)


@pytest.mark.parametrize("script", [".ci/run", "scripts/setup_venv.sh"])
def test_scripts_can_be_run_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True, timeout=60)


# A stand-in for Python: answers the questions the set-up asks, and writes down what pip is asked to install.
PYTHON_STUB = """#!/bin/sh
case "$*" in
    "-c import sys;"*) cat "$(dirname "$0")/../version" 2>/dev/null || echo "${STUB_VERSION:-3.11}" ;;
    "-c import ensurepip"*) exit "${STUB_NO_VENV:-0}" ;;
    "-c import os, sysconfig;"*) exit "${STUB_NO_HEADERS:-0}" ;;
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "VIRTUAL_ENV=$3" >"$3/bin/activate"
        echo "${STUB_VERSION:-3.11}" >"$3/version" ;;
    "-m pip --version") ;;
    "-m pip install "*)
        echo "$*" >>"$STUB_CALLS"
        [ -z "$STUB_INTERRUPTS" ] || kill -INT $PPID
        case "$*" in *"${STUB_FAILS_ON:-nothing at all}"*) ;; *) exit 0 ;; esac
        for word in "$@"; do [ "$last" = --log ] && echo "$STUB_LOG" >>"$word"; last=$word; done
        exit 1 ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
TOOLS = ("bash", "sh", "cat", "cp", "cut", "dirname", "flock", "grep", "mkdir", "mv", "rm", "sha256sum")


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class House:
    """A folder with the set-up script, and a PATH that holds only what is put there."""

    root: Path

    @property
    def path(self) -> Path:
        return self.root / "path"

    @property
    def stamp(self) -> Path:
        return self.root / ".venv" / "setup-stamp"

    def add_tool(self, name: str, text: str = "#!/bin/sh\n") -> None:
        tool = self.path / name
        tool.write_text(text, encoding="utf-8")
        tool.chmod(0o755)

    def set_up(self, **env: str) -> subprocess.CompletedProcess[str]:
        bash = shutil.which("bash")
        assert bash is not None
        fixed = {"PATH": str(self.path), "STUB_CALLS": str(self.root / "calls"), "HOME": str(self.root)}
        return subprocess.run(
            [bash, str(self.root / "scripts" / "setup_venv.sh")],
            capture_output=True,
            text=True,
            env={**fixed, **env},
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
            # Whoever runs the tests in the background may have had interrupts ignored, which children inherit.
            preexec_fn=_interruptible,
        )

    def installs(self) -> list[str]:
        calls = self.root / "calls"
        return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


@pytest.fixture
def house(tmp_path: Path) -> House:
    # A space in the path, as people's folders have.
    made = House(tmp_path / "my projects")
    (made.root / "scripts").mkdir(parents=True)
    made.path.mkdir()
    shutil.copy(ROOT / "scripts" / "setup_venv.sh", made.root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", made.root)
    for name in TOOLS:
        tool = shutil.which(name)
        if tool is not None:
            (made.path / name).symlink_to(tool)
    made.add_tool("g++")
    made.add_tool("python3", PYTHON_STUB)
    return made


def test_setup_installs_torch_first_and_only_once(house: House) -> None:
    assert house.set_up().returncode == 0
    first = house.installs()
    assert len(first) == 2
    assert first[0].endswith(" torch==2.13.0")
    assert first[1].endswith(" torch==2.13.0 --editable .[dev]")

    again = house.set_up()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert house.installs() == first


def test_setup_starts_anew_when_what_it_depends_on_changes(house: House) -> None:
    assert house.set_up().returncode == 0
    assert house.set_up(EXTRAS="dev,openvino").returncode == 0
    assert house.installs()[-1].endswith(".[dev,openvino]")

    with (house.root / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write("\n# another line\n")
    assert house.set_up(EXTRAS="dev,openvino").returncode == 0
    assert len(house.installs()) == 6

    # Another Python needs another environment, not another install into the old one.
    (house.root / ".venv" / "old").touch()
    assert house.set_up(STUB_VERSION="3.12", EXTRAS="dev,openvino").returncode == 0
    assert len(house.installs()) == 8
    assert not (house.root / ".venv" / "old").exists()


def test_setup_does_not_trust_an_environment_that_was_copied_with_the_tree(house: House) -> None:
    assert house.set_up().returncode == 0
    copy = House(house.root.parent / "copy")
    shutil.copytree(house.root, copy.root, symlinks=True)
    (copy.root / ".venv" / "old").touch()
    assert copy.set_up().returncode == 0
    assert len(copy.installs()) == 4
    assert not (copy.root / ".venv" / "old").exists()


def test_setup_that_failed_midway_is_taken_up_again(house: House) -> None:
    assert house.set_up(STUB_FAILS_ON="--editable").returncode != 0
    assert not house.stamp.exists()
    (house.root / ".venv" / "kept").touch()
    assert house.set_up().returncode == 0
    assert house.stamp.exists()
    assert (house.root / ".venv" / "kept").exists()


def test_setup_that_was_interrupted_leaves_no_stamp(house: House) -> None:
    run = house.set_up(STUB_INTERRUPTS="1")
    assert run.returncode == 130
    assert "setup: interrupted" in run.stderr
    assert not house.stamp.exists()


def test_setup_without_a_compiler_says_what_to_install(house: House) -> None:
    (house.path / "g++").unlink()
    run = house.set_up()
    assert run.returncode != 0
    assert "apt-get install g++" in run.stderr
    assert house.installs() == []


def test_setup_takes_the_compiler_that_cxx_names(house: House) -> None:
    (house.path / "g++").unlink()
    house.add_tool("clang++")
    assert house.set_up(CXX="clang++").returncode == 0


def test_setup_without_the_venv_module_says_what_to_install(house: House) -> None:
    run = house.set_up(STUB_NO_VENV="1")
    assert run.returncode != 0
    assert "apt-get install python3.11-venv" in run.stderr


def test_setup_without_python_headers_goes_on_and_says_what_is_lost(house: House) -> None:
    run = house.set_up(STUB_NO_HEADERS="1")
    assert run.returncode == 0
    assert "apt-get install python3.11-dev" in run.stdout


@pytest.mark.parametrize("version", ["3.9", "3.14", "", "3.1"])
def test_setup_without_a_supported_python_says_which_are(house: House, version: str) -> None:
    house.add_tool("python3", f"#!/bin/sh\necho '{version}'\n")
    run = house.set_up()
    assert run.returncode != 0
    assert "3.10 3.11 3.12 3.13" in run.stderr
    assert "make PYTHON=" in run.stderr


def test_setup_passes_over_a_python_that_is_too_new(house: House) -> None:
    house.add_tool("python3", "#!/bin/sh\necho 3.14\n")
    house.add_tool("python3.12", PYTHON_STUB)
    run = house.set_up(STUB_VERSION="3.12")
    assert run.returncode == 0, run.stderr
    assert "with Python 3.12" in run.stdout


@pytest.mark.parametrize("version", ["3.9", ""])
def test_setup_refuses_a_python_that_was_asked_for_and_does_not_fit(house: House, version: str) -> None:
    house.add_tool("old", f"#!/bin/sh\necho '{version}'\n")
    run = house.set_up(PYTHON="old")
    assert run.returncode != 0
    assert "PYTHON=old" in run.stderr
    assert "3.10 3.11 3.12 3.13" in run.stderr


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("NewConnectionError: Failed to establish a new connection", "check the network"),
        ("Temporary failure in name resolution", "check the network"),
        ("OSError: [Errno 28] No space left on device", "free some space"),
        ("ERROR: something else", "lines above say why"),
    ],
)
def test_setup_says_why_pip_failed_and_what_to_do(house: House, log: str, advice: str) -> None:
    run = house.set_up(STUB_FAILS_ON="torch==", STUB_LOG=log)
    assert run.returncode != 0
    assert "could not install torch==2.13.0" in run.stderr
    assert advice in run.stderr
    assert "run the same command again" in run.stderr
    assert len(house.installs()) == 1

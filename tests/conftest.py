"""What all tests share: no network, no inherited settings, one engine cache for the whole run."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read once, when torch and the Hugging Face libraries are imported: so before any test module is.
_HOME = tempfile.TemporaryDirectory(prefix="aitune-tests-")
for _name in [name for name in os.environ if name.startswith("AITUNE_HF_") or name == "HF_TOKEN"]:
    del os.environ[_name]
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_XET="1",
    HF_HOME=f"{_HOME.name}/hf",
    AITUNE_HF_CACHE=f"{_HOME.name}/engines",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Sockets reach this machine only."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def local_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            _refuse_unless_local(str(address[0]))
        connect(self, address)

    def local_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_unless_local(host.decode() if isinstance(host, bytes) else str(host or "localhost"))
        return lookup(host, *args, **kwargs)

    socket.socket.connect = local_connect  # type: ignore[method-assign]
    socket.getaddrinfo = local_lookup
    yield
    socket.socket.connect = connect  # type: ignore[method-assign]
    socket.getaddrinfo = lookup


def _refuse_unless_local(host: str) -> None:
    if host in ("localhost", socket.gethostname()):
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    raise OSError(f"a test tried to reach {host}; tests may use this machine only")


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """The same number of threads everywhere, so that a test's arithmetic does not depend on the machine."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Each test starts from the same seed and leaves torch's classes unpatched."""
    torch.manual_seed(0)
    methods = torch.nn.Module.__init__, torch.nn.Module.__call__, torch.nn.Module.__setattr__
    yield
    assert (torch.nn.Module.__init__, torch.nn.Module.__call__, torch.nn.Module.__setattr__) == methods


@pytest.fixture(scope="session")
def engine_cache() -> Path:
    """The engine cache that real builds share over the whole run, so that nothing is compiled twice."""
    return Path(os.environ["AITUNE_HF_CACHE"])

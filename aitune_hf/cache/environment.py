"""Where an engine is valid: the facts of a machine and its libraries that machine code depends on.

Two machines with equal ``Environment`` can exchange engines. The device *index* is no such fact and is never
kept.

Compilers target the very CPU they run on (``-march=native``), so the instruction set *level* alone does not
make an engine safe: avx512 of one CPU faults on avx512 of another. The extensions a compiler may use are a
factor too, unless the engine is *portable*, that is compiled for the x86-64-v3 baseline
(``Environment.march`` says for which).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Set
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from aitune_hf.cache.fields import exact_fields, optional_text, text_field, text_list
from aitune_hf.errors import CacheError, ConfigError

__all__ = ["Environment", "cpu_isa_level", "parse_cpu_features", "public_version"]

_PORTABLE_SUFFIX = "-portable"
_ANY = "any"
_X86_64_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse4_2", "ssse3", "popcnt"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_COMPILER_FEATURES = re.compile(
    r"(?!smep$)(sse|ssse|avx|amx|bmi|sve|sme).*|pni|fma|f16c|abm|adx|movbe|popcnt|cx16|aes|vaes|sha_ni|gfni|v?pclmulqdq"
    r"|asimd.*|fphp|atomics|crc32|bf16|i8mm"
)
_WORD = r"[a-z0-9][a-z0-9._-]{0,63}"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Factors an engine depends on besides its module, call form and build options.

    ``cuda`` is the accelerator runtime torch was built for (``13.0``; ``rocm6.4`` for AMD), None for CPU
    engines. ``cpu_isa`` of an accelerator's environment concerns the host code beside its kernels.
    """

    device_type: str
    arch: str
    os: str
    torch: str
    cpu_isa: str | None = None
    cpu_features: tuple[str, ...] = ()
    sm: str | None = None
    cuda: str | None = None
    libc: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]+", self.device_type):
            raise ConfigError(
                f"device_type {self.device_type!r}: give the type alone, as 'cpu' or 'cuda', without an index"
            )
        for name in ("arch", "os", "torch", "cpu_isa", "sm", "cuda", "libc"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(_WORD, value):
                raise ConfigError(
                    f"environment factor {name}={value!r} is not a word of lower-case letters, digits, . _ -"
                )

    @classmethod
    def current(cls, device_type: str) -> Environment:
        """This machine and torch, for engines on ``device_type``.

        An index, as in ``cuda:1``, only picks the device whose facts are read. Raises ``ConfigError`` for
        ``cuda`` where torch sees no device.
        """
        kind, _, index = device_type.partition(":")
        capability, torch_version, cuda, sm = _torch_facts(kind, int(index) if index else None)
        return cls.from_facts(
            device_type=kind,
            machine=platform.machine(),
            system=platform.system(),
            libc=platform.libc_ver(),
            cpuinfo=_read_cpuinfo(),
            torch_capability=capability,
            torch_version=torch_version,
            cuda=cuda,
            sm=sm,
        )

    @classmethod
    def from_facts(
        cls,
        *,
        device_type: str,
        machine: str,
        system: str,
        libc: tuple[str, str],
        cpuinfo: str,
        torch_capability: str,
        torch_version: str,
        cuda: str | None = None,
        sm: str | None = None,
    ) -> Environment:
        """The environment these raw facts describe.

        ``machine``, ``system`` and ``libc`` are what ``platform`` answers, ``cpuinfo`` the text of
        ``/proc/cpuinfo`` (empty where there is none), ``torch_capability`` the answer of
        ``torch.backends.cpu.get_cpu_capability()``. Host code of an accelerator's engines is portable
        wherever the CPU allows it: only the kernels need their device.
        """
        arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
        features = parse_cpu_features(cpuinfo)
        native = cls(
            device_type=device_type,
            arch=arch,
            os=system.lower(),
            torch=public_version(torch_version),
            cpu_isa=cpu_isa_level(arch, features, torch_capability),
            cpu_features=tuple(sorted(features)),
            sm=None if device_type == "cpu" else sm,
            cuda=None if device_type == "cpu" else cuda,
            libc="".join(libc).lower() or None,
        )
        return native.portable() if device_type != "cpu" and native.can_be_portable else native

    @property
    def can_be_portable(self) -> bool:
        """Whether this CPU has all of x86-64-v3."""
        return self.is_portable or (self.arch == "x86_64" and set(self.cpu_features) >= _X86_64_V3)

    @property
    def is_portable(self) -> bool:
        """Whether engines for this environment run on every x86-64-v3 CPU."""
        return self.cpu_isa is not None and self.cpu_isa.endswith(_PORTABLE_SUFFIX)

    @property
    def march(self) -> str:
        """The compiler target that an engine for this environment must have: ``x86-64-v3`` or ``native``."""
        return "x86-64-v3" if self.is_portable else "native"

    def portable(self) -> Environment:
        """The same for engines that run on every x86-64-v3 CPU. ``ConfigError`` where this CPU is none."""
        if not self.can_be_portable:
            raise ConfigError(
                f"no portable variant on this {self.arch} machine ({self.cpu_isa}): it needs all of "
                "x86-64-v3. Build for this CPU instead."
            )
        return replace(self, cpu_isa="avx2" + _PORTABLE_SUFFIX, cpu_features=tuple(sorted(_X86_64_V3)))

    @property
    def is_data(self) -> bool:
        """Whether this is the environment of artefacts that are data, see :meth:`for_data`."""
        return self.torch == self.arch == _ANY

    def for_plans(self) -> Environment:
        """The environment of engines that run without torch, such as TensorRT's plans: any machine with such a GPU."""
        return Environment(device_type=self.device_type, arch=self.arch, os=self.os, torch=_ANY, sm=self.sm)

    def for_data(self) -> Environment:
        """The environment of artefacts that are data, such as an ONNX file: any machine with such a device."""
        return Environment(device_type=self.device_type, arch=_ANY, os=_ANY, torch=_ANY)

    @property
    def tag(self) -> str:
        """The directory name of this environment.

        For example ``torch2.13-cpu-avx512-x86_64-linux``, ``torch2.11-cu130-sm90-x86_64-linux``, ``cuda-sm89-x86_64-linux``
        (:meth:`for_plans`) and ``data-cpu``.

        It shows torch's major.minor, the device, the ISA or ``sm`` level, architecture and OS. Everything
        else (patch version, CPU extensions, libc) is a factor of the key without being part of the name.
        """
        if self.is_data:
            return f"data-{self.device_type}"
        torch = None if self.torch == _ANY else "torch" + ".".join(self.torch.split(".")[:2])
        if self.device_type == "cpu":
            middle = ["cpu", self.cpu_isa]
        elif self.cuda is not None:
            runtime = self.cuda.replace(".", "")
            middle = [runtime if runtime.startswith("rocm") else "cu" + runtime, self.sm]
        else:
            middle = [self.device_type, self.sm]
        return "-".join(part for part in (torch, *middle, self.arch, self.os) if part is not None)

    def difference(self, other: Environment) -> str | None:
        """Why an engine built for ``other`` is not valid here, by the first factor; None if it is."""
        for name in (field.name for field in fields(self) if field.name != "cpu_features"):
            here, built = getattr(self, name), getattr(other, name)
            if here != built:
                return _sentence(name, built, here)
        if self.cpu_features != other.cpu_features:
            return _feature_sentence(set(other.cpu_features), set(self.cpu_features))
        return None

    def to_dict(self) -> dict[str, object]:
        """All factors as JSON."""
        return {**asdict(self), "cpu_features": list(self.cpu_features)}

    @classmethod
    def from_dict(cls, data: object) -> Environment:
        """The environment ``to_dict`` wrote. Raises ``CacheError`` for anything else."""
        record = exact_fields(data, [field.name for field in fields(cls)], "environment")
        try:
            return cls(
                device_type=text_field(record, "device_type"),
                arch=text_field(record, "arch"),
                os=text_field(record, "os"),
                torch=text_field(record, "torch"),
                cpu_isa=optional_text(record, "cpu_isa"),
                cpu_features=text_list(record, "cpu_features"),
                sm=optional_text(record, "sm"),
                cuda=optional_text(record, "cuda"),
                libc=optional_text(record, "libc"),
            )
        except ConfigError as error:
            raise CacheError(str(error)) from error


def parse_cpu_features(cpuinfo: str) -> frozenset[str]:
    """The instruction set extensions in ``/proc/cpuinfo`` that a compiler may use on its own."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in {"flags", "features"}:
            return frozenset(flag for flag in value.split() if _COMPILER_FEATURES.fullmatch(flag))
    return frozenset()


def cpu_isa_level(arch: str, features: Set[str], torch_capability: str) -> str:
    """The level name of a CPU: ``avx512``, ``avx2`` or ``sse`` on x86, else torch's own word for it.

    On x86 the processor's flags decide, since ``ATEN_CPU_CAPABILITY`` changes torch's answer but not what
    compilers emit.
    """
    if arch == "x86_64" and features:
        if features >= _AVX512 | {"avx2", "fma"}:
            return "avx512"
        return "avx2" if features >= {"avx2", "fma"} else "sse"
    word = torch_capability.lower().replace(" ", "")
    return "neon" if word == "default" and arch == "aarch64" else {"noavx": "sse"}.get(word, word)


def public_version(version: str) -> str:
    """``2.13.0`` of ``2.13.0+cpu``. A pre-release keeps its local part, which alone says what code it is."""
    public, _, local = version.lower().partition("+")
    is_release = re.fullmatch(r"[0-9]+(\.[0-9]+)*(\.post[0-9]+)?", public)
    return public if is_release or not local else f"{public}-{local}"


def _sentence(name: str, built: str | None, here: str | None) -> str:
    if name == "torch":
        if built is not None and here is not None and built.split(".")[:2] != here.split(".")[:2]:
            built, here = ".".join(built.split(".")[:2]), ".".join(here.split(".")[:2])
        return f"built with torch {built}, here {here}"
    if name == "cuda":
        return f"built with CUDA {built or 'none'}, here {here or 'none'}"
    if name == "libc":
        return f"built with {built or 'an unknown libc'}, here {here or 'an unknown libc'}"
    if name == "cpu_isa" and built is not None and built.endswith(_PORTABLE_SUFFIX):
        return f"built as the portable variant {built}, asked for {here}"
    if name == "cpu_isa" and here is not None and here.endswith(_PORTABLE_SUFFIX):
        return f"built for {built} alone, asked for the portable variant {here}"
    if name == "device_type":
        return f"built for {built}, asked for {here}"
    return f"built for {built or f'no {name}'}, this machine has {here or 'none'}"


def _feature_sentence(built: set[str], here: set[str]) -> str:
    if lacking := sorted(built - here):
        return f"built for a CPU with {', '.join(lacking[:4])}, which this machine lacks"
    return f"built for a CPU without {', '.join(sorted(here - built)[:4])}, which this machine has"


def _read_cpuinfo() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            return file.read(64 * 1024)
    except OSError:
        return ""


def _torch_facts(device_type: str, index: int | None) -> tuple[str, str, str | None, str | None]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    runtime: str | None = torch.version.cuda
    level: str | None = None
    if hip := getattr(torch.version, "hip", None):
        runtime = "rocm" + ".".join(str(hip).split(".")[:2])
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"no CUDA device for torch {torch.__version__}: engines for 'cuda' need one. "
                "Use device 'cpu', or check the driver."
            )
        if hip:
            level = str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
        else:
            level = "sm" + "".join(str(part) for part in torch.cuda.get_device_capability(index))
    elif device_type != "cpu":
        runtime = None
    return capability, str(torch.__version__), runtime, level

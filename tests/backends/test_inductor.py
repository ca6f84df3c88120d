"""AOTInductor engines: equal to eager, bound to live weights, and refused where they do not fit."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends.base import Backend, BuildRequest
from aitune_hf.backends.inductor import InductorBackend
from aitune_hf.backends.requirements import elsewhere
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

Randomized = Callable[[nn.Module, int], nn.Module]


def test_it_is_a_backend() -> None:
    backend = InductorBackend()
    assert isinstance(backend, Backend)
    assert (backend.name, backend.native, backend.isolated) == ("inductor", True, False)
    assert torch.__version__.startswith(backend.version())


# -- equal to eager ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_nested_inputs_and_outputs(odd: Any, batch: int) -> None:
    engine = odd.load()
    call = odd.call(batch, seed=batch)
    answer = odd.run(engine, call)
    assert type(answer).__name__ == "Answer"
    assert answer["rest"][1] == 3
    assert odd.difference(engine, odd.module, call) < 1e-5
    engine.close()


def test_every_kind_of_constant_is_read_live(odd: Any, randomized: Randomized) -> None:
    """None of them, however small, was frozen into the code: another module's values are the ones that count."""
    other: Any = randomized(odd.module, 1)
    other.plain, other.tables, other.helper.offset = torch.randn(4), [torch.randn(4)], torch.randn(4)
    engine = odd.load(other)
    assert odd.difference(engine, other, odd.call(3)) < 1e-5
    assert odd.difference(engine, odd.module, odd.call(3)) > 1e-2


def test_the_schema_names_the_kinds(odd: Any) -> None:
    constants = {item["name"]: item for item in odd.result.engine["constants"]}
    kinds = sorted(item["kind"] for item in constants.values())
    assert kinds == sorted(["parameter"] * 3 + ["buffer"] * 2 + ["attribute"] * 3 + ["residual"] * 2)
    assert {tuple(item.get("path", ())) for item in constants.values()} >= {("tables", 0), ("helper", "offset")}
    assert not any(name.startswith("module.") for name in constants)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_unet_at_any_batch(unet: Any, batch: int, randomized: Randomized) -> None:
    assert unet.result.envelope.mismatch([(batch, 3, 8, 8), ()]) is None
    other = randomized(unet.module, batch)
    engine = unet.load(other)
    assert unet.difference(engine, other, unet.call(batch, seed=batch)) < 1e-4


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13, 17, 31, 33, 63, 64])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_bert_at_any_batch_and_length(bert: Any, batch: int, length: int) -> None:
    engine = bert.load()
    assert bert.result.envelope.mismatch([(batch, length)] * 2) is None
    assert bert.difference(engine, bert.module, bert.call(batch, length, seed=length)) < 1e-4
    engine.close()


def test_the_envelope_ties_axes_together(bert: Any) -> None:
    envelope = bert.result.envelope
    assert envelope.mismatch([(2, 5), (2, 6)])
    assert envelope.mismatch([(2, 5), (1, 5)])
    assert envelope.mismatch([(2, 65), (2, 65)])
    assert envelope.mismatch([(9, 5), (9, 5)])


# -- weights ----------------------------------------------------------------------------------------------------------


def test_changes_in_place_are_seen_at_once(bert: Any) -> None:
    module = copy.deepcopy(bert.module)
    engine = bert.load(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5).add_(0.1)
    assert bert.difference(engine, module, bert.call(2)) < 1e-4


def test_new_storage_is_taken_up_by_rebind(bert: Any, randomized: Randomized) -> None:
    module = copy.deepcopy(bert.module)
    engine = bert.load(module)
    for parameter, other in zip(module.parameters(), randomized(module, 2).parameters(), strict=True):
        parameter.data = other.data
    before = bert.difference(engine, module, bert.call(2))
    engine.rebind()
    assert before > 1e-3
    assert bert.difference(engine, module, bert.call(2)) < 1e-4
    module.load_state_dict(randomized(module, 3).state_dict(), assign=True)
    engine.rebind()
    assert bert.difference(engine, module, bert.call(2)) < 1e-4


def _reshaped(module: nn.Module) -> None:
    module.pooler.dense.weight = nn.Parameter(torch.randn(32, 16))  # type: ignore[union-attr]


def _other_dtype(module: nn.Module) -> None:
    module.half()


def _no_data(module: nn.Module) -> None:
    module.to("meta")


def _transposed(module: nn.Module) -> None:
    weight = module.pooler.dense.weight  # type: ignore[union-attr]
    weight.data = weight.data.t().contiguous().t()  # type: ignore[operator, union-attr]


def _gone(module: nn.Module) -> None:
    del module.pooler.dense  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spoil", "difference"),
    [
        (_reshaped, "shape is"),
        (_other_dtype, "dtype is"),
        (_no_data, "meta device"),
        (_transposed, "stride is"),
        (_gone, "is not there"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_native_code(
    bert: Any, spoil: Callable[[nn.Module], None], difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bert.load(module := copy.deepcopy(bert.module))
    spoil(module)
    with pytest.raises(EngineLoadError, match=difference):
        engine.rebind()
    monkeypatch.setattr("aitune_hf.backends.inductor.AOTIPackage", lambda *a: pytest.fail("native code was reached"))
    with pytest.raises(EngineLoadError, match=f"^model: the engine's constant '.*{difference}"):
        bert.load(module)


def test_weights_that_were_tied_must_stay_tied(odd: Any) -> None:
    module: Any = copy.deepcopy(odd.module)
    module.tied.weight = nn.Parameter(module.tied.weight.detach().clone())
    with pytest.raises(EngineLoadError, match="was tied to"):
        odd.load(module)


def test_weights_are_freed(odd: Any) -> None:
    """Torch keeps the handles of bound tensors for good; the memory behind them must go all the same."""
    from torch.multiprocessing.reductions import StorageWeakRef

    module: Any = copy.deepcopy(odd.module)
    first, second = odd.load(module), odd.load(module)
    old = StorageWeakRef(module.linear.bias.untyped_storage())
    module.linear.bias.data = torch.randn(4)
    second.close()
    assert not old.expired()
    first.rebind()
    assert old.expired()
    weights = [StorageWeakRef(tensor.untyped_storage()) for tensor in (*module.parameters(), *module.buffers())]
    module_gone = weakref.ref(module)
    del module, first, second
    gc.collect()
    assert module_gone() is None
    assert all(weight.expired() for weight in weights)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_many_threads(bert: Any, threads: int) -> None:
    engine = bert.load(threads=threads)
    calls = [bert.call(1 + i % 3, 3 + i, seed=i) for i in range(8)]
    expected = [bert.run(engine, call)["last_hidden_state"] for call in calls]
    assert bert.difference(engine, bert.module, calls[0]) < 1e-4

    def work(i: int) -> bool:
        return all(
            torch.allclose(bert.run(engine, calls[i])["last_hidden_state"], expected[i], atol=1e-5) for _ in range(100)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    engine.close()


def test_rebind_amid_calls(bert: Any, randomized: Randomized) -> None:
    """Each answer is that of one set of weights or the other, never of a mixture."""
    module = copy.deepcopy(bert.module)
    states = [randomized(module, seed).state_dict() for seed in (5, 6)]
    call = bert.call(2, 9)
    expected = []
    engine = bert.load(module, threads=2)
    for state in states:
        module.load_state_dict(state, assign=True)
        engine.rebind()
        expected.append(bert.run(engine, call)["last_hidden_state"])
    stop = threading.Event()
    wrong: list[float] = []

    def caller() -> None:
        while not stop.is_set():
            got = bert.run(engine, call)["last_hidden_state"]
            error = min(float((got - want).abs().max()) for want in expected)
            if error > 1e-4:
                wrong.append(error)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        # Copies: what was bound before is freed while calls go on.
        module.load_state_dict({k: v.clone() for k, v in states[turn % 2].items()}, assign=True)
        engine.rebind()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert bert.difference(engine, module, call) < 1e-4


# -- life -------------------------------------------------------------------------------------------------------------


def _temp_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("aotinductor*")}


def test_close(odd: Any) -> None:
    before = _temp_folders()
    engine = odd.load()
    assert _temp_folders() <= before
    engine.close()
    engine.close()
    with pytest.raises(EngineLoadError, match="closed"):
        odd.run(engine, odd.call(2))
    with pytest.raises(EngineLoadError, match="closed"):
        engine.rebind()


LOAD_AND_RUN = """
import json, sys, time
import torch
sys.path.insert(0, sys.argv[1])
import conftest
from pathlib import Path
from aitune_hf.backends.base import LoadRequest
start = time.perf_counter()
from aitune_hf.backends.inductor import InductorBackend
module = conftest.Odd().eval()
request = LoadRequest(path="m", module=module, folder=Path(sys.argv[2]), engine=json.loads(sys.argv[3]),
                      device=torch.device("cpu"))
engine = InductorBackend().load(request)
call = conftest.odd_call(2)
leaves = {"x": call["x"], "extra.long": call["extra"]["long"]}
leaves |= {f"extra.pair[{i}]": leaf for i, leaf in enumerate(call["extra"]["pair"])}
out = engine([leaves[name] for name in sys.argv[4].split()])
seconds = time.perf_counter() - start
with torch.no_grad():
    error = float((out[0] - module(**call).first).abs().max())
slow = [name for name in ("torch.export", "torch._inductor.codecache", "torch._dynamo") if name in sys.modules]
print(json.dumps({"seconds": seconds, "error": error, "slow": slow, "why": InductorBackend().available()}))
"""


def test_a_fresh_process_without_a_compiler(odd: Any, tmp_path: Path) -> None:
    import json

    env = {"PATH": "/nonexistent", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    arguments = [str(Path(__file__).parent), str(odd.request.workdir), json.dumps(dict(odd.result.engine))]
    arguments.append(" ".join(map(str, odd.request.graph.input_spec.tensors)))
    run = subprocess.run(
        [sys.executable, "-c", LOAD_AND_RUN, *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["error"] < 1e-5
    assert answer["seconds"] < 2
    assert "no C++ compiler found" in answer["why"]
    assert not list(tmp_path.iterdir())


# -- the artefact -----------------------------------------------------------------------------------------------------


def test_the_artefact_tells_nothing_of_this_machine(bert: Any) -> None:
    content = (bert.request.workdir / "model.pt2").read_bytes()
    for path in (sys.prefix, Path.home(), Path.cwd(), tempfile.gettempdir() + "/", "site-packages", "aitune-build"):
        assert str(path).encode() not in content


def test_the_artefact_holds_no_weights(odd: Any, unet: Any, bert: Any) -> None:
    for built in (unet, bert):
        content = (built.request.workdir / "model.pt2").read_bytes()
        for name, parameter in built.module.named_parameters():
            raw = parameter.detach().numpy().tobytes()
            if len(set(raw)) > 8:
                assert raw not in content, name
    assert sorted(file.name for file in bert.request.workdir.iterdir()) == ["model.pt2"]
    residuals = odd.request.workdir / "residuals.safetensors"
    assert residuals.stat().st_size < 1000


CAPTURE = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
import conftest
from pathlib import Path
from aitune_hf.backends.aoti_compile import compiler_options
from aitune_hf.backends.export import capture
request = conftest.recorded.request_for(conftest.Odd().eval(), [conftest.odd_call(2)], Path(sys.argv[2]))
before = dict(os.environ)
compiler_options(request.device, portable=False)
capture(request)
assert dict(os.environ) == before
"""


def test_capturing_leaves_no_files(tmp_path: Path) -> None:
    """In a process of its own: torch makes its cache folder the first time, and only then."""
    temp, home, work = (tmp_path / name for name in ("temp", "home", "work"))
    for folder in (temp, home, work):
        folder.mkdir()
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(temp), "HOME": str(home)}
    arguments = [str(Path(__file__).parent), str(tmp_path / "out")]
    run = subprocess.run(
        [sys.executable, "-c", CAPTURE, *arguments], env=env, cwd=work, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert not [*temp.iterdir(), *home.iterdir(), *work.iterdir()]


def test_building_again_gives_the_same(odd: Any, request_for: Callable[..., BuildRequest], tmp_path: Path) -> None:
    """Same bytes, same description, and nothing else left or changed."""
    backend, module = InductorBackend(), odd.module
    where = [Path.cwd(), Path(tempfile.gettempdir())]
    state, environ = torch.get_rng_state(), dict(os.environ)
    attributes = {name: dict(vars(part)) for name, part in module.named_modules()}
    listed = [{p.name for p in folder.iterdir() if "inductor" in p.name} for folder in where]
    request = BuildRequest(**{**vars(odd.request), "workdir": tmp_path})
    start = time.perf_counter()
    result = backend.build(request)
    print(f"built in {time.perf_counter() - start:.1f} s")
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(os.environ) == environ
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == attributes
    assert [{p.name for p in folder.iterdir() if "inductor" in p.name} for folder in where] == listed
    assert result == odd.result
    for file in result.files:
        assert (tmp_path / file).read_bytes() == (odd.request.workdir / file).read_bytes()


# -- declined ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_portable_engine(odd: Any, tmp_path: Path) -> None:
    request = BuildRequest(**{**vars(odd.request), "workdir": tmp_path, "options": {"portable": True}})
    result = InductorBackend().build(request)
    assert result.engine["options"]["portable"] is True
    portable = dataclasses.replace(odd, request=request, result=result)
    assert odd.difference(portable.load(), odd.module, odd.call(3)) < 1e-5


def test_options_are_checked(odd: Any) -> None:
    request = BuildRequest(**{**vars(odd.request), "options": {"protable": True}})
    with pytest.raises(ConfigError, match="no option protable"):
        InductorBackend().build(request)


def test_no_compiler(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found: install g\+\+"):
        InductorBackend().build(odd.request)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) if x.is_floating_point() else x


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.train(), "training mode"),
        (lambda m: m.linear.to("meta"), "meta device"),
        (lambda m: m.linear.register_buffer("phase", torch.ones(2, dtype=torch.complex64)), "complex64"),
    ],
)
def test_what_is_declined(
    change: Callable[[Any], object],
    reason: str,
    request_for: Callable[..., BuildRequest],
    tmp_path: Path,
) -> None:
    module = Plain().eval()
    request = request_for(module, [{"x": torch.randn(2, 2)}], tmp_path)
    assert InductorBackend().supports(request) is None
    change(module)
    assert reason in str(InductorBackend().supports(request))


def test_a_cuda_graph_of_what_lies_on_the_host_is_declined(
    request_for: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    request = request_for(Plain().eval(), [{"x": torch.randn(2, 2)}], tmp_path, cuda_graphs=True)
    reason = InductorBackend().supports(request)
    assert reason == "a CUDA graph holds what it read from the host for good: input x is on cpu, and has to be on cuda"


def test_what_lies_elsewhere_is_named(request_for: Callable[..., BuildRequest], tmp_path: Path) -> None:
    """Inputs, buffers, and constants that are neither; tensors without data stand for those of a device."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))
            self.table = torch.arange(3.0)

        def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.table + step

    asked = request_for(Table().eval(), [{"x": torch.randn(2, 3), "step": torch.tensor(1.0)}], tmp_path)
    assert elsewhere(asked, "cpu", constants=True) is None
    x, step = asked.example.inputs
    away = dataclasses.replace(asked.example, inputs=[x.to("meta"), step.to("meta")])
    mixed = dataclasses.replace(asked.example, inputs=[x.to("meta"), step])
    input_here = dataclasses.replace(asked, example=mixed)
    for constants in (False, True):
        assert elsewhere(input_here, "meta", constants) == "input step is on cpu, and has to be on meta"
    buffer_here = dataclasses.replace(asked, example=away)
    assert elsewhere(buffer_here, "meta", constants=False) is None
    assert elsewhere(buffer_here, "meta", constants=True) == "scale is on cpu, and has to be on meta"
    bare = dataclasses.replace(buffer_here, module=nn.Module())
    assert elsewhere(bare, "meta", constants=True) is None
    asked.capture()
    assert str(elsewhere(bare, "meta", constants=True)).endswith("is on cpu, and has to be on meta")


# -- with its weights, and in a child process --------------------------------------------------------------------------


def test_a_frozen_engine_holds_its_weights(request_for: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    backend = InductorBackend()
    options = next(recipe for recipe in backend.recipes(torch.device("cpu")) if recipe.weights == "baked").options
    request = request_for(module, [{"input": torch.randn(4, 64)}], tmp_path / "frozen", **options)
    result = backend.build(request)
    assert sum((request.workdir / name).stat().st_size for name in result.files) > 64 * 64 * 4
    sys.path.insert(0, str(Path(__file__).parent))
    from recorded import load_request, run

    engine = backend.load(load_request(request, result, module))
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = module(x)
        torch.testing.assert_close(run(engine, request, {"input": x}), expected)
        module[0].weight.add_(1.0)
        engine.rebind()
        torch.testing.assert_close(run(engine, request, {"input": x}), expected)
    engine.close()
    with pytest.raises(EngineLoadError, match="closed"):
        run(engine, request, {"input": x})


def test_an_engine_of_others_is_tried_in_a_child_process(bert: Any, odd: Any) -> None:
    from aitune_hf.backends.isolation import IsolatedBuilder

    with IsolatedBuilder(timeout_s=120) as builder:
        for built in (bert, odd):
            request, result = built.request, built.result
            builder.try_engine(
                InductorBackend(),
                "model",
                request.workdir,
                result.engine,
                request.graph,
                result.envelope,
                torch.device("cpu"),
            )
        (odd.request.workdir / "copy").mkdir()
        (odd.request.workdir / "copy" / "model.pt2").write_bytes(b"not a package")
        with pytest.raises(EngineLoadError):
            builder.try_engine(
                InductorBackend(),
                "model",
                odd.request.workdir / "copy",
                odd.result.engine,
                odd.request.graph,
                odd.result.envelope,
                torch.device("cpu"),
            )

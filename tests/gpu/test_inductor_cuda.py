"""AOTInductor engines on a GPU: streams, devices, types, threads, weights that move, CUDA graphs, memory."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf import TuneConfig, stats, tune, untune
from aitune_hf.cache import Environment, LocalStore
from aitune_hf.tuning.drive import restore_modules

pytestmark = pytest.mark.gpu
Make = Callable[..., nn.Module]
Settings = Callable[..., TuneConfig]
#: By type: what rounding in another order may do to sums of a few hundred products.
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def sample(device: torch.device, dtype: torch.dtype = torch.float32, batch: int = 4, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    return torch.randn(batch, 128, 256, generator=draw, device=device, dtype=dtype)


def tuned(make: Make, config: TuneConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A tuned module and its eager twin."""
    module, twin = make(dtype), make(dtype)
    report = tune(module, [sample(device, dtype)], config)
    assert [row.backend.partition("[")[0] for row in report.rows] == ["inductor"], str(report)
    return module, twin


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    assert (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
    return float((first.float() - second.float()).abs().max())


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
def test_it_gives_eagers_answers(dtype: torch.dtype, make: Make, settings: Settings, device: torch.device) -> None:
    module, twin = tuned(make, settings(), device, dtype)
    for seed in range(3):
        x = sample(device, dtype, seed=seed)
        assert difference(module(x), twin(x)) < CLOSE[dtype]
    assert stats(module).engine_calls == 3


def test_latencies_are_measured_on_the_device(make: Make, settings: Settings, device: torch.device) -> None:
    config = settings(strategy="max_throughput", timing_pairs=5)
    report = tune(make(), [sample(device)], config)
    timings = [one.timing for result in report.results for one in result.candidates if one.timing is not None]
    assert timings
    # Eager's own time, taken with events here, is what the report says, within the noise of a shared machine.
    module, x = make(), sample(device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(10):
        module(x)
    first.record()
    for _ in range(20):
        module(x)
    last.record()
    last.synchronize()
    assert timings[0].eager_ms > 0.2 * float(first.elapsed_time(last)) / 20


def test_it_runs_on_the_callers_stream(make: Make, settings: Settings, device: torch.device) -> None:
    """What is queued before and after on a side stream is seen in its order, without a wait in between."""
    module, twin = tuned(make, settings(), device)
    side = torch.cuda.Stream(device)
    x = sample(device)
    expected = twin(x * 2) + 1
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # So that what follows is queued before it can begin.
        answer = module(x * 2) + 1
    side.synchronize()
    assert difference(answer, expected) < 1e-4


def test_it_stays_on_the_device_of_its_rank(make: Make, settings: Settings, device: torch.device) -> None:
    module, twin = tuned(make, settings(), device)
    x = sample(device)
    assert module(x).device == device
    assert difference(module(x), twin(x)) < 1e-4


def test_another_gpu_uses_the_same_engine(make: Make, settings: Settings, device: torch.device) -> None:
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    same = [i for i in others if torch.cuda.get_device_capability(i) == torch.cuda.get_device_capability(device)]
    if not same:
        pytest.skip("there is no second GPU of this kind")
    tuned(make, settings(), device)
    other = torch.device("cuda", same[0])
    module, twin = make().to(other), make().to(other)
    report = tune(module, [sample(other)], settings())
    assert [row.source for row in report.rows] == ["loaded"]
    x = sample(other)
    assert module(x).device == other
    assert difference(module(x), twin(x)) < 1e-4


def test_engines_are_kept_by_gpu_generation(make: Make, settings: Settings, device: torch.device) -> None:
    config = settings()
    tuned(make, config, device)
    environment = Environment.current("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    assert environment.sm == f"sm{major}{minor}"
    assert f"-sm{major}{minor}-" in environment.tag
    assert config.cache_dir is not None
    kept = {entry.manifest.key.environment for entry in LocalStore(config.cache_dir).entries()}
    assert environment in kept
    module, twin = make(seed=1), make(seed=1)
    assert restore_modules({"": module}, config) == 1
    x = sample(device)
    for _ in range(2):
        assert difference(module(x), twin(x)) < 1e-4
    assert stats(module).engine_calls == 1


def test_threads_with_streams_of_their_own(make: Make, settings: Settings, device: torch.device) -> None:
    module, twin = tuned(make, settings(), device)
    inputs = [sample(device, seed=seed) for seed in range(4)]
    expected = [twin(x) for x in inputs]
    torch.cuda.synchronize(device)
    worst = [0.0] * 4

    def work(index: int) -> None:
        stream = torch.cuda.Stream(device)
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(10):
                answer = module(inputs[index])
                stream.synchronize()
                worst[index] = max(worst[index], difference(answer, expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(worst) < 1e-4


def test_it_follows_weights_that_move(make: Make, settings: Settings, device: torch.device) -> None:
    module, twin = tuned(make, settings(), device)
    x = sample(device)
    module.to("cpu")
    assert difference(module(x.cpu()), copy.deepcopy(twin).cpu()(x.cpu())) < 1e-3
    module.to(device)
    before = stats(module).engine_calls
    assert difference(module(x), twin(x)) < 1e-4
    other = make(seed=3)
    module.load_state_dict(other.state_dict())
    assert difference(module(x), other(x)) < 1e-4
    assert stats(module).engine_calls == before + 2


def test_as_a_cuda_graph(make: Make, settings: Settings, graphs: Any, device: torch.device) -> None:
    module, twin = tuned(make, settings(graphs), device)
    answers = [(module(sample(device, seed=seed)), twin(sample(device, seed=seed))) for seed in range(4)]
    for got, want in answers:  # Compared afterwards: an answer must not change with the next call.
        assert difference(got, want) < 1e-4
    other = make(seed=5)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.clone()
    x = sample(device)
    assert difference(module(x), other(x)) < 1e-4


def test_calls_of_a_cuda_graph_on_several_streams_take_turns(
    make: Make, settings: Settings, graphs: Any, device: torch.device
) -> None:
    """One set of buffers: a call may not write to them while that of another stream, queued before, has yet to run."""
    module, twin = tuned(make, settings(graphs), device)
    inputs = [sample(device, seed=seed) for seed in range(4)]
    expected = [twin(x) for x in inputs]
    streams = [torch.cuda.Stream(device) for _ in inputs]
    module(inputs[0])
    torch.cuda.synchronize(device)
    answers = []
    for index, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            if not index:
                torch.cuda._sleep(50_000_000)  # So that the others are queued before the first has begun.
            answers.append(module(inputs[index]))
    torch.cuda.synchronize(device)
    for got, want in zip(answers, expected, strict=True):
        assert difference(got, want) < 1e-4


def test_memory_stays_flat(make: Make, settings: Settings, device: torch.device) -> None:
    module, _ = tuned(make, settings(), device)
    x = sample(device)
    for _ in range(3):
        module(x)
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(20):
        module(x)
    torch.cuda.synchronize(device)
    assert torch.cuda.memory_allocated(device) == before
    weights = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    untune(module)
    gc.collect()
    torch.cuda.empty_cache()
    assert before - torch.cuda.memory_allocated(device) < weights, "the engine held a copy of the weights"

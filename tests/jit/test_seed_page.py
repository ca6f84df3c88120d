"""Every class, state, method and name of the reference page exists here and is what it says."""

from __future__ import annotations

import collections
import enum
import inspect
from typing import Any

import pytest
from jit_kit import Bench, Net, patched, rows
from torch import nn

from aitune_hf import jit
from aitune_hf.jit import patched_module
from aitune_hf.jit.session import TuningSession, use_session

METHODS = [
    "__repr__", "__str__", "_create_graph_cache_dir", "_forward_init", "_forward_recording", "_forward_router",
    "_forward_tuned", "_get_fully_qualified_name", "_get_hierarchy_hash", "_handle_backend_added_hooks",
    "_inspection_graphs", "_log_tuning_exception", "_module_cache_dir", "_module_dtypes", "_patch_device_attribute",
    "_proxy_forward", "_restore_original_forward", "_set_original_forward_for_hierarchy", "_should_be_skipped",
    "_should_be_tuned", "_should_be_tuned_deferred", "_should_be_tuned_eager", "_should_report_inspection",
    "_simulate_dry_run", "_throw_if_has_graph_break", "_tune", "_tune_on_init", "_unpatch", "_unpatch_hierarchy",
    "_update_state", "_write_error_log", "inspection_report", "inspection_subtree_reports", "on_python_exit",
    "print_hierarchy", "print_history", "reset", "try_tune", "tune",
]  # fmt: skip
INSTANCE = {
    "_call_count": int,
    "_children": list,
    "_current_forward_hooks": dict,
    "_current_forward_pre_hooks": dict,
    "_extra_state_info": str,
    "_forward_routing": collections.abc.Callable,
    "_fq_name": str,
    "_id": int,
    "_level": int,
    "_name": str,
    "_original_forward": collections.abc.Callable,
    "cache_dir": object,
    "fq_name": str,
}
SESSION = {
    "attempted_tuning": bool,
    "deferred_tuning_enabled": bool,
    "fq_name_counter": collections.Counter,
    "heads": list,
    "history": list,
    "module_counter": int,
    "patched_classes": collections.Counter,
    "stack": collections.deque,
}
STATIC = ("on_python_exit", "print_hierarchy", "print_history", "reset")


@pytest.fixture
def called(bench: Bench) -> Any:
    net = Net()
    session = bench.session(net, mode="inspect")
    with use_session(session):
        net(rows())
        yield net


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_there(name: str) -> None:
    assert callable(getattr(jit.PatchedModule, name))


@pytest.mark.parametrize("name", STATIC)
def test_static_methods_need_no_instance(name: str) -> None:
    assert isinstance(inspect.getattr_static(jit.PatchedModule, name), staticmethod)


@pytest.mark.parametrize(("name", "kind"), INSTANCE.items())
def test_every_attribute_is_there(called: nn.Module, name: str, kind: type) -> None:
    assert isinstance(getattr(patched(called), name), kind)


def test_the_parent_is_known(called: Any) -> None:
    assert patched(called)._parent is None
    assert patched(called.first).parent is patched(called)


@pytest.mark.parametrize(("name", "kind"), SESSION.items())
def test_class_attributes_are_views_of_the_current_session(name: str, kind: type) -> None:
    with use_session(TuningSession()) as session:
        assert isinstance(getattr(jit.PatchedModule, name), kind)
        assert getattr(jit.PatchedModule, name) == getattr(session, name)


def test_states_are_those_of_the_page() -> None:
    assert issubclass(jit.ModuleState, enum.Enum)
    expected = {"DETACHED", "EAGER", "INIT", "RECORDING", "SKIPPED", "TUNED"}
    assert {state.name for state in jit.ModuleState} == expected
    assert all(state.value == state.name.lower() for state in jit.ModuleState)


def test_graph_break_is_an_exception() -> None:
    assert issubclass(jit.GraphBreakException, Exception)


def test_functions_and_data_are_in_the_module() -> None:
    with use_session(TuningSession(tuner=None)) as session:
        patched_module._to_hist("a line")
        assert session.history == ["a line"]
        with pytest.raises(Exception, match="no tuner"):
            patched_module._build_strategy(session)
    assert jit.PRINT_HIERARCHY_HEADER == patched_module.PRINT_HIERARCHY_HEADER == "JIT Tuning Hierarchy:"
    assert jit.PRINT_HIERARCHY_NO_MODULES_HEADER == "No modules in hierarchy"
    assert set(patched_module._emoji_state) == set(jit.ModuleState)
    assert all(mark.isascii() for mark in patched_module._emoji_state.values())


def test_private_duties_work(called: Any, bench: Bench) -> None:
    one = patched(called)
    assert one._module_dtypes() == ["float32"]
    assert len(one._inspection_graphs()) == 1
    assert one._should_report_inspection()
    assert not one._should_be_skipped()
    assert one.cache_dir == one._module_cache_dir() == bench.folder / "logs" / "Net"
    assert one._create_graph_cache_dir("graph0").is_dir()
    assert one._write_error_log(ValueError("why")).read_text().endswith("ValueError: why\n")
    inside = one._get_hierarchy_hash()
    one._unpatch_hierarchy(include_self=True)
    assert inside == jit.PatchedModule(called)._get_hierarchy_hash()


def test_hooks_added_by_a_backend_run_before_those_of_the_application(called: Any) -> None:
    one, order = patched(called), []
    called.register_forward_hook(lambda *_: order.append("application"))
    before = one._hook_keys()
    called.register_forward_hook(lambda *_: order.append("backend"))
    one._handle_backend_added_hooks(before)
    called(rows())
    assert order == ["backend", "application"]


def test_the_tree_can_be_seen_without_any_patch(called: Any) -> None:
    unused = called.first.left
    with patched(called)._set_original_forward_for_hierarchy():
        assert all("forward" not in vars(module) for module in called.modules())
    assert all("forward" in vars(module) for module in (called, called.first, unused))

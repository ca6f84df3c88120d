"""Which attribute names of modules, helpers and configs say nothing about what is computed."""

from __future__ import annotations

from torch import nn

__all__ = ["CONFIG_COUNT", "MODULE_INTERNALS", "OFF_UNLESS_TRUE", "SEATS", "is_identity"]

# Other parts answer for replaced forwards and for hooks; the last is torch.compile's in-place form.
SEATS = frozenset(
    {"forward", "_old_forward", "_hf_hook", "_diffusers_hook", "__getstate__", "__deepcopy__", "_compiled_call_impl"}
)
# Where a model came from, where it runs, how it is loaded or split over devices: nothing that one forward
# computes from.
_IDENTITY = frozenset(
    {
        "_name_or_path", "name_or_path", "_commit_hash", "_diffusers_version", "diffusers_version",
        "transformers_version", "_class_name", "_use_default_values", "_is_hf_initialized", "hf_device_map",
        "_accelerate_added_attributes", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size",
        "_device_mesh", "_no_split_modules", "_skip_keys_device_placement",
        "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save",
        "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "all_tied_weights_keys",
        "generation_config", "device", "_device", "device_index", "device_map", "_device_map",
        "execution_device", "cache_dir", "_cache_dir", "dynamo_ctx", "_weight_conversions",
        "_is_torch_compile",
    }
)  # fmt: skip
# In a config, also what only names or documents the model. ``dtype``: saving a model writes it, and
# parameters have theirs. ``model_type``: a constant of the config's class, repeated on loaded instances.
_CONFIG_IDENTITY = frozenset(
    {
        "architectures", "dtype", "torch_dtype", "auto_map", "_auto_class", "finetuning_task",
        "task_specific_params", "label2id", "revision", "_post_init_done", "license", "tags",
        "_from_model_config", "model_type", "base_model_prefix",
    }
)  # fmt: skip
CONFIG_COUNT = frozenset({"id2label"})  # what the labels are called does not matter, how many there are does
# transformers writes False when it loads, and nothing when it constructs.
OFF_UNLESS_TRUE = frozenset({"_use_kernels"})
MODULE_INTERNALS = frozenset(vars(nn.Module()))  # hooks, parameter tables, ``training``


def is_identity(name: str, *, config: bool) -> bool:
    """Whether an attribute, or a key of a mapping, tells only where a model is from or where it runs."""
    return (
        name in _IDENTITY
        or name.startswith("_aitune_")
        or name.endswith("name_or_path")
        or (config and name in _CONFIG_IDENTITY)
    )

"""A tuned model looks, answers, saves and is hooked like the original."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from real_kit import (
    BERT_SAMPLES,
    Drawing,
    Tuned,
    answers,
    assert_same,
    bert_call,
    tiny_bert,
    tiny_llama,
    tuned_with_twin,
)
from transformers import BertModel, BertTokenizer, pipeline
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

import aitune_hf
from aitune_hf import TuneConfig


def test_output_forms_asked_for_per_call_have_their_own_class(bert: Tuned) -> None:
    call = bert_call(2, 9)
    with answers(bert.module) as seen:
        out = bert.same(**call)
        assert isinstance(out, BaseModelOutputWithPoolingAndCrossAttentions)
        assert out[0] is out.last_hidden_state is out["last_hidden_state"]
        assert type(bert.same(**call, return_dict=False)) is tuple
        assert len(bert.same(**call, output_hidden_states=True).hidden_states) == 3
        bert.same(**call)
    assert (seen.engines, sum(seen.eager.values())) == (2, 2)
    assert seen.reasons == "a form of call that was not seen in tuning"


def test_attributes_and_parts_are_those_of_the_model(bert: Tuned, drawing: Any) -> None:
    model, twin = bert.module, bert.twin
    assert type(model) is BertModel
    assert (model.dtype, model.device, model.training) == (twin.dtype, twin.device, twin.training)
    assert model.config.to_dict() == twin.config.to_dict()
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    assert_same(model.encoder.layer[1].output.dense.weight, twin.encoder.layer[1].output.dense.weight)
    assert drawing.pipe.device == torch.device("cpu")
    assert drawing.pipe.dtype == torch.float32
    assert dict(drawing.pipe.unet.config) == dict(drawing.twin.unet.config)


def test_a_pipeline_made_of_the_components_runs_the_engines(drawing: Any) -> None:
    other = StableDiffusionPipeline(**drawing.pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    with answers(drawing.pipe) as seen:
        ours = Drawing.draw(other, 32, 32)
    assert_same(ours, Drawing.draw(drawing.twin, 32, 32))
    assert (seen.engines, seen.eager) == (5, {})


def test_a_saved_pipeline_is_a_plain_one_with_the_same_picture(drawing: Any, tmp_path: Path) -> None:
    drawing.pipe.save_pretrained(tmp_path)
    plain = DiffusionPipeline.from_pretrained(tmp_path)
    plain.set_progress_bar_config(disable=True)
    assert type(plain) is StableDiffusionPipeline
    assert all("forward" not in vars(part) for part in plain.unet.modules())
    assert torch.equal(Drawing.draw(plain, 32, 48), Drawing.draw(drawing.twin, 32, 48))
    assert_same(Drawing.draw(drawing.pipe, 32, 48), Drawing.draw(plain, 32, 48))


def test_calling_forward_reaches_the_engine(bert: Tuned) -> None:
    call = bert_call(2, 7)
    with answers(bert.module) as seen:
        bert.same(call=lambda model: model.forward(**call))
        bert.same(call=lambda model: BertModel.__call__(model, **call))
    assert (seen.engines, seen.eager) == (2, {})


def test_a_transformers_pipeline_around_the_model_reaches_the_engine(bert: Tuned, tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    tuned, plain = (pipeline("feature-extraction", model=m, tokenizer=tokenizer) for m in (bert.module, bert.twin))
    sentences = ["a b c", "d", "e f g h i j a b c"]
    with answers(bert.module) as seen:
        for batch in (1, 3):
            ours, theirs = tuned(sentences, batch_size=batch), plain(sentences, batch_size=batch)
            for a, b in zip(ours, theirs, strict=True):
                assert_same(torch.tensor(a), torch.tensor(b))
    assert (seen.engines, seen.eager) == (4, {})


def test_generate_reaches_engines_and_gives_the_same_tokens(config: TuneConfig) -> None:
    def generate(model: Any, length: int = 3, **options: Any) -> Any:
        prompt = torch.arange(5, 5 + length)[None]
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **options)

    only_blocks = dataclasses.replace(config, skip_modules=("LlamaRMSNorm", "LlamaRotaryEmbedding", "LlamaAttention"))
    llama = tuned_with_twin(tiny_llama(), [lambda model: generate(model, do_sample=False)], only_blocks)
    with answers(llama.module) as seen:
        for length in (3, 2):
            ours, theirs = (generate(model, length, do_sample=False) for model in (llama.module, llama.twin))
            assert torch.equal(ours, theirs)
        drawn = []
        for model in (llama.module, llama.twin):
            torch.manual_seed(7)
            drawn.append(generate(model, do_sample=True, num_beams=1))
        assert torch.equal(*drawn)
    assert seen.engines >= 2 * 6 * 3
    assert seen.builds == 0


class Counting(ModelHook):  # type: ignore[misc]
    def __init__(self) -> None:
        self.before = self.after = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.before += 1
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        self.after += 1
        return output


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_accelerate_fires_once_per_call(when: str, bert: Tuned, config: TuneConfig) -> None:
    hook, torch_hook = Counting(), []
    if when == "before":
        bert = Tuned(tiny_bert(), bert.twin, None)
        add_hook_to_module(bert.module, hook)
        aitune_hf.tune(bert.module, BERT_SAMPLES, config)
        hook.before = hook.after = 0
    else:
        add_hook_to_module(bert.module, hook)
    bert.module.register_forward_hook(lambda *_: torch_hook.append(1))
    with answers(bert.module) as seen:
        for _ in range(2):
            bert.same(**bert_call(2, 9))
    assert (hook.before, hook.after, len(torch_hook)) == (2, 2, 2)
    assert (seen.engines, seen.eager) == (2, {})
    remove_hook_from_module(bert.module)
    bert.same(**bert_call(2, 9))
    assert (hook.before, hook.after, len(torch_hook)) == (2, 2, 3)


def test_a_dispatched_model_keeps_its_hook_and_its_map(bert: Tuned) -> None:
    dispatch_model(bert.module, {"": "cpu"}, force_hooks=True)
    assert bert.module.hf_device_map == {"": "cpu"}
    with answers(bert.module) as seen:
        for _ in range(2):
            bert.same(**bert_call(2, 9))
    assert seen.engines + sum(seen.eager.values()) == 2
    assert hasattr(bert.module, "_hf_hook")

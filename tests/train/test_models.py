"""Models, optimizers and schedules by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from thinwire.train import checkpoint, models, optimizers, weights
from thinwire.train.config import Config, Model, Optimizer, Schedule
from thinwire.train.errors import UserError
from thinwire.train.models import PRESETS, Llama, Shape
from thinwire.train.resnet import resnet


@pytest.mark.parametrize(("name", "vocabulary"), [("1M", 256), ("35M", 32000), ("135M", 32000), ("200M", 32000)])
def test_presets_have_the_size_they_are_named_for(name: str, vocabulary: int) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[name], vocabulary, context=128)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert 0.85 < millions / float(name[:-1]) < 1.15


def test_the_decoder_sees_the_past_alone() -> None:
    model = Llama(Shape(2, 16, 2, 32), vocabulary=11, context=12)
    tokens = torch.randint(0, 11, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6) and not torch.allclose(before[:, 8:], after[:, 8:])


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_weights_and_agrees(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = Llama(Shape(2, 32, 4, 48), vocabulary=19, context=24, tied=tied)
    checkpoint.write_file(tmp_path / "model.safetensors", weights.named(model))
    checkpoint.write_file(tmp_path / "config.json", model.hf_config())
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, 19, (2, 24))
    assert isinstance(other, transformers.LlamaForCausalLM)
    assert torch.allclose(other(tokens).logits, model(tokens), atol=1e-5)


def test_any_hf_causal_lm_by_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8).save_pretrained(tmp_path)
    config = Config()
    config.model.kind, config.model.path, config.model.context = "hf", str(tmp_path / "config.json"), 8
    model = models.build(config, vocabulary=16)
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert models.export_config(model)["model_type"] == "gpt2"
    with pytest.raises(UserError, match="tokenizer"):
        models.build(config, vocabulary=17)


def test_weights_are_fp32_whatever_the_config_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    half = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, dtype="bfloat16")
    transformers.GPT2LMHeadModel(half).to(torch.bfloat16).save_pretrained(tmp_path)
    for path in (tmp_path / "config.json", tmp_path):
        config = Config()
        config.model.kind, config.model.path, config.model.context = "hf", str(path), 8
        model = models.build(config, vocabulary=16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("content", ["[1, 2]", "{}", "{"])
def test_a_json_that_is_no_config_is_refused_by_name(tmp_path: Path, content: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "c.json").write_text(content)
    config = Config()
    config.model.kind, config.model.path = "hf", str(tmp_path / "c.json")
    with pytest.raises(UserError, match=r"c\.json"):
        models.build(config, 256)


@pytest.mark.parametrize("preset", ["tiny", "20", "18"])
def test_resnets_classify_images_of_any_size(preset: str) -> None:
    assert resnet(preset, channels=3, classes=7)(torch.rand(2, 3, 9, 12)).shape == (2, 7)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="multiple"):
        models.llama(Model(width=30, heads=4), 256)
    with pytest.raises(UserError, match="preset"):
        models.llama(Model(preset="1T"), 256)


@pytest.mark.parametrize("name", ["adamw", "adopt", "muon", "sgd"])
def test_every_optimizer_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = Llama(Shape(1, 16, 2, 32), vocabulary=11, context=8)
    inner = optimizers.build(model, Optimizer(name=name, lr={"sgd": 0.5, "muon": 0.02}.get(name, 0.01)))
    named = {id(p) for optimizer in inner for group in optimizer.param_groups for p in group["params"]}
    assert named == {id(p) for p in model.parameters()}
    tokens, losses = torch.randint(0, 11, (4, 8)), []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(loss.item())
        for optimizer in inner:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1


def test_muon_is_not_for_embeddings_whatever_they_are_called() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)  # its embeddings are wte and wpe
    muon, adamw = optimizers.build(model, Optimizer(name="muon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    theirs = [{names[id(p)] for group in each.param_groups for p in group["params"]} for each in (muon, adamw)]
    tables = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert tables <= theirs[1] and "transformer.h.0.mlp.c_fc.weight" in theirs[0]


def test_muon_without_matrices_is_refused_in_words_of_the_config() -> None:
    with pytest.raises(UserError, match="optimizer.name = 'muon' is for matrices"):
        optimizers.build(resnet("tiny", channels=1, classes=3), Optimizer(name="muon"))


def factors(schedule: Schedule, steps: int = 100) -> list[float]:
    return [optimizers.lr_factor(step, steps, schedule) for step in range(1, steps + 1)]


def test_cosine_ends_where_it_should() -> None:
    values = factors(Schedule(name="cosine", warmup=10, final=0.05))
    assert values[9] == 1 and values[4] == 0.5 and values[-1] == pytest.approx(0.05)
    assert values[54] == pytest.approx(0.05 + 0.95 / 2), "half way between the end of the warm-up and the last step"


def test_wsd_stays_and_then_decays_by_the_root() -> None:
    values = factors(Schedule(name="wsd", warmup=10, decay=0.2))
    assert set(values[10:80]) == {1.0}
    assert values[84] == pytest.approx(1 - math.sqrt(5 / 20)) and values[-1] == 0
    assert set(factors(Schedule(name="constant", warmup=0))) == {1.0}

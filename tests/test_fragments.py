"""Fragments cover every trainable parameter once, with whole blocks, whatever the model."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from thinwire.fragments import by_layer, resolve
from thinwire.replica import clean_name, unwrap


class Block(nn.Module):
    """A residual block, with containers of its own that must not be taken for the model's."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(7))


class Decoder(nn.Module):
    def __init__(self, depth: int = 6, tie: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


class ResNet(nn.Module):
    """The shape of torchvision's: stages are attributes."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        for i, depth in enumerate(depths, 1):
            setattr(self, f"layer{i}", nn.Sequential(*(ResidualBlock() for _ in range(depth))))
        self.fc = nn.Linear(4, 10)


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


def trainable(model: nn.Module) -> list[str]:
    return [clean_name(name) for name, p in unwrap(model).named_parameters() if p.requires_grad]


def check(model: nn.Module, blocks: list[str], rest: list[str]) -> None:
    """`blocks` are the paths of all blocks in order, `rest` the names of all else."""
    names = trainable(model)
    for count in range(1, len(blocks) + 1):
        for pattern in ("strided", "sequential"):
            fragments = by_layer(model, count, pattern)
            assert sorted(sum(fragments, [])) == sorted(names)
            assert resolve(fragments, names) == fragments
            assert len(fragments) == count + bool(rest)
            assert fragments[count:] == ([rest] if rest else [])
            assert held_by(fragments[:count], blocks) == dealt(blocks, count, pattern)
    with pytest.raises(ValueError, match=f"has {len(blocks)} blocks"):
        by_layer(model, len(blocks) + 1)


def held_by(fragments: list[list[str]], blocks: list[str]) -> list[list[str]]:
    """The blocks that each fragment's names lie in; each block must be in one fragment only, which `dealt` shows."""
    return [[block for block in blocks if any(n.startswith(f"{block}.") for n in names)] for names in fragments]


def dealt(blocks: list[str], count: int, pattern: str) -> list[list[str]]:
    if pattern == "strided":
        return [blocks[i::count] for i in range(count)]
    edges = [-(-i * len(blocks) // count) for i in range(count + 1)]
    return [blocks[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{i}" for i in range(count)]


def test_decoder():
    rest = ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]
    check(Decoder(), numbered("blocks", 6), rest)


def test_three_blocks_a_fragment_as_in_the_streaming_paper():
    fragments = by_layer(Decoder(depth=12), 4)
    assert {name.split(".")[1] for name in fragments[0]} == {"0", "4", "8"}
    assert len(fragments) == 5


def test_tied_weights_are_in_one_fragment_under_their_first_name():
    check(Decoder(tie=True), numbered("blocks", 6), ["embedding.weight", "norm.weight", "norm.bias"])


def test_a_shared_block_counts_once():
    model = Decoder(depth=3)
    model.blocks.append(model.blocks[0])
    check(model, numbered("blocks", 3), ["embedding.weight", "norm.weight", "norm.bias", "head.weight"])


def test_frozen_parameters_are_in_no_fragment():
    model = Decoder()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].mlp.requires_grad_(False)
    check(model, [f"blocks.{i}" for i in range(1, 6)], ["norm.weight", "norm.bias", "head.weight"])


def test_sequential_of_layers_has_no_rest():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    check(model, ["0", "2", "4"], [])


def test_sequential_of_small_sequentials_keeps_them_whole():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()) for _ in range(4)))
    check(model, ["0", "1", "2", "3"], [])


def test_embedding_and_head_in_a_sequential_are_apart():
    model = nn.Sequential(nn.Embedding(10, 4), Block(), Block(), Block(), nn.LayerNorm(4), nn.Linear(4, 10))
    check(model, ["1", "2", "3"], ["0.weight", "4.weight", "4.bias", "5.weight", "5.bias"])


def test_stages_in_a_sequential_are_looked_through():
    stem, head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    stages = [nn.Sequential(ResidualBlock(), ResidualBlock()) for _ in range(2)]
    check(
        nn.Sequential(stem, *stages, head),
        ["1.0", "1.1", "2.0", "2.1"],
        ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "3.1.weight", "3.1.bias"],
    )


@pytest.mark.parametrize("depths", [(2, 2, 2, 2), (3, 4, 6, 3), (1, 1, 1)])
def test_resnet_stages_come_together(depths):
    blocks = [f"layer{i}.{j}" for i, depth in enumerate(depths, 1) for j in range(depth)]
    check(ResNet(depths), blocks, ["conv1.weight", "conv1.bias", "fc.weight", "fc.bias"])


def test_torch_transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    check(encoder, numbered("layers", 4), ["norm.weight", "norm.bias"])
    inside = nn.Sequential(nn.Embedding(10, 8), encoder, nn.Linear(8, 10))
    rest = ["0.weight", "1.norm.weight", "1.norm.bias", "2.weight", "2.bias"]
    check(inside, numbered("1.layers", 4), rest)


def test_encoder_and_decoder_come_together():
    model = nn.Transformer(8, 2, 3, 2, 16, batch_first=True)
    blocks = numbered("encoder.layers", 3) + numbered("decoder.layers", 2)
    check(model, blocks, [f"{part}.norm.{name}" for part in ("encoder", "decoder") for name in ("weight", "bias")])


def test_a_block_that_holds_others_is_no_block():
    model = nn.Sequential(Block(), Decoder(depth=4))
    fragments = by_layer(model, 5)
    assert sorted(sum(fragments, [])) == sorted(trainable(model))


class Wrapped(nn.Module):
    """What PEFT does to names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


def compiled_blocks() -> nn.Module:
    model = Decoder()
    for i in range(6):
        model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
        Wrapped,
        lambda model: compiled_blocks(),
    ],
    ids=["DataParallel", "compile", "both", "PEFT", "compiled blocks"],
)
def test_wrappers_change_nothing(wrap):
    assert by_layer(wrap(Decoder()), 3) == by_layer(Decoder(), 3)


TINY = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11, "intermediate_size": 16}


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "GPT2":
        config = transformers.GPT2Config(n_layer=4, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
        return transformers.GPT2LMHeadModel(config)
    if name == "T5":
        config = transformers.T5Config(num_layers=2, d_model=8, d_kv=4, num_heads=2, d_ff=16, vocab_size=11)
        return transformers.T5ForConditionalGeneration(config)
    if name == "ResNet":
        config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[2, 2], num_labels=3)
        return transformers.ResNetForImageClassification(config)
    config = getattr(transformers, f"{name}Config")(**TINY)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("Llama", numbered("model.layers", 4)),
        ("GPT2", numbered("transformer.h", 4)),
        ("GPTNeoX", numbered("gpt_neox.layers", 4)),
        ("T5", numbered("encoder.block", 2) + numbered("decoder.block", 2)),
        ("ResNet", numbered("resnet.encoder.stages", 2)),
    ],
)
def test_hugging_face_models(name, blocks):
    model = hugging_face(name)
    check(model, blocks, [n for n in trainable(model) if not n.startswith(tuple(f"{b}." for b in blocks))])


def test_lora():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(hugging_face("Llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    check(model, numbered("model.layers", 4), [])
    assert all("lora_" in name for fragment in by_layer(model, 2) for name in fragment)


@pytest.mark.parametrize("count", [0, -1, 7])
def test_impossible_count(count):
    with pytest.raises(ValueError, match=f"between 1 and 6 fragments, not {count}"):
        by_layer(Decoder(), count)


def test_unknown_pattern_and_no_blocks():
    with pytest.raises(ValueError, match='"strided" or "sequential"'):
        by_layer(Decoder(), 2, "random")
    with pytest.raises(ValueError, match="give fragments as lists of parameter names"):
        by_layer(nn.Linear(2, 2), 1)


NAMES = ["wte", "h.0.w", "h.0.b", "h.1.w", "h.1.b", "h.10.w", "head"]


def test_patterns():
    assert resolve([["h.[0-9].*"], ["wte", "head", "h.1?.w"]], NAMES) == [
        ["h.0.w", "h.0.b", "h.1.w", "h.1.b"],
        ["wte", "head", "h.10.w"],
    ]
    assert resolve([["*"]], NAMES) == [NAMES]


def test_names_copied_from_a_wrapped_model():
    fragments = [["module.h.*"], ["_orig_mod.wte", "module._orig_mod.base_model.model.head"]]
    assert resolve(fragments, NAMES) == [NAMES[1:6], ["wte", "head"]]


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ([["h.*"], ["wte"]], "no fragment names 'head'"),
        ([["h.0.*"]], "no fragment names 'wte', 'h.1.w', 'h.1.b' and 2 more"),
        ([], "no fragment names 'wte'"),
        ([["*"], ["head"]], "fragments name 'head' more than once"),
        ([["*", "h.1.w"]], "fragments name 'h.1.w' more than once"),
        ([["*"], ["haed"]], "'haed' matches no trainable parameter"),
        ([["*"], []], "at least one parameter name"),
        (["wte", "head"], "a list of at least one parameter name or pattern, not 'wte'"),
    ],
)
def test_wrong_fragments_are_named(fragments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(fragments, NAMES)

"""Models by name: a Llama-style decoder and a ResNet in a few lines each, and any HF causal LM."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.train.config import Config
from thinwire.train.config import Model as ModelConfig
from thinwire.train.errors import UserError, as_user_error, nearest


@dataclass(frozen=True)
class Shape:
    """What makes a decoder: blocks, residual width, heads, SwiGLU's inner size."""

    layers: int
    width: int
    heads: int
    hidden: int


# 35M, 100M and 200M: the shapes of the DiLoCo papers (4x MLP there; here SwiGLU of equal size); 135M: DES-LOC's.
# The names count the papers' parameters, with their own vocabularies.
PRESETS = {
    "1M": Shape(5, 128, 4, 344),
    "5M": Shape(6, 256, 4, 688),
    "12M": Shape(6, 384, 6, 1024),
    "35M": Shape(6, 512, 8, 1365),
    "100M": Shape(9, 768, 12, 2048),
    "135M": Shape(30, 576, 9, 1536),
    "200M": Shape(12, 1024, 16, 2730),
}


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions. x: (batch, heads, time, size); angles: (time, size / 2). Halves are paired, as in Llama."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=1e-5)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The trunk; its names are those of transformers' LlamaModel, so that the weights load there as they are."""

    def __init__(self, shape: Shape, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        size = shape.width // shape.heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.arange(context).float()[:, None] * frequencies  # (time, size / 2)
        self.angles: Tensor
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, angles = self.embed_tokens(tokens), self.angles[: tokens.shape[1]]
        for block in self.layers:
            x = block(x, angles)
        return self.norm(x)


class Llama(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, shape: Shape, vocabulary: int, context: int, tied: bool = True) -> None:
        super().__init__()
        self.shape, self.vocabulary, self.context, self.tied = shape, vocabulary, context, tied
        self.model = Decoder(shape, vocabulary, context)
        if not tied:
            self.lm_head = nn.Linear(shape.width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # residual branches start small, so that depth does not blow up the sum
                last = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.model.embed_tokens.weight if self.tied else self.lm_head.weight
        return F.linear(self.model(tokens), head)

    def hf_config(self) -> dict[str, Any]:
        """What transformers needs to build the same model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.shape.width,
            "intermediate_size": self.shape.hidden,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float32",
        }


def llama(config: ModelConfig, vocabulary: int) -> Llama:
    if config.preset not in PRESETS:
        raise UserError(f"model.preset = {config.preset!r}: {nearest(config.preset, PRESETS)}")
    shape = asdict(PRESETS[config.preset]) | {
        k: getattr(config, k) for k in ("layers", "width", "heads", "hidden") if getattr(config, k)
    }
    if shape["width"] % (2 * shape["heads"]):
        raise UserError(f"model.width = {shape['width']} must be a multiple of twice model.heads = {shape['heads']}")
    return Llama(Shape(**shape), vocabulary, config.context, config.tied)


def hf(config: ModelConfig) -> nn.Module:
    """A causal LM of transformers: weights from a folder or a name, a fresh start from a config.json."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("model.kind = 'hf' needs transformers: pip install transformers") from error
    if not config.path:
        raise UserError("model.kind = 'hf' needs model.path: a config.json, a model folder or a model name")
    path = Path(config.path).expanduser()
    try:
        if path.suffix == ".json":
            table = json.loads(path.read_text())
            if not isinstance(table, dict) or "model_type" not in table:
                raise ValueError("not a config.json of transformers: it has no model_type")
            fresh = transformers.AutoConfig.for_model(table.pop("model_type"), **table)
            return transformers.AutoModelForCausalLM.from_config(fresh, dtype=torch.float32)
        stored = str(path) if path.is_dir() else config.path
        return transformers.AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"cannot load model.path = {config.path!r}: {str(error).splitlines()[0]}") from error


def build(config: Config, vocabulary: int, channels: int = 0) -> nn.Module:
    """The model of a config, with weights drawn from its seed. `channels` is that of the images, 0 for text."""
    from thinwire.train.resnet import resnet

    torch.manual_seed(config.seed)
    with as_user_error():
        if config.model.kind == "resnet":
            return resnet(config.model.preset, channels, vocabulary)
        if config.model.kind == "hf":
            return _fitting(hf(config.model), vocabulary, config.model.context)
        return llama(config.model, vocabulary)


def _fitting(model: Any, vocabulary: int, context: int) -> nn.Module:
    """An HF model that has room for the data's tokens and sequences."""
    if model.config.vocab_size < vocabulary:
        raise UserError(
            f"the data has {vocabulary} tokens, the model {model.config.vocab_size}: use its own data.tokenizer"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and longest < context:
        raise UserError(f"model.context = {context}: this model's sequences have at most {longest} tokens")
    fitting: nn.Module = model
    return fitting


def export_config(model: nn.Module) -> dict[str, Any] | None:
    """config.json for transformers, where the model has its shape."""
    if isinstance(model, Llama):
        return model.hf_config()
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else None

"""How messages are written."""

from .base import Codec, Layout, Part, Weight
from .dct import DCT
from .dense import E3M0, BFloat16, Float32, Int8
from .sparse import TopK
from .twobit import TwoBit

__all__ = [
    "DCT",
    "E3M0",
    "BFloat16",
    "Codec",
    "Float32",
    "Int8",
    "Layout",
    "Part",
    "TopK",
    "TwoBit",
    "Weight",
]

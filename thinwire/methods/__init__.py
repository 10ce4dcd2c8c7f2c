"""One paper a file: its equation, its reference, its limit law, its table of rows."""

from .ddp import ddp
from .desloc import desloc, local_adam, local_states, reset_states
from .diloco import diloco, streaming_diloco
from .eager import carry_diloco, delayed_diloco, eager_diloco
from .local_sgd import local_sgd
from .relay import relay_diloco
from .sparse import decoupled_momentum, demo, sparseloco
from .sparse_averaging import sparse_averaging
from .two_bit import two_bit_averaging

__all__ = [
    "carry_diloco",
    "ddp",
    "decoupled_momentum",
    "delayed_diloco",
    "demo",
    "desloc",
    "diloco",
    "eager_diloco",
    "local_adam",
    "local_sgd",
    "local_states",
    "relay_diloco",
    "reset_states",
    "sparse_averaging",
    "sparseloco",
    "streaming_diloco",
    "two_bit_averaging",
]

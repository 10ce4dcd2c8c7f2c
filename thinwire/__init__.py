"""thinwire trains one model on many machines that are joined by slow links."""

from typing import TYPE_CHECKING, Any

from .attach import attach
from .codec import DCT, E3M0, BFloat16, Codec, Float32, Int8, Layout, TopK, TwoBit
from .cost import Cost, cost
from .events import Event
from .fleet import Fleet
from .fragments import by_layer
from .group import Group
from .live import Live
from .methods import (
    carry_diloco,
    ddp,
    decoupled_momentum,
    delayed_diloco,
    demo,
    desloc,
    diloco,
    eager_diloco,
    local_adam,
    local_sgd,
    local_states,
    relay_diloco,
    reset_states,
    sparse_averaging,
    sparseloco,
    streaming_diloco,
    two_bit_averaging,
)
from .methods.common import table
from .optim import ADOPT, Muon
from .replica import Replica, View, buffers, grads, moment, params
from .rule import (
    SGD,
    Average,
    Carry,
    Delayed,
    Eager,
    Nesterov,
    Outer,
    Overwrite,
    Reduced,
    Reset,
    Rule,
    Scope,
    SharedMomentum,
    Sign,
)
from .schedule import Every
from .table import Method, Sync
from .transport import Local, PeerLost, Transport

if TYPE_CHECKING:
    from .elastic import Elastic


def __getattr__(name: str) -> Any:
    """`Elastic` stands on an extra, torchft, which is loaded when it is first asked for."""
    if name == "Elastic":
        from .elastic import Elastic

        return Elastic
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


__all__ = [
    "ADOPT",
    "Average",
    "BFloat16",
    "Carry",
    "Codec",
    "Cost",
    "DCT",
    "Delayed",
    "E3M0",
    "Eager",
    "Elastic",
    "Event",
    "Every",
    "Fleet",
    "Float32",
    "Group",
    "Int8",
    "Layout",
    "Live",
    "Local",
    "Method",
    "Muon",
    "Nesterov",
    "Outer",
    "Overwrite",
    "PeerLost",
    "Reduced",
    "Replica",
    "Reset",
    "Rule",
    "SGD",
    "Scope",
    "SharedMomentum",
    "Sign",
    "Sync",
    "TopK",
    "Transport",
    "TwoBit",
    "View",
    "attach",
    "buffers",
    "by_layer",
    "carry_diloco",
    "cost",
    "ddp",
    "decoupled_momentum",
    "delayed_diloco",
    "demo",
    "desloc",
    "diloco",
    "eager_diloco",
    "grads",
    "local_adam",
    "local_sgd",
    "local_states",
    "moment",
    "params",
    "relay_diloco",
    "reset_states",
    "sparse_averaging",
    "sparseloco",
    "streaming_diloco",
    "table",
    "two_bit_averaging",
]

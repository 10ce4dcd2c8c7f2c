"""What a user may get wrong is a ValueError that says what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw

from .entries import adamw, adopt, fleet_of, momentum, sgd, train


def test_wrong_pairings_are_refused() -> None:
    every = tw.Every(4)
    second = tw.moment("exp_avg_sq")
    for codec in (tw.Int8(), tw.E3M0(), tw.TwoBit(), tw.TopK(4), tw.DCT(tw.TopK(4))):
        with pytest.raises(ValueError, match="exp_avg_sq"):
            tw.Sync(second, every, tw.Overwrite(), codec)
        with pytest.raises(ValueError):
            tw.Sync(tw.buffers, every, tw.Overwrite(), codec)
        with pytest.raises(ValueError, match="feedback"):
            tw.Sync(tw.params, every, tw.Average(), codec, feedback=0.9)
    for codec in (tw.Float32(), tw.BFloat16()):
        assert tw.Sync(second, every, tw.Overwrite(), codec).codec is codec


@pytest.mark.parametrize("optimizer", [adamw, momentum, adopt])
def test_demo_needs_plain_sgd(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="SGD"):
        train(fleet_of(tw.demo(), 2, optimizer), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: tw.local_sgd(0),
        lambda: tw.local_sgd(4, delay=-1),
        lambda: tw.Every(4, offset=-1),
        lambda: tw.decoupled_momentum(4, variant="median"),  # type: ignore[arg-type]
        lambda: tw.desloc(4, moments="quarter-life"),  # type: ignore[arg-type]
        lambda: tw.eager_diloco(4, phases=0),
        lambda: tw.streaming_diloco(4, []),
        lambda: tw.TopK(0),
        lambda: tw.sparseloco(4, topk=1.5),  # type: ignore[arg-type]
        lambda: tw.TopK(4, values=tw.BFloat16),  # type: ignore[arg-type]
        lambda: tw.DCT(tw.TopK(4), 8.0),  # type: ignore[arg-type]
        lambda: tw.DCT(tw.Int8),  # type: ignore[arg-type]
        lambda: tw.diloco("8"),  # type: ignore[arg-type]
        lambda: tw.relay_diloco("8", [["*"]]),  # type: ignore[arg-type]
        lambda: tw.carry_diloco(8, delay="8"),  # type: ignore[arg-type]
        lambda: tw.eager_diloco(4, phases=1.5),  # type: ignore[arg-type]
        lambda: tw.desloc(8, outer=0.7),  # type: ignore[arg-type]
        lambda: tw.diloco(8, codec=tw.Int8),  # type: ignore[arg-type]
        lambda: tw.diloco(8, codec="int8"),  # type: ignore[arg-type]
        lambda: tw.Sync(tw.params, 8, tw.Average()),  # type: ignore[arg-type]
        lambda: tw.Sync(tw.params, tw.Every(8, delay=1), tw.Overwrite()),
        lambda: tw.Sync(tw.buffers, tw.Every(8, delay=1), tw.Overwrite()),
        lambda: tw.Sync(tw.buffers, tw.Every(8, delay=1), tw.Average()),
        lambda: tw.Sync(tw.buffers, tw.Every(8), tw.Outer(tw.Nesterov(0.7, 0.9))),
        lambda: tw.Sync(tw.moment("exp_avg_sq"), tw.Every(8, delay=1), tw.Average()),
        lambda: tw.Sync(tw.moment("exp_avg_sq"), tw.Every(8), tw.Outer(tw.Nesterov(0.7, 0.9))),
        lambda: tw.Sync(tw.moment("exp_avg_sq"), tw.Every(8, delay=8), tw.Carry(tw.Nesterov(0.7, 0.9))),
        lambda: tw.Sync(tw.params, tw.Every(8), tw.Overwrite(), tw.TopK(2, 8)),
        lambda: tw.Group(max_rate=-5),
        lambda: tw.Nesterov(-1.0, 0.9),
        lambda: tw.Nesterov(0.7, 1.5),
        lambda: tw.Sync(tw.grads, tw.Every(1), tw.Outer(tw.Nesterov(0.7, 0.9))),
        lambda: tw.Sync(tw.params, tw.Every(1), tw.Sign()),
        lambda: tw.Sync(tw.params, tw.Every(8), tw.Average),  # type: ignore[arg-type]
        lambda: tw.Sync("params", tw.Every(8), tw.Average()),  # type: ignore[arg-type]
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        wrong()


def test_a_misspelt_state_is_named() -> None:
    with pytest.raises(ValueError, match="exp_av: there are exp_avg, exp_avg_sq"):
        fleet_of(tw.desloc(4, moments={"exp_av": 8}), 2, torch.optim.AdamW)
    assert fleet_of(tw.desloc(4, moments={"exp_avg": 8}), 2, sgd).rows  # a usual one may be absent


def test_a_period_is_named_as_it_was_given() -> None:
    with pytest.raises(ValueError, match="not '16'"):
        tw.desloc("16")  # type: ignore[arg-type]


@pytest.mark.parametrize("fragments", [[["inner.*"]], [["*"], ["gain"]], [["*"], ["nothing"]]])
def test_fragments_name_every_parameter_once(fragments: Any) -> None:
    with pytest.raises(ValueError, match="gain|head|nothing"):
        train(fleet_of(tw.streaming_diloco(4, fragments), 2), 1)


def a_fleet(replicas: Any = None, method: Any = None, transport: Any = None) -> tw.Fleet:
    model = nn.Linear(2, 1)
    own = [tw.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))]
    return tw.Fleet(own if replicas is None else replicas, method or tw.diloco(2), transport)


def a_replica(weight: float = 1, twice: bool = False) -> tw.Replica:
    model = nn.Linear(2, 1)
    optimizer = sgd(model.parameters())
    return tw.Replica(model, [optimizer] * (1 + twice), weight)


def attached_twice() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model.parameters())
    tw.attach(model, optimizer, tw.diloco(2), tw.Local()).detach()  # may be attached again after that
    for _ in range(2):
        tw.attach(model, optimizer, tw.diloco(2), tw.Local())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: tw.streaming_diloco(4, [["*"]], mix=2), "mix must be a number from 0 to 1, not 2"),
        (
            lambda: tw.Sync(tw.params, tw.Every(4, delay=5), tw.Outer(tw.SGD(1.0), 0.5), tw.TopK(2, 16), feedback=0.9),
            "feedback with a delay of 5",
        ),
        (lambda: tw.sparseloco(4, decay=-1), "decay must be a number from 0 to 1, not -1"),
        (lambda: tw.demo(decay=float("nan")), "from 0 to 1, not nan"),
        (lambda: tw.demo(decay=None), "decay must be a number"),  # type: ignore[arg-type]
        (lambda: tw.decoupled_momentum(4, decay=None), "decay must be a number"),  # type: ignore[arg-type]
        (lambda: tw.sparse_averaging(4, decay=None), "decay must be a number"),  # type: ignore[arg-type]
        (lambda: tw.decoupled_momentum(4, chunk="64"), "blocks of 1 to 256 along an axis, not '64'"),  # type: ignore[arg-type]
        (lambda: tw.demo(chunk=2.5), "blocks of 1 to 256 along an axis, not 2.5"),  # type: ignore[arg-type]
        (lambda: tw.diloco(4, codec=0), "the codec of a row must be such as"),  # type: ignore[arg-type]
        (lambda: tw.eager_diloco(None), "period must be a whole number"),  # type: ignore[arg-type]
        (lambda: tw.Method("mine", tw.ddp().rows[0]), "in a tuple"),  # type: ignore[arg-type]
        (lambda: tw.Method("mine", (tw.ddp(),)), "rows, in a tuple"),  # type: ignore[arg-type]
        (lambda: tw.by_layer(4, 2), "by_layer cuts a torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: tw.Replica(lazy := nn.LazyLinear(2), sgd(lazy.parameters())), "give the model one first"),
        (lambda: tw.decoupled_momentum(4, decay=1.5, variant="mean"), "decay < 1, not 0.7 and 1.5"),
        (lambda: tw.diloco(4, outer_lr="fast"), "0 <= lr"),  # type: ignore[arg-type]
        (lambda: tw.Local(lose=3), "lose must be a function"),  # type: ignore[arg-type]
        (lambda: tw.cost(tw.diloco, nn.Linear(2, 1), 2), r"a call such as tw.diloco\(every=32\)"),  # type: ignore[arg-type]
        (lambda: tw.cost(tw.diloco(4), nn.Linear(2, 1), 2.5), "whole number"),  # type: ignore[arg-type]
        (lambda: tw.cost(tw.diloco(4), "model", 2), "needs a torch.nn.Module, not str"),  # type: ignore[arg-type]
        (lambda: tw.Replica(nn.Linear(2, 1), "adam"), "expected a torch optimizer"),
        (lambda: a_fleet(method=tw.diloco), "a call such as"),
        (lambda: a_fleet([nn.Linear(2, 1)]), "a list of tw.Replica"),
        (lambda: a_fleet([]), "at least one"),
        (lambda: a_fleet(transport=tw.Local), "a transport is such as"),
        (lambda: tw.streaming_diloco(4, 3), "lists of names or patterns"),  # type: ignore[arg-type]
        (lambda: tw.streaming_diloco(4, ["weight", "bias"]), "lists of names or patterns"),
        (lambda: tw.Outer(0.7), "an outer step is such as tw.Nesterov"),  # type: ignore[arg-type]
        (lambda: tw.Carry(None), "an outer step is such as tw.Nesterov"),  # type: ignore[arg-type]
        (lambda: tw.table("mine", "params", every=3), "a method is made of tw.Sync"),  # type: ignore[arg-type]
        (lambda: tw.moment(), "a moment is named"),
        (lambda: tw.cost(tw.diloco(4), nn.Linear(2, 1), 2).bytes(7.5), "steps must be"),  # type: ignore[arg-type]
        (lambda: tw.cost(tw.diloco(4), nn.Linear(2, 1), 2).wire(-1), "steps must be"),
        (lambda: tw.Group.connect("127.0.0.1:29500", worker="0", workers=2), "whole number from 0 to 1"),  # type: ignore[arg-type]
        (lambda: tw.Group.connect("127.0.0.1:29500", worker=0, workers=0), "workers must be"),
        (lambda: tw.by_layer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2.0), "not 2.0"),  # type: ignore[arg-type]
        (
            lambda: tw.Replica(nn.Linear(2, 1), sgd(nn.Linear(2, 1).parameters())),
            "no trainable parameter of this model",
        ),
        (lambda: a_replica(twice=True), "given twice"),
        (lambda: a_replica(weight="2"), "replica.weight must be a finite number"),  # type: ignore[arg-type]
        (lambda: a_replica(weight=None), "replica.weight must be a finite number"),  # type: ignore[arg-type]
        (lambda: a_replica(weight=[1]), "replica.weight must be a finite number"),  # type: ignore[arg-type]
        (lambda: tw.params.where("head"), "where takes a function"),  # type: ignore[arg-type]
        (lambda: tw.Sync(tw.grads, tw.Every(1), tw.Average(), tw.Int8()), "they take Overwrite or Sign"),
        (lambda: a_fleet([tw.Replica(nn.Linear(2, 1), [])]), "no optimizer"),
        (lambda: a_fleet([a_replica()] * 2), "share a model"),
        (lambda: attached_twice(), "attached to a fleet already"),
        *(
            (lambda clip=clip: tw.Fleet([a_replica()], tw.ddp(), tw.Local(), clip=clip), "clip is the largest norm")
            for clip in (-1, 0, float("nan"), "1", True)
        ),
        (lambda: a_fleet().load_state_dict({}), "what fleet.state_dict"),
        (lambda: a_fleet().load_state_dict(None), "what fleet.state_dict"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_is_answered_with_what_to_give(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


@pytest.mark.parametrize("delay", [4, 8])
def test_a_table_that_learns_nothing_is_warned_of(delay: int) -> None:
    with pytest.warns(UserWarning, match="use another delay, or mix=0.5"):
        tw.streaming_diloco(4, [["*"]], delay=delay, mix=0)

"""What one worker owns, and views of it: the only place that knows wrappers, DTensors and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .dtensor import is_dtensor
from .spelling import of_function
from .state_names import created_states, first_value

if TYPE_CHECKING:
    from .lead import Line

Predicate = Callable[[str], bool]
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def unwrap(model: nn.Module) -> nn.Module:
    """The model beneath DDP, DataParallel, torch.compile and Lightning Fabric."""
    while (inner := _beneath(model)) is not None:
        model = inner
    return model


def _beneath(model: nn.Module) -> nn.Module | None:
    """What a wrapper holds: torch.compile's as `_orig_mod`, Fabric's as `_forward_module`."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return model.module
    held = vars(model).get("_modules", {})
    return held.get("_orig_mod") or held.get("_forward_module")


def _copies_of(model: nn.Module) -> Any | None:
    """The process group over which DDP keeps copies of this model equal, if it is wrapped so."""
    while not isinstance(model, DistributedDataParallel):
        inner = _beneath(model)
        if inner is None:
            return None
        model = inner
    return model.process_group


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile, activation checkpointing and PEFT put into it.

    >>> clean_name("base_model.model._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    for piece in _WRAPPER_NAMES:
        name = name.replace(piece, "")
    return name.removeprefix("base_model.model.")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def sharded_as(like: Tensor, piece: Tensor) -> Tensor:
    """`piece`, this rank's part, as a tensor sharded the way `like` is."""
    if not is_dtensor(like):
        return piece
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(piece, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def whole(like: Tensor, piece: Tensor) -> Tensor:
    """The unsharded tensor of which every rank has its `piece`. Collective where `like` is sharded."""
    tensor = sharded_as(like, piece)
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def part(like: Tensor, full: Tensor) -> Tensor:
    """This rank's part of an unsharded tensor that every rank has."""
    if not is_dtensor(like):
        return full
    from torch.distributed.tensor import DTensor, Replicate

    copies = DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
    return copies.redistribute(placements=like.placements).to_local()


def _unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Accelerate's and Fabric's optimizers hold the real one."""
    while (inner := _held_by(optimizer)) is not None:
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"expected a torch optimizer, or a list of them, not {type(optimizer).__name__}")
    return optimizer


def _held_by(optimizer: Any) -> Optimizer | None:
    held = getattr(optimizer, "__dict__", {})
    inner = held.get("optimizer", held.get("_optimizer"))
    return inner if isinstance(inner, Optimizer) else None


class Replica:
    """One model with its optimizer (or a list of optimizers) and the weight of its contributions.

    `weight` may change at every step (the tokens of a batch, say); each row sums it since its last landed launch. It is
    the worker's: give all of its processes the same.
    `inside` is the process group (or one-dimensional mesh) whose ranks hold equal copies of this replica; a model
    wrapped in DDP brings its own.

    >>> model = nn.Linear(2, 2)
    >>> list(Replica(model, torch.optim.SGD(model.parameters(), lr=.1)).trainable)
    ['weight', 'bias']
    """

    line: Line | None = None  # to the other ranks of the worker, where one of them leads
    is_whole: bool = False  # messages are of unsharded tensors
    frozen_then: Mapping[str, int] = {}  # fingerprints of frozen tensors in the state that was loaded

    def __init__(self, model: nn.Module, optimizer: Any, weight: float = 1, inside: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"a replica needs a torch.nn.Module, not {type(model).__name__}")
        self.model = model
        self.module = unwrap(model)
        self.copies = inside.get_group() if isinstance(inside, DeviceMesh) else inside or _copies_of(model)
        self.optimizers = [
            _unwrap_optimizer(o) for o in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
        ]
        self.weight = weight
        named = {clean_name(name): parameter for name, parameter in self.module.named_parameters()}
        self.trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self.statistics = _batch_norm_buffers(self.module)
        self._places = self._find_places()
        self._idle = [name for name, parameter in self.trainable.items() if id(parameter) not in self._places]
        self._made_on = {name: parameter.device for name, parameter in self.trainable.items()}
        if len(named) < sum(1 for _ in self.module.parameters()):
            raise ValueError("two parameters have the same name once the names of wrappers are taken off: rename one")
        self._check()

    def _check(self) -> None:
        """What would train nothing, or something else than was meant."""
        self.weighs()
        if not self.trainable:
            raise ValueError("the model has no trainable parameter: nothing would ever be sent")
        tensors = {**self.trainable, **self.frozen, **self.statistics}
        unknown = next((name for name, tensor in tensors.items() if is_lazy(tensor)), None)
        if unknown is not None:
            raise ValueError(f"{unknown} has no shape until its lazy module sees a batch: give the model one first")
        odd = next((name for name, parameter in self.trainable.items() if parameter.is_complex()), None)
        if odd is not None:
            raise ValueError(f"{odd} is complex, and messages are real: train torch.view_as_real of it")
        if len({id(optimizer) for optimizer in self.optimizers}) < len(self.optimizers):
            raise ValueError("an optimizer is given twice: name each once")
        if self.optimizers and not any(id(parameter) in self._places for parameter in self.trainable.values()):
            raise ValueError(
                "the optimizer holds no trainable parameter of this model: build it from model.parameters(), "
                "after the model is wrapped, sharded or moved"
            )
        if self._stranger() is not None:
            raise ValueError(
                "an optimizer holds a parameter that is not the model's, and would never be sent: make it a part of "
                "the model (a loss's too), or give it an optimizer of its own that is not in this fleet"
            )

    def weighs(self) -> float:
        """The weight as a plain number: a tensor might be added to in place later."""
        given: Any = self.weight
        weight = float(given) if hasattr(given, "__float__") else math.nan
        if not 0 <= weight < math.inf:
            raise ValueError(f"replica.weight must be a finite number, at least 0, not {self.weight!r}")
        return weight

    @property
    def most_tensors(self) -> int:
        """No row of any method has more."""
        return max(len(self.trainable), len(self.statistics))

    @property
    def device(self) -> torch.device:
        return next(iter(self.trainable.values())).device

    def group_of(self, name: str) -> tuple[Optimizer, dict[str, Any]] | None:
        """The optimizer and the parameter group that train this parameter."""
        key = id(self.trainable[name])
        if key not in self._places:
            self._places = self._find_places()
        place = self._places.get(key)
        return (place[0], place[0].param_groups[place[1]]) if place else None

    def _find_places(self) -> dict[int, tuple[Optimizer, int]]:
        """By position: loading an optimizer's state replaces its group dictionaries."""
        return {
            id(parameter): (optimizer, position)
            for optimizer in self.optimizers
            for position, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def state_of(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps for this parameter; nothing before its first step."""
        found = self.group_of(name)
        return found[0].state.get(self.trainable[name], {}) if found else {}

    def restart_state(self, name: str) -> None:
        """Set this parameter's optimizer state to what it was before the first step, its step count too."""
        found, state = self.group_of(name), self.state_of(name)
        for key, value in state.items():
            if isinstance(value, Tensor):
                value.fill_(first_value(key, found[1] if found else {}))
            elif key == "step":
                state[key] = 0

    def restart_states(self, names: Iterable[str]) -> None:
        for name in names:
            self.restart_state(name)

    def set_steps(self, names: Sequence[str], steps: Sequence[float]) -> None:
        for name, step in zip(names, steps, strict=True):
            state = self.state_of(name)
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(step)
            elif "step" in state:
                state["step"] = type(state["step"])(step)

    def match_gradients(self, names: Sequence[str], wanted: Sequence[float]) -> None:
        """Zeros where a gradient is wanted and there is none; none where it is not wanted."""
        for name, needed in zip(names, wanted, strict=True):
            parameter = self.trainable[name]
            if not needed:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def drop_gradients(self) -> None:
        for parameter in self.trainable.values():
            parameter.grad = None

    def has_finite_state(self, name: str) -> bool:
        """Whether this rank's part of the parameter's optimizer state is finite."""
        values = [local(v) for v in self.state_of(name).values() if isinstance(v, Tensor) and v.is_floating_point()]
        return all(bool(torch.isfinite(value.sum(dtype=torch.float32))) for value in values)

    def refuse_changed(self, moments: bool) -> None:
        """What was frozen, absent or another tensor when the fleet was made is in no row.

        `moments`: there are rows of moments, which a tensor has if an optimizer had it by then.
        """
        anew = "call finish() and detach(), then attach anew"
        thawed = next((name for name, parameter in self.frozen.items() if parameter.requires_grad), None)
        if thawed is not None:
            raise ValueError(
                f"{thawed} was frozen when the fleet was made and trains now, but would never be sent: {anew}"
            )
        moved = next((name for name, p in self.trainable.items() if p.device != self._made_on[name]), None)
        if moved is not None:
            way = f"from {self._made_on[moved]} to {self.trainable[moved].device}"
            raise ValueError(f"{moved} was moved {way} after the fleet was made: move the model before that")
        self._places = self._find_places()
        new = self._stranger()
        if new is not None:
            raise ValueError(f"{new} came after the fleet was made and would never be sent: {anew}")
        late = (
            next((name for name in self._idle if id(self.trainable[name]) in self._places), None) if moments else None
        )
        if late is not None:
            raise ValueError(f"{late} had no optimizer when the fleet was made, so its moments are not sent: {anew}")
        replaced = self._replaced()
        if replaced is not None:
            raise ValueError(f"{replaced} is another parameter than when the fleet was made, and is not sent: {anew}")
        now = _batch_norm_buffers(self.module) if self.statistics else {}
        other = next((name for name, buffer in self.statistics.items() if now.get(name) is not buffer), None)
        if other is not None:
            raise ValueError(
                f"{other} is another tensor than when the fleet was made, and would never be sent: "
                "move, cast and load the model before that"
            )

    def _stranger(self) -> str | None:
        """A parameter that an optimizer trains and no row can carry."""
        known = {id(parameter) for parameter in (*self.trainable.values(), *self.frozen.values())}
        if self._places.keys() <= known:
            return None
        names = {id(parameter): clean_name(name) for name, parameter in self.module.named_parameters()}
        names = {key: name for key, name in names.items() if key not in known}
        return next((names[key] for key in self._places if key in names), "a parameter of no module of the model")

    def _replaced(self) -> str | None:
        """A name that stands for another parameter by now. FSDP2 shows whole tensors in place of shards at times."""
        present = {id(parameter) for part in self.module.modules() for parameter in part._parameters.values()}
        gone = [name for name, p in self.trainable.items() if id(p) not in present and not is_dtensor(p)]
        names = {clean_name(name) for name, _ in self.module.named_parameters()} if gone else set()
        return next((name for name in gone if name in names), None)

    def island_mesh(self) -> Any | None:
        """The device mesh that the parameters are sharded over inside this worker, if any."""
        meshes = {p.device_mesh for p in self.trainable.values() if is_dtensor(p)}
        if len(meshes) > 1:
            raise ValueError("the parameters are sharded over several device meshes: shard them over one")
        return meshes.pop() if meshes else None

    @property
    def is_sharded_throughout(self) -> bool:
        """Whether no two ranks of the worker hold the same value of anything that rows carry."""
        moving = [*self.trainable.values(), *self.statistics.values()]
        return all(is_dtensor(t) and all(p.is_shard() for p in t.placements) for t in moving)

    def fixed_tensors(self) -> dict[str, Tensor]:
        """What no row carries and no optimizer changes: frozen parameters and persistent buffers."""
        kept = {clean_name(name) for name in self.module.state_dict(keep_vars=True)}
        buffers = {clean_name(name): buffer for name, buffer in self.module.named_buffers()}
        others = {n: b for n, b in buffers.items() if n in kept and n not in self.statistics}
        return {**self.frozen, **others}


def _batch_norm_buffers(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for path, part in module.named_modules():
        if isinstance(getattr(part, "running_mean", None), Tensor):
            for kind in ("running_mean", "running_var", "num_batches_tracked"):
                buffer = getattr(part, kind, None)
                if buffer is not None:
                    found[clean_name(f"{path}.{kind}" if path else kind)] = buffer
    return found


@dataclass(frozen=True)
class View:
    """WHAT live tensors of a replica meet. Use `params`, `grads`, `moment(name)`, `buffers` and `.where`.

    >>> print(params.where(lambda name: "head" not in name))
    params where <lambda>
    """

    kind: str
    states: tuple[str, ...] = ()
    keep: tuple[Predicate, ...] = ()

    def where(self, keep: Predicate) -> View:
        """Only the tensors for whose parameter names `keep` is true."""
        if not callable(keep):
            raise ValueError(f"where takes a function of a parameter's name, not {keep!r}")
        return replace(self, keep=(*self.keep, keep))

    def table(self, replica: Replica) -> Mapping[str, Tensor]:
        """The tensors that it chooses from; for gradients and moments, their parameters."""
        if self.kind == "buffers":
            return replica.statistics
        if self.kind == "fixed":
            return replica.fixed_tensors()
        return {**replica.trainable, **replica.statistics} if self.kind == "model" else replica.trainable

    def names(self, replica: Replica) -> list[str]:
        names = list(self.table(replica))
        for keep in self.keep:
            names = keep.among(names) if hasattr(keep, "among") else [name for name in names if keep(name)]
        if self.kind == "moment":
            names = [name for name in names if self.state_of(replica, name)]
        return names

    def state_of(self, replica: Replica, name: str) -> str | None:
        """Which of the named states this parameter has, or will have; without an optimizer, the first."""
        if not replica.optimizers:
            return self.states[0]
        created = created_states(replica, name)
        return next((state for state in self.states if state in created), None)

    def tensor(self, replica: Replica, name: str, entry: Tensor) -> Tensor | None:
        """The live tensor on this rank, or None where there is none yet; `entry` is the table's."""
        if self.kind == "grads":
            return _gradient(name, replica.trainable[name])
        if self.kind == "moment":
            return next((value for state in self.states if (value := _moment(replica, name, state)) is not None), None)
        return local(entry.detach())

    @property
    def absolute(self) -> bool:
        """Whether the tensors are values to agree on, not differences."""
        return self.kind != "grads"

    def __str__(self) -> str:
        what = f"moment({' or '.join(self.states)})" if self.kind == "moment" else self.kind
        return " where ".join([what, *map(of_function, self.keep)])


params = View("params")
grads = View("grads")
buffers = View("buffers")
model = View("model")  # all that trains: parameters and statistics
fixed = View("fixed")  # all that does not


def moment(*states: str) -> View:
    """The optimizer state of this name, for every trainable parameter that has it; of several names, the first it has.

    >>> print(moment("exp_avg", "momentum_buffer"))
    moment(exp_avg or momentum_buffer)
    """
    if not states or not all(isinstance(state, str) for state in states):
        raise ValueError(f'a moment is named as the optimizer names it, tw.moment("exp_avg"), not {states!r}')
    return View("moment", states)


def _gradient(name: str, parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ValueError(f"{name} has a sparse gradient, which no row can carry: use sparse=False in its module")
    return local(gradient.detach())


def _moment(replica: Replica, name: str, state: str) -> Tensor | None:
    value = replica.state_of(name).get(state)
    if value is None:
        return None
    like = local(replica.trainable[name])
    value = local(value) if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != like.shape:
        kind = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the state {state} of {name} is {kind}, not plain floating point: it cannot be averaged. "
            "Use a method that leaves optimizer state local: local_sgd, diloco, streaming_diloco or sparseloco"
        )
    return value

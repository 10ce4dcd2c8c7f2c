"""The method section of a config: its keys are the arguments of the method's function, whichever that is."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

import thinwire as tw
import thinwire.methods
from thinwire.train.config import convert
from thinwire.train.errors import UserError, as_user_error, nearest

if TYPE_CHECKING:
    from thinwire.train.config import Optimizer as OptimizerConfig

# what the trainer takes where a method has no default of its own
DEFAULTS: dict[str, Any] = {"every": 16, "fragments": 2}

# a value of the type that a key has where a method's default is None
EXAMPLES: dict[str, Any] = {"delay": 0}

# keys whose value is an object of a class: written in a config as the constructor call that makes it
OBJECTS: dict[str, tuple[type, str]] = {
    "codec": (tw.Codec, "a codec such as 'Int8()' or 'DCT(TopK(32), 64)'"),
    "values": (tw.Codec, "a codec such as 'BFloat16()'"),
    "outer": (tw.Nesterov, "an outer step such as 'Nesterov(1.0, 0.9)'"),
}
CONSTRUCTORS = ("Float32", "BFloat16", "Int8", "E3M0", "TwoBit", "TopK", "DCT", "Nesterov")

COMMENTS = {
    "every": "steps between two exchanges of the parameters",
    "moments": 'periods of optimizer states, {exp_avg = 48}, or "half-life"; not set = 3x and 6x every',
    "outer": 'outer step, "Nesterov(1.0, 0.9)"; not set = the plain mean',
    "delay": "steps between sending and applying: the exchange hides behind them",
    "outer_lr": "learning rate of the outer step",
    "outer_momentum": "momentum of the outer step",
    "codec": 'how it is written, "Int8()" or "DCT(TopK(32), 64)"; not set = fp32',
    "values": "how kept values are written",
    "fragments": "parts of the model that travel apart from each other (a number of groups of blocks)",
    "mix": "share of the local parameters kept when a fragment lands",
    "phases": "how many exchanges may be under way",
    "chunk": "side (DCT) or length (top-k) of the blocks that are thinned",
    "topk": "values kept of each block",
    "decay": "decay of the momentum or residual buffer",
    "variant": "paper, mean or consensus",
}


def methods() -> dict[str, Callable[..., Any]]:
    """Every method of the library by name: the functions of `thinwire.methods` that return a Method."""
    found = vars(thinwire.methods).items()
    return {
        name: f
        for name, f in found
        if inspect.isfunction(f) and f.__annotations__.get("return") in ("Method", tw.Method)
    }


def method_function(name: str) -> Callable[..., Any]:
    known = methods()
    if name not in known:
        raise UserError(f"unknown method {name!r}: {nearest(name, known)}")
    return known[name]


def method_keys(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(method_function(name)).parameters)


def comment_of(key: str, name: str) -> str:
    return COMMENTS.get(key, f"argument of tw.{name}")


def set_method_key(method: dict[str, Any], key: str, value: Any) -> None:
    """Set one key of the method section; another name keeps of the other keys what goes with the new method."""
    if key == "name":
        _rename(method, str(value))
        return
    known = method_keys(method["name"])
    if key not in known:
        raise UserError(
            f"method {method['name']!r} has no key {key!r}: {nearest(key, known) if known else 'it has none'}"
        )
    method[key] = _checked(method["name"], key, value)


def _rename(method: dict[str, Any], name: str) -> None:
    """A file names every key, so one that has its method's default was not chosen: it would not be the new one's."""
    known = method_keys(name)
    if name == method["name"]:
        return
    before = resolved_method({"name": method["name"]})
    kept = {key: value for key, value in method.items() if key in known and value != before[key]}
    method.clear()
    method.update({"name": name}, **kept)


def _checked(name: str, key: str, value: Any) -> Any:
    """A value of the default's type; whole numbers may stand for reals, "None" for one that is not set."""
    default = method_keys(name)[key].default
    if default is None and value == "None":  # TOML and the command line have no other word for it
        return None
    default = DEFAULTS.get(key) if default is inspect.Parameter.empty else default
    default = EXAMPLES.get(key) if default is None else default
    lists = key == "fragments" and isinstance(value, list)  # of names, where a number has the model's blocks shared out
    if isinstance(default, (bool, int, float)) and key not in OBJECTS and not lists:
        value = convert(f"method.{key}", value, type(default))
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"method.{key} = {value}: must be a finite number")
    return value


def resolved_method(method: dict[str, Any]) -> dict[str, Any]:
    """Every key of the method with its value, objects written as constructor calls."""
    values = {}
    for key, parameter in method_keys(method["name"]).items():
        default = DEFAULTS.get(key) if parameter.default is inspect.Parameter.empty else parameter.default
        value = method.get(key, default)
        values[key] = repr(value) if key in OBJECTS and not isinstance(value, (str, type(None))) else value
    return values


def build_method(method: dict[str, Any], model: nn.Module) -> Any:
    """The Method that the config describes, for this model."""
    values = {key: _object(key, value, model) for key, value in resolved_method(method).items()}
    with as_user_error():
        return method_function(method["name"])(**values)


def refuse_optimizer(method: tw.Method, optimizer: OptimizerConfig) -> None:
    """In the words of a config: the library would say it in those of torch."""
    if not any(row.rule.signs for row in method.rows):
        return
    for key, given, wanted in (("name", optimizer.name, "sgd"), ("momentum", optimizer.momentum, 0)):
        if given != wanted:
            needs = f"{method.name} hands plain SGD the sign of the update"
            raise UserError(f"{needs}, but optimizer.{key} = {given!r}: --set optimizer.{key}={wanted}")


def _object(key: str, value: Any, model: nn.Module) -> Any:
    if value is None:
        return None
    if key in OBJECTS:
        return _of_kind(key, construct(value) if isinstance(value, str) else value)
    if key == "fragments":
        return _fragments(value, model)
    return value


def _of_kind(key: str, value: Any) -> Any:
    kind, wanted = OBJECTS[key]
    if not isinstance(value, kind):
        raise UserError(f"method.{key} = {value!r}: must be {wanted}")
    return value


def _fragments(value: Any, model: nn.Module) -> Any:
    """Lists of names as they are; a number of groups of blocks as the lists of this model."""
    if type(value) is int:
        with as_user_error():
            return tw.by_layer(model, value)
    lists = value if isinstance(value, list) else [value]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        raise UserError(f"method.fragments = {value!r}: must be a number, or lists of parameter names")
    return value


def construct(text: str) -> Any:
    """A codec or an outer step from its constructor call; nothing but the known names and literals is read.

    >>> construct("DCT(TopK(32), 64)")
    DCT(TopK(32, chunk=4096, values=Float32(), merge='senders'), chunk=64)
    """
    try:
        with as_user_error():
            return _evaluate(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, TypeError) as error:
        raise UserError(
            f"cannot read {text!r}: write a constructor call such as 'Int8()' or 'DCT(TopK(32), 64)'"
        ) from error


def _evaluate(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return getattr(tw, _known(node.id, text))()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        arguments = [_evaluate(argument, text) for argument in node.args]
        named = {k.arg: _evaluate(k.value, text) for k in node.keywords if k.arg}
        return getattr(tw, _known(node.func.id, text))(*arguments, **named)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise UserError(f"cannot read {text!r}: only numbers, texts and {', '.join(CONSTRUCTORS)}") from error


def _known(name: str, text: str) -> str:
    if name not in CONSTRUCTORS:
        raise UserError(f"unknown name {name!r} in {text!r}: {nearest(name, CONSTRUCTORS)}")
    return name

"""Writing a config as TOML, each key with its comment."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from thinwire.train.config import SECTIONS, Config
from thinwire.train.methods import comment_of, resolved_method


def dump(config: Config) -> str:
    """The whole config as TOML that `thinwire train` reads back."""
    lines = [_line(f.name, getattr(config, f.name), f.metadata["comment"]) for f in fields(config) if f.metadata]
    lines += ["", "[method]", *_method_lines(config.method)]
    for section in SECTIONS:
        part = getattr(config, section)
        lines += ["", f"[{section}]"]
        lines += [_line(f.name, getattr(part, f.name), f.metadata["comment"]) for f in fields(part)]
    return "\n".join(lines) + "\n"


def _method_lines(method: dict[str, Any]) -> list[str]:
    name = method["name"]
    values = resolved_method(method)
    return [_line("name", name, "the method; its keys are the arguments of tw." + name)] + [
        _line(key, value, comment_of(key, name)) for key, value in values.items()
    ]


def _line(key: str, value: Any, comment: str) -> str:
    # TOML has no null: a key that is not set stays as a comment, so that it can be found and set
    text = f"# {key} =" if value is None else f"{key} = {_value(value)}"
    return f"{text:<32}  # {comment}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)

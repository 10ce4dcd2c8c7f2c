"""A state as JSON and raw tensors, never pickle: nested dicts and lists of tensors, numbers, strings and bytes."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEPTH = 64
MANIFEST = 1 << 24  # bytes of JSON at most
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float16", "bfloat16"),
        *("float32", "float64", "complex32", "complex64", "complex128"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Parcel:
    """A copy of a state on the host: `manifest` says how it is built from `tensors`.

    >>> parcel = pack({"step": 3, "weights": [torch.ones(2), None], 7: b"raw"})
    >>> unpack(*read_manifest(parcel.manifest, limit=100)[:1], parcel.tensors)
    {'step': 3, 'weights': [tensor([1., 1.]), None], 7: b'raw'}
    """

    manifest: bytes
    tensors: list[Tensor]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def pack(state: Any) -> Parcel:
    tensors: list[Tensor] = []
    structure = _pack(state, "state", tensors, DEPTH)
    kinds = [[NAMES[tensor.dtype], list(tensor.shape)] for tensor in tensors]
    manifest = json.dumps({"structure": structure, "tensors": kinds}, separators=(",", ":")).encode()
    if len(manifest) > MANIFEST:
        raise ValueError(f"the state has too many entries: {len(manifest)} bytes of JSON, {MANIFEST} at most")
    return Parcel(manifest, tensors)


def _pack(value: Any, path: str, tensors: list[Tensor], depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"{path}: nested more than {DEPTH} deep")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return {"tensor": _stage(_copy(value, path), tensors)}
    if isinstance(value, bytes):
        return {"bytes": _stage(_as_tensor(value), tensors)}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(v, f"{path}[{i}]", tensors, depth - 1) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[_key(k, path), _pack(v, f"{path}[{k!r}]", tensors, depth - 1)] for k, v in value.items()]}
    raise ValueError(
        f"{path} is a {type(value).__name__}: a state holds tensors, numbers, strings, bytes and None only"
    )


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise ValueError(f"{path} has the key {key!r}: keys are strings or whole numbers")


def _copy(tensor: Tensor, path: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.dtype not in NAMES:
        raise ValueError(f"{path} is a {type(tensor).__name__} of {tensor.dtype}: only plain dense tensors travel")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _as_tensor(text: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _stage(tensor: Tensor, tensors: list[Tensor]) -> int:
    tensors.append(tensor)
    return len(tensors) - 1


Kind = tuple[torch.dtype, list[int]]


def read_manifest(text: bytes | bytearray, limit: int) -> tuple[Any, list[Kind]]:
    """The structure, and dtype and shape of each tensor. All sizes are checked here, before anything is allocated."""
    try:
        manifest = json.loads(text)
        structure, kinds = manifest["structure"], [_kind(entry, limit) for entry in manifest["tensors"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the manifest is not valid ({' '.join(str(error).split())[:200]})") from error
    return structure, kinds


def size_of(kinds: Sequence[Kind]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds)


def _kind(entry: Any, limit: int) -> Kind:
    name, shape = entry
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a tensor of shape {str(shape)[:80]}")
    # an empty tensor can have absurd sizes too
    if math.prod(max(size, 1) for size in shape) > limit:
        raise ValueError(f"a tensor of shape {str(shape)[:80]} is over the limit of {limit} bytes")
    return DTYPES[name], shape


def unpack(structure: Any, tensors: Sequence[Tensor]) -> Any:
    try:
        return _unpack(structure, tensors, DEPTH)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"the structure is not valid ({type(error).__name__})") from error


def _unpack(value: Any, tensors: Sequence[Tensor], depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if not isinstance(value, dict) or len(value) != 1 or depth == 0:
        raise ValueError("the structure is not valid: an unknown entry, or nested too deep")
    ((kind, inside),) = value.items()
    if kind in ("tensor", "bytes"):
        if type(inside) is not int or inside < 0:
            raise ValueError("the structure is not valid: no such tensor")
        return tensors[inside] if kind == "tensor" else bytes(raw(tensors[inside]))
    if kind in ("list", "tuple"):
        items = [_unpack(item, tensors, depth - 1) for item in inside]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {_key(key, "the structure"): _unpack(item, tensors, depth - 1) for key, item in inside}
    raise ValueError(f"the structure is not valid: {kind[:80]!r}")


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, in place. Needs no numpy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr() if size else ctypes.addressof(_NOTHING))
    memory.tensor = tensor  # type: ignore[attr-defined]  # lives as long as what points into it
    return memoryview(memory)


_NOTHING = ctypes.c_ubyte()

"""Fragments of a model: lists of parameter names that travel together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .replica import clean_name, unwrap

Fragments = list[list[str]]
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
Block = tuple[str, nn.Module]  # its path in the model, and itself


def by_layer(model: nn.Module, count: int, pattern: str = "strided") -> Fragments:
    """`count` fragments of whole blocks, and one more of all else (embeddings, head, final norm) where there is any.

    The blocks are those of the model's longest `ModuleList` or `Sequential`, with those of its relatives (the stages of
    a ResNet, an encoder beside a decoder). "strided" deals them out in turn: of 6 blocks and 3 fragments the first
    gets blocks 0 and 3. "sequential" cuts them into runs: the first gets blocks 0 and 1. Every trainable parameter is
    in one fragment, a tied one under its first name; frozen ones are in none.

    >>> model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    >>> by_layer(model, 2)
    [['0.weight', '2.weight'], ['1.weight', '3.weight']]
    >>> by_layer(model, 2, "sequential")
    [['0.weight', '1.weight'], ['2.weight', '3.weight']]
    """
    if pattern not in ("strided", "sequential"):
        raise ValueError(f'pattern must be "strided" or "sequential", not {pattern!r}')
    if not isinstance(model, nn.Module):
        raise ValueError(f"by_layer cuts a torch.nn.Module into fragments, not {type(model).__name__}")
    module = unwrap(model)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    blocks, rest = _split(names, [path for path, _ in _find_blocks(module)])
    _check_count(count, len(blocks))
    fragments: Fragments = [[] for _ in range(count)]
    for i, block in enumerate(blocks):
        fragments[i % count if pattern == "strided" else i * count // len(blocks)] += block
    return [[clean_name(name) for name in fragment] for fragment in (*fragments, rest) if fragment]


def resolve(fragments: Iterable[Sequence[str]], names: Sequence[str]) -> Fragments:
    """Lists of names or of patterns (`*`, `?`, `[0-9]`) as lists of names, each name in exactly one of them.

    >>> resolve([["h.*"], ["wte", "head.?"]], ["wte", "h.0", "h.1", "head.w"])
    [['h.0', 'h.1'], ['wte', 'head.w']]
    """
    known = set(names)
    found = [_names_of(fragment, names, known) for fragment in fragments]
    times = Counter(name for fragment in found for name in fragment)
    twice = [name for name in names if times[name] > 1]
    missing = [name for name in names if times[name] == 0]
    if twice:
        raise ValueError(f"fragments name {_some(twice)} more than once: keep each in one fragment")
    if missing:
        raise ValueError(f"no fragment names {_some(missing)}: add one for what is left")
    return found


def _check_count(count: int, blocks: int) -> None:
    if blocks == 0:
        raise ValueError(
            "found no ModuleList or Sequential with trainable blocks: give fragments as lists of parameter names"
        )
    if type(count) is not int or not 1 <= count <= blocks:
        raise ValueError(f"the model has {blocks} blocks: choose between 1 and {blocks} fragments, not {count!r}")


def _split(names: list[str], paths: list[str]) -> tuple[Fragments, list[str]]:
    """The names below each path, and those below none; a path that has no name of its own is left out."""
    below = {path: [name for name in names if name.startswith(f"{path}.")] for path in paths}
    taken = {name for block in below.values() for name in block}
    return [block for block in below.values() if block], [name for name in names if name not in taken]


def _names_of(fragment: Sequence[str], names: Sequence[str], known: set[str]) -> list[str]:
    if isinstance(fragment, str) or not fragment:
        raise ValueError(f"a fragment is a list of at least one parameter name or pattern, not {fragment!r}")
    return [name for pattern in fragment for name in _matches(pattern, names, known)]


def _matches(pattern: str, names: Sequence[str], known: set[str]) -> list[str]:
    # a user may have copied the name from a wrapped model
    for text in (pattern, clean_name(pattern), clean_name(pattern.removeprefix("module."))):
        found = [text] if text in known else [name for name in names if fnmatchcase(name, text)]
        if found:
            return found
    raise ValueError(f"{pattern!r} matches no trainable parameter; the first ones are {_some(names)}")


def _some(names: Sequence[str]) -> str:
    """The first few, quoted."""
    text = ", ".join(repr(name) for name in names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text


@dataclass(frozen=True)
class _Row:
    """A container and what could be its blocks."""

    path: str
    blocks: list[Block]

    @property
    def size(self) -> tuple[int, int]:
        """Blocks, then trainable values: what makes a row the longest."""
        parameters = (p for _, block in self.blocks for p in block.parameters() if p.requires_grad)
        return len(self.blocks), sum(p.numel() for p in parameters)

    def is_relative(self, other: _Row) -> bool:
        """The same kind of block, or the same name: ResNet's layer1 and layer2, encoder.layers and decoder.layers."""
        same_kind = {type(block) for _, block in self.blocks} & {type(block) for _, block in other.blocks}
        same_name = self.path.rpartition(".")[2] == other.path.rpartition(".")[2]
        return bool(same_kind) or (same_name and self._is_built == other._is_built)

    @property
    def _is_built(self) -> bool:
        return any(_is_built(block) for _, block in self.blocks)


def _find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of the longest row and of its relatives, in the model's order."""
    rows = _rows(model)
    if not rows:
        return []
    longest = max(rows, key=lambda row: row.size)
    blocks = [block for row in rows if row.is_relative(longest) for block in row.blocks]
    around = [path for path, _ in blocks]  # one that holds others is no block itself
    return [(path, block) for path, block in blocks if not any(p.startswith(f"{path}.") for p in around)]


def _rows(model: nn.Module) -> list[_Row]:
    """Every outermost container, less those inside a block that is one of several of its kind."""
    rows: list[_Row] = []
    for path, module in model.named_modules():
        if isinstance(module, _CONTAINERS) and not _is_container_in_container(model, path):
            rows.append(_Row(path, _blocks_of(path, module)))
    kinds = Counter(type(block) for row in rows for _, block in row.blocks)
    repeated = [path for row in rows for path, block in row.blocks if kinds[type(block)] > 1]
    return [row for row in rows if row.blocks and not any(row.path.startswith(f"{path}.") for path in repeated)]


def _is_container_in_container(model: nn.Module, path: str) -> bool:
    """Such a one is read as a part of the outer one: a stage in a `Sequential` of stages."""
    return bool(path) and isinstance(model.get_submodule(path.rpartition(".")[0]), _CONTAINERS)


def _blocks_of(path: str, container: nn.Module) -> list[Block]:
    """The modules made of modules, at any depth of plain containers; where there are not two, the direct children.

    So the embedding, the norm and the head in a `Sequential` of blocks are not blocks, but plain layers are.
    """
    built = [(name, m) for name, m in _flat(path, container) if _is_built(m) and _trains(m)]
    if len(built) > 1:
        return built
    children = ((_join(path, name), m) for name, m in container.named_children())
    return [(name, m) for name, m in children if _trains(m) and not isinstance(m, _EMBEDDINGS)]


def _flat(path: str, container: nn.Module) -> list[Block]:
    found: list[Block] = []
    for name, child in container.named_children():
        at = _join(path, name)
        found += _flat(at, child) if isinstance(child, _CONTAINERS) else [(at, child)]
    return found


def _is_built(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

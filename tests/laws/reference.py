"""The methods in NumPy, float64, written from the equations and from nothing else.

A run is a list of workers, each a dict of arrays and an inner optimizer; a method is a class with `before(world)`
(gradients are there, the optimizers have not stepped) and `after(world)`. Codecs are float32 where a rounding decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy.fft import dctn, idctn

Tensors = dict[str, np.ndarray]

# with blocks of 4, no block at an edge holds a single row: its coefficients 0 and 2 would tie
SHAPES: dict[str, tuple[int, ...]] = {"emb": (10, 7), "w": (6, 11), "b": (7,), "conv": (3, 2, 3, 2), "gain": ()}
FRAGMENTS = [["emb", "b"], ["w"], ["conv", "gain"]]


def start(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensors:
    generator = np.random.default_rng(7)
    return {name: generator.normal(size=shape).astype(np.float32).astype(np.float64) for name, shape in shapes.items()}


@cache
def normal(shape: tuple[int, ...], *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def gradient(x: Tensors, step: int, worker: int) -> Tensors:
    """Of a bowl with ripples, whose middle depends on the worker, and noise: smooth, so that rounding stays small."""
    out = {}
    for i, (name, value) in enumerate(sorted(x.items())):
        middle, noise = normal(value.shape, worker, i), normal(value.shape, step, worker, i)
        out[name] = 0.6 * (value - middle) + 0.3 * np.sin(2 * value + i) + 0.5 * noise
    return out


# inner optimizers: one per worker, over all of its tensors


class SGD:
    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr, self.beta, self.weight_decay = lr, momentum, weight_decay
        self.state: dict[str, Tensors] = {}
        self.betas = {"momentum_buffer": momentum}

    def step(self, x: Tensors, g: Tensors) -> None:
        for name in x:
            d = g[name] + self.weight_decay * x[name]
            if self.beta:
                buffers = self.state.setdefault("momentum_buffer", {})
                buffers[name] = self.beta * buffers[name] + d if name in buffers else d
                d = buffers[name]
            x[name] = x[name] - self.lr * d


class AdamW:
    def __init__(self, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8) -> None:
        self.lr, self.b1, self.b2, self.weight_decay, self.eps, self.t = lr, *betas, weight_decay, eps, 0
        self.state: dict[str, Tensors] = {"exp_avg": {}, "exp_avg_sq": {}}
        self.betas = {"exp_avg": self.b1, "exp_avg_sq": self.b2}

    def step(self, x: Tensors, g: Tensors) -> None:
        self.t += 1
        u, v = self.state["exp_avg"], self.state["exp_avg_sq"]
        for name in x:
            x[name] = x[name] * (1 - self.lr * self.weight_decay)
            u[name] = self.b1 * u.get(name, 0.0) + (1 - self.b1) * g[name]
            v[name] = self.b2 * v.get(name, 0.0) + (1 - self.b2) * g[name] ** 2
            root = np.sqrt(v[name]) / math.sqrt(1 - self.b2**self.t) + self.eps
            x[name] = x[name] - self.lr / (1 - self.b1**self.t) * u[name] / root


class ADOPT:
    def __init__(self, lr: float, betas: tuple[float, float], eps: float = 1e-6) -> None:
        self.lr, self.b1, self.b2, self.eps = lr, *betas, eps
        self.state: dict[str, Tensors] = {"exp_avg": {}, "exp_avg_sq": {}}
        self.betas = {"exp_avg": self.b1, "exp_avg_sq": self.b2}

    def step(self, x: Tensors, g: Tensors) -> None:
        u, v = self.state["exp_avg"], self.state["exp_avg_sq"]
        for name in x:
            if name not in v:
                u[name], v[name] = np.zeros_like(g[name]), g[name] ** 2
                continue
            u[name] = self.b1 * u[name] + (1 - self.b1) * g[name] / np.maximum(np.sqrt(v[name]), self.eps)
            x[name] = x[name] - self.lr * u[name]
            v[name] = self.b2 * v[name] + (1 - self.b2) * g[name] ** 2


class Nesterov:
    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.v: Tensors = {}

    def __call__(self, x: Tensors, d: Tensors) -> Tensors:
        out = {}
        for name in d:
            self.v[name] = self.momentum * self.v.get(name, 0.0) + d[name]
            out[name] = x[name] - self.lr * (d[name] + self.momentum * self.v[name])
        return out


# codecs: encode gives what travels, decode what it says, mean the answer of a round


def combine(f: Callable[..., Any], *dicts: Tensors) -> Tensors:
    return {name: f(*(d[name] for d in dicts)) for name in dicts[0]}


def average(dicts: Sequence[Tensors]) -> Tensors:
    return combine(lambda *values: sum(values) / len(values), *dicts)


class Exact:
    def encode(self, x: Tensors) -> Any:
        return {name: value.copy() for name, value in x.items()}

    def decode(self, sent: Any) -> Tensors:
        return dict(sent)

    def mean(self, all_sent: Sequence[Any]) -> Tensors:
        return average([self.decode(sent) for sent in all_sent])


def by_blocks(f: Callable[[np.ndarray], np.ndarray], x: np.ndarray, size: int = 128) -> np.ndarray:
    flat = np.asarray(x, dtype=np.float32).reshape(-1)
    parts = [f(flat[i : i + size]) for i in range(0, flat.size, size)]
    return (np.concatenate(parts) if parts else flat).reshape(np.shape(x)).astype(np.float64)


def e3m0_block(x: np.ndarray) -> np.ndarray:
    """Nearest in log space of 2^(emax-6 .. emax); below 2^(emax-6.5) it is 0, above 2^(emax+.5) the largest."""
    top = np.abs(x).max()
    if top == 0:
        return x * 0
    emax = math.floor(math.log2(float(top)))
    with np.errstate(divide="ignore"):
        logs = np.log2(np.abs(x.astype(np.float64)))
    codes = np.clip(np.rint(np.where(np.isfinite(logs), logs, -1e9) - emax) + 7, 0, 7)
    return np.where(codes > 0, np.sign(x) * 2.0 ** (codes - 7 + emax), 0.0).astype(np.float32)


def int8_block(x: np.ndarray) -> np.ndarray:
    top = np.float32(np.abs(x).max())  # means of powers of two tie often: the order of the roundings decides
    return x * 0 if top == 0 else np.rint(x * (np.float32(127) / top)) * (top / np.float32(127))


class Dense(Exact):
    """A low-bit codec: with more than two workers the mean itself travels encoded, by the second codec."""

    def __init__(self, block: Callable[[np.ndarray], np.ndarray]) -> None:
        self.block = block

    def encode(self, x: Tensors) -> Any:
        return combine(lambda value: by_blocks(self.block, value), x)

    def mean(self, all_sent: Sequence[Any]) -> Tensors:
        mean = average(all_sent)
        return mean if len(all_sent) <= 2 else combine(lambda value: by_blocks(int8_block, value), mean)


def kept(n: int, k: int, full: int) -> int:
    return min(n, max(1, math.floor(n * k / full + 0.5)))


def strongest(chunk: np.ndarray, count: int) -> np.ndarray:
    """A mask of the `count` values largest in magnitude, ties to the lower index."""
    order = np.argsort(-np.abs(chunk.reshape(-1)), kind="stable")[:count]
    mask = np.zeros(chunk.size, dtype=bool)
    mask[order] = True
    return mask.reshape(chunk.shape)


def two_bit(values: np.ndarray) -> np.ndarray:
    """The selected values of one tensor, each replaced by the mean of its bin."""
    c = values - values.mean()
    sigma = values.std(ddof=1) if values.size > 1 else 0.0
    scale = 1.5 * sigma if sigma > 0 else 1.0
    bins = np.clip(np.rint(c / scale + 2), 0, 3)
    out = values.copy()
    for b in range(4):
        if (bins == b).any():
            out[bins == b] = values[bins == b].mean()
    return out


def bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


class TopK:
    """`mean` by senders or over all; a subclass says what space the values are chosen in."""

    def __init__(
        self, k: int, chunk: int, values: Callable[[np.ndarray], np.ndarray] = lambda v: v, merge: str = "senders"
    ) -> None:
        self.k, self.chunk, self.values, self.merge = k, chunk, values, merge

    def forward(self, x: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
        """The chunks, and how many values of each to keep."""
        flat = np.asarray(x).reshape(-1)
        chunks = [flat[i : i + self.chunk] for i in range(0, flat.size, self.chunk)]
        return chunks, [kept(c.size, self.k, self.chunk) for c in chunks]

    def backward(self, chunks: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        return (np.concatenate(chunks) if chunks else np.zeros(0)).reshape(shape)

    def encode_tensor(self, x: np.ndarray) -> Any:
        chunks, counts = self.forward(x)
        masks = [strongest(c, n) for c, n in zip(chunks, counts, strict=True)]
        if not chunks:
            return np.shape(x), [], []
        selected = self.values(np.concatenate([c[m] for c, m in zip(chunks, masks, strict=True)]))
        sent, at = [], 0
        for c, m in zip(chunks, masks, strict=True):
            out = np.zeros_like(c, dtype=np.float64)
            out[m] = selected[at : at + m.sum()]
            at += m.sum()
            sent.append(out)
        return np.shape(x), sent, masks

    def encode(self, x: Tensors) -> Any:
        return combine(self.encode_tensor, x)

    def decode(self, sent: Any) -> Tensors:
        return {name: self.backward(chunks, shape) for name, (shape, chunks, _) in sent.items()}

    def mean(self, all_sent: Sequence[Any]) -> Tensors:
        out = {}
        for name, (shape, chunks, _) in all_sent[0].items():
            merged = []
            for i in range(len(chunks)):
                total = sum(sent[name][1][i] for sent in all_sent)
                senders = sum(sent[name][2][i].astype(int) for sent in all_sent)
                merged.append(total / (np.maximum(senders, 1) if self.merge == "senders" else len(all_sent)))
            out[name] = self.backward(merged, shape)
        return out


class DCT(TopK):
    """Blocks of `chunk` x `chunk` (rows of `chunk` for a vector) of the orthonormal DCT-II; k is per chunk^2 values.

    A block at the edge has as many coefficients as any other, but keeps as large a part as its real values are: with
    k = chunk^2 all of them.
    """

    def forward(self, x: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
        x = np.asarray(x)
        grid = x.reshape(-1) if x.ndim < 2 else x.reshape(x.shape[0], -1)
        sides = [min(n, self.chunk) for n in grid.shape]
        padded = np.pad(grid, [(0, -n % s) for n, s in zip(grid.shape, sides, strict=True)])
        chunks, counts = [], []
        for corner in np.ndindex(*(n // s for n, s in zip(padded.shape, sides, strict=True))):
            place = tuple(slice(c * s, (c + 1) * s) for c, s in zip(corner, sides, strict=True))
            chunks.append(dctn(padded[place], norm="ortho"))
            real = grid[place].size  # a slice ends where the values do
            everything = self.k == self.chunk**2
            counts.append(chunks[-1].size if everything else kept(real, self.k, self.chunk**2))
        return chunks, counts

    def backward(self, chunks: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        grid = (math.prod(shape),) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
        sides = [min(n, self.chunk) for n in grid]
        counts = [-(-n // s) for n, s in zip(grid, sides, strict=True)]
        padded = np.zeros([n * s for n, s in zip(counts, sides, strict=True)])
        for corner, chunk in zip(np.ndindex(*counts), chunks, strict=True):
            place = tuple(slice(c * s, (c + 1) * s) for c, s in zip(corner, sides, strict=True))
            padded[place] = idctn(chunk, norm="ortho")
        return padded[tuple(slice(n) for n in grid)].reshape(shape)


# the world, and the methods


class World:
    def __init__(self, workers: int, inner: Callable[[], Any], shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        self.t = 0
        self.x = [start(shapes) for _ in range(workers)]
        self.g: list[Tensors] = []
        self.inner = [inner() for _ in range(workers)]

    def step(self, method: Any) -> None:
        self.t += 1
        self.g = [gradient(x, self.t, m) for m, x in enumerate(self.x)]
        method.before(self)
        for x, g, inner in zip(self.x, self.g, self.inner, strict=True):
            inner.step(x, g)
        method.after(self)


class Quiet:
    def before(self, world: World) -> None: ...
    def after(self, world: World) -> None: ...


class All(Quiet):
    """Several rows, one after another."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def after(self, world: World) -> None:
        for row in self.rows:
            row.after(world)


class DDP(Quiet):
    def before(self, world: World) -> None:
        mean = average(world.g)
        world.g = [dict(mean) for _ in world.g]


class DeMo(Quiet):
    def __init__(self, codec: Any, decay: float) -> None:
        self.codec, self.decay = codec, decay
        self.delta: list[Tensors] = []

    def before(self, world: World) -> None:
        self.delta = self.delta or [combine(np.zeros_like, g) for g in world.g]
        sent = []
        for m, g in enumerate(world.g):
            lr = world.inner[m].lr
            self.delta[m] = combine(lambda e, d, lr=lr: self.decay * e + lr * d, self.delta[m], g)
            sent.append(self.codec.encode(self.delta[m]))
            self.delta[m] = combine(np.subtract, self.delta[m], self.codec.decode(sent[m]))
        sign = combine(np.sign, self.codec.mean(sent))
        world.g = [dict(sign) for _ in world.g]


class Timed(Quiet):
    """Land what is due, then launch what is due; with no delay the launch lands at once."""

    def __init__(self, every: int, offset: int = 0, delay: int = 0, names: Sequence[str] | None = None) -> None:
        self.every, self.offset, self.delay = every, offset, delay
        self.names = list(SHAPES) if names is None else list(names)
        self.flights: list[tuple[int, Any]] = []

    def after(self, world: World) -> None:
        t = world.t
        self.arrive(world)
        if t > self.offset and (t - self.offset) % self.every == 0:
            self.flights.append((t + self.delay, self.launch(world)))
        self.arrive(world)

    def arrive(self, world: World) -> None:
        while self.flights and self.flights[0][0] <= world.t:
            self.land(world, self.flights.pop(0)[1])

    def pick(self, x: Tensors) -> Tensors:
        return {name: x[name] for name in self.names}

    def launch(self, world: World) -> Any:
        raise NotImplementedError

    def land(self, world: World, flight: Any) -> None:
        raise NotImplementedError


class Params(Timed):
    """x - own + mean."""

    def launch(self, world: World) -> Any:
        return [self.pick(x) for x in world.x]

    def land(self, world: World, flight: Any) -> None:
        mean = average(flight)
        for x, own in zip(world.x, flight, strict=True):
            x.update(combine(lambda a, o, b: a - o + b, self.pick(x), own, mean))


class Moment(Timed):
    """x + beta^d (mean - own)."""

    def __init__(self, state: str, every: int, delay: int = 0) -> None:
        super().__init__(every, delay=delay)
        self.state = state

    def launch(self, world: World) -> Any:
        return [dict(inner.state[self.state]) for inner in world.inner]

    def land(self, world: World, flight: Any) -> None:
        mean = average(flight)
        for inner, own in zip(world.inner, flight, strict=True):
            fade = inner.betas[self.state] ** self.delay
            live = inner.state[self.state]
            live.update(combine(lambda a, o, b, f=fade: a + f * (b - o), live, own, mean))


class AnchoredParams(Timed):
    """Average with a codec that drops values: x - anchor travels ; x += mean - own ; anchor += mean."""

    def __init__(self, every: int, codec: Any, delay: int = 0) -> None:
        super().__init__(every, delay=delay)
        self.codec, self.anchor = codec, start()

    def launch(self, world: World) -> Any:
        return [self.codec.encode(combine(np.subtract, self.pick(x), self.anchor)) for x in world.x]

    def land(self, world: World, flight: Any) -> None:
        mean = self.codec.mean(flight)
        for x, sent in zip(world.x, flight, strict=True):
            x.update(combine(lambda a, b, o: a + b - o, self.pick(x), mean, self.codec.decode(sent)))
        self.anchor = combine(np.add, self.anchor, mean)


class Outer(Timed):
    """One outer copy; launch E[Q(copy - x)], land: copy = Nesterov(copy, mean) ; x = mix x + (1 - mix) copy."""

    def __init__(
        self, step: Nesterov, mix: float = 0.0, codec: Any = None, feedback: float | None = None, **when: Any
    ) -> None:
        super().__init__(**when)
        self.outer, self.mix, self.codec, self.feedback = step, mix, codec or Exact(), feedback
        self.copy = self.pick(start())
        self.residual: list[Tensors] = []

    def launch(self, world: World) -> Any:
        self.residual = self.residual or [combine(np.zeros_like, self.copy) for _ in world.x]
        sent = []
        for m, x in enumerate(world.x):
            message = combine(np.subtract, self.copy, self.pick(x))
            if self.feedback is not None:
                message = combine(lambda d, e: d + self.feedback * e, message, self.residual[m])
            sent.append(self.codec.encode(message))
            self.residual[m] = combine(np.subtract, message, self.codec.decode(sent[m]))
        return sent

    def land(self, world: World, flight: Any) -> None:
        self.copy = self.outer(self.copy, self.codec.mean(flight))
        for x in world.x:
            x.update(combine(lambda a, b: self.mix * a + (1 - self.mix) * b, self.pick(x), self.copy))


class Phased(Timed):
    """Delayed and eager: the outer step is taken every period, with the mean launched `phases` periods ago."""

    def __init__(
        self, eager: bool, lr: float, momentum: float, codec: Any = None, phases: int = 1, **when: Any
    ) -> None:
        super().__init__(**when)
        self.eager, self.lr, self.momentum, self.codec, self.phases = eager, lr, momentum, codec or Exact(), phases
        self.point: list[Tensors] = []
        self.outer: list[Nesterov] = []
        self.sent: list[Any] = []  # per phase: what all workers sent, and each one's early term as it was applied
        self.terms: list[list[Tensors]] = []

    def after(self, world: World) -> None:
        if not self.point:
            self.point = [self.pick(start()) for _ in world.x]
            self.outer = [Nesterov(self.lr, self.momentum) for _ in world.x]
        if world.t <= self.offset or (world.t - self.offset) % self.every:
            return
        drifts = [combine(np.subtract, p, self.pick(x)) for p, x in zip(self.point, world.x, strict=True)]
        early = [combine(lambda d: d / len(world.x), drift) for drift in drifts]
        zero = combine(np.zeros_like, drifts[0])
        known = len(self.sent) >= self.phases
        mean = self.codec.mean(self.sent[-self.phases][0]) if known else zero
        before = self.sent[-self.phases][1] if known else [zero for _ in world.x]
        self.terms.append([])
        for m, x in enumerate(world.x):
            term = combine(lambda a, e, b: a + e - b, mean, early[m], before[m]) if self.eager else mean
            self.terms[-1].append(term)
            self.point[m] = self.outer[m](self.point[m], term)
            x.update(self.point[m])
        self.sent.append(([self.codec.encode(drift) for drift in drifts], early))


class Carry(Timed):
    """A = Nesterov(A, mean) ; x = A + (x - x at launch); with a codec x += (A_new - A) + own."""

    def __init__(self, step: Nesterov, codec: Any = None, **when: Any) -> None:
        super().__init__(**when)
        self.outer, self.codec, self.anchor = step, codec or Exact(), self.pick(start())

    def launch(self, world: World) -> Any:
        return [self.codec.encode(combine(np.subtract, self.anchor, self.pick(x))) for x in world.x]

    def land(self, world: World, flight: Any) -> None:
        new = self.outer(self.anchor, self.codec.mean(flight))
        for x, sent in zip(world.x, flight, strict=True):
            own = self.codec.decode(sent)
            x.update(combine(lambda a, n, o, d: a + (n - o) + d, self.pick(x), new, self.anchor, own))
        self.anchor = new


class SharedMomentum(Timed):
    """g = anchor - y ; m = b m + g ; T = top-k of m ; m -= T ; m += merge ; anchor -= lr (g + b m) ; y = anchor."""

    def __init__(self, codec: Any, decay: float, lr: float, **when: Any) -> None:
        super().__init__(**when)
        self.codec, self.decay, self.lr = codec, decay, lr
        self.anchor: list[Tensors] = []
        self.m: list[Tensors] = []

    def launch(self, world: World) -> Any:
        self.anchor = self.anchor or [self.pick(start()) for _ in world.x]
        self.m = self.m or [combine(np.zeros_like, a) for a in self.anchor]
        drifts = [combine(np.subtract, a, self.pick(x)) for a, x in zip(self.anchor, world.x, strict=True)]
        self.m = [combine(lambda v, d: self.decay * v + d, v, d) for v, d in zip(self.m, drifts, strict=True)]
        sent = [self.codec.encode(v) for v in self.m]
        self.m = [combine(np.subtract, v, self.codec.decode(s)) for v, s in zip(self.m, sent, strict=True)]
        return drifts, sent

    def land(self, world: World, flight: Any) -> None:
        drifts, sent = flight
        merged = self.codec.mean(sent)
        for i, x in enumerate(world.x):
            self.m[i] = combine(np.add, self.m[i], merged)
            self.anchor[i] = combine(
                lambda a, d, v: a - self.lr * (d + self.decay * v), self.anchor[i], drifts[i], self.m[i]
            )
            x.update(self.anchor[i])

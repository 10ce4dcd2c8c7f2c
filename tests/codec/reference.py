"""The codecs once more, in NumPy and SciPy, from the equations: slow, plain, one tensor at a time."""

from __future__ import annotations

import numpy as np
import torch
from scipy.fft import dctn, idctn

from thinwire.codec import Layout

# primes, a vocabulary's remainder, biases, conv kernels, 0-d, one element, empty, axes of one
SHAPES = (
    (3,),
    (),
    (0,),
    (5, 0),
    (130, 70),
    (64, 64),
    (1000,),
    (1,),
    (7, 3, 3, 3),
    (128, 192),
    (1, 300),
    (300, 1),
    (17, 13),
)
SHAPES = tuple(torch.Size(shape) for shape in SHAPES)
CPU = torch.device("cpu")


def filled(codec, shapes=SHAPES, seed=0, ties=False):
    """A layout for this codec, and a buffer with random values in all its tensors; with ties, many are equal."""
    layout, generator = Layout(tuple(shapes), codec.align), torch.Generator().manual_seed(seed)
    buffer = layout.zeros(CPU)
    for view in layout.views(buffer):
        values = torch.randn(view.shape, generator=generator)
        view.copy_((3 * values).round() if ties else values)
    return layout, buffer


def tensors(buffer, layout):
    return [view.numpy().astype(np.float64) for view in layout.views(buffer)]


def blocks(x, size):
    flat = x.reshape(-1)
    return [flat[at : at + size] for at in range(0, len(flat), size)]


def int8(x):
    out = []
    for block in blocks(x, 128):
        scale = np.abs(block).max() / 127
        out.append(np.round(block / scale) * scale if scale > 0 else np.zeros_like(block))
    return np.concatenate([np.zeros(0), *out]).reshape(x.shape)


def e3m0(x):
    out = []
    for block in blocks(x, 128):
        top = np.abs(block).max()
        if top < 2.0**-126:
            out.append(np.zeros_like(block))
            continue
        emax = np.floor(np.log2(top))
        with np.errstate(divide="ignore"):
            nearest = np.minimum(np.round(np.log2(np.abs(block))), emax)
        out.append(np.where(nearest < emax - 6, 0.0, np.sign(block) * 2.0**nearest))
    return np.concatenate([np.zeros(0), *out]).reshape(x.shape)


def two_bit(v):
    if v.size == 0:
        return v.copy()
    c = v - v.mean()
    sigma = v.std(ddof=1) if v.size > 1 else 0.0
    bins = np.clip(np.round(c / (1.5 * sigma if sigma > 0 else 1.0) + 2), 0, 3)
    return sum((bins == b) * (v[bins == b].mean() if (bins == b).any() else 0.0) for b in range(4))


def keep(n, k, full):
    return min(n, max(1, int(np.floor(n * k / full + 0.5))))


def top(chunk, k, full):
    """The indices kept, ascending: by magnitude, ties to the lower index."""
    order = np.lexsort((np.arange(len(chunk)), -np.abs(chunk)))
    return np.sort(order[: keep(len(chunk), k, full)])


def top_k(x, k, full):
    out = [np.zeros(0)]
    for chunk in blocks(x, full):
        index, sent = top(chunk, k, full), np.zeros_like(chunk)
        sent[index] = chunk[index]
        out.append(sent)
    return np.concatenate(out).reshape(x.shape)


def mask_k(x, k, full):
    """Which values `top_k` sends, zeros among them too."""
    out = [np.zeros(0)]
    for chunk in blocks(x, full):
        sent = np.zeros_like(chunk)
        sent[top(chunk, k, full)] = 1
        out.append(sent)
    return np.concatenate(out).reshape(x.shape)


def as_matrix(x):
    return x.reshape(1, -1) if x.ndim < 2 else x.reshape(len(x), -1)


def transform(x, s, each=lambda block: dctn(block, norm="ortho")):
    """The DCT, or something else, of each block, a list in row-major order."""
    m = as_matrix(x)
    high, wide = min(m.shape[0], s), min(m.shape[1], s)
    m = np.pad(m, ((0, -m.shape[0] % high), (0, -m.shape[1] % wide)))
    return [each(m[a : a + high, b : b + wide]) for a in range(0, m.shape[0], high) for b in range(0, m.shape[1], wide)]


def back(coefficients, like):
    m = as_matrix(like)
    high, wide = coefficients[0].shape
    across = -(-m.shape[1] // wide)
    rows = [coefficients[at : at + across] for at in range(0, len(coefficients), across)]
    whole = np.block([[idctn(c, norm="ortho") for c in row] for row in rows])
    return whole[: m.shape[0], : m.shape[1]].reshape(like.shape)


def pack(values, bits):
    """One long integer, value i at bit i * bits."""
    number = sum(int(v) << (i * bits) for i, v in enumerate(values))
    return list(number.to_bytes(-(-len(values) * bits // 8), "little"))

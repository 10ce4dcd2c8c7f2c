"""Int8, E3M0 and TwoBit against references in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import reference
from tests.codec.reference import filled, tensors
from thinwire.codec import E3M0, Int8, Layout, TwoBit


def decoded(codec, layout, buffer):
    return tensors(codec.decode(codec.encode(buffer, layout), layout), layout)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_int8(scale):
    layout, buffer = filled(Int8())
    buffer *= scale
    for got, x in zip(decoded(Int8(), layout, buffer), tensors(buffer, layout), strict=True):
        np.testing.assert_allclose(got, reference.int8(x), rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_e3m0(scale):
    layout, buffer = filled(E3M0())
    buffer *= scale * torch.logspace(-3, 0, 37).repeat(layout.total // 37 + 1)[: layout.total]
    for got, x in zip(decoded(E3M0(), layout, buffer), tensors(buffer, layout), strict=True):
        np.testing.assert_array_equal(got, reference.e3m0(x))


@given(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=20), st.booleans())
@settings(max_examples=200, deadline=None)
def test_e3m0_of_any_values(values, negative):
    x = torch.tensor(values) * (-1 if negative else 1)
    layout = Layout((x.shape,), 128)
    buffer = torch.nn.functional.pad(x, (0, layout.total - len(values)))
    np.testing.assert_array_equal(decoded(E3M0(), layout, buffer)[0], reference.e3m0(x.double().numpy()))


def test_e3m0_at_the_edges():
    """2^(e+.5) and above is still code 7, below 2^(e-6.5) is 0."""
    sqrt2 = np.float32(2**0.5)
    values = [
        1.99,
        1.0,
        float(np.nextafter(sqrt2 / 128, 0)),
        float(np.nextafter(sqrt2 / 128, 1)),
        2.0**-6,
        2.0**-7,
        -0.75,
    ]
    layout = Layout((torch.Size([len(values)]),), 128)
    buffer = torch.nn.functional.pad(torch.tensor(values), (0, layout.total - len(values)))
    assert decoded(E3M0(), layout, buffer)[0].tolist() == [1.0, 1.0, 0.0, 2.0**-6, 2.0**-6, 0.0, -1.0]


@pytest.mark.parametrize("exponent", [-119, -120, -121, -126])
def test_e3m0_of_hardly_anything_keeps_zeros(exponent):
    """The codes of a block below 2^-120 would need exponents that a float has not: it is sent as zeros."""
    layout = Layout((torch.Size([3]),), 128)
    buffer = layout.zeros(torch.device("cpu"))
    buffer[:2] = torch.tensor([2.0**exponent, -(2.0 ** (exponent - 2))])
    own = E3M0().encode_with_own(buffer, layout)[1]
    assert torch.equal(own, buffer if exponent >= -120 else torch.zeros_like(buffer))


def test_two_codes_a_byte_and_one_scale_a_block():
    layout = Layout((torch.Size([3]), torch.Size([129])), 128)
    assert E3M0().size(layout) == 3 + 2 + 65
    assert Int8().size(layout) == 3 * 4 + 3 + 129
    buffer = layout.zeros(torch.device("cpu"))
    buffer[:3] = torch.tensor([1.0, -0.5, 0.25])
    assert E3M0().encode(buffer, layout)[[0, 3, 4]].tolist() == [127, 7 | (8 | 6) << 4, 5]


def test_two_bit_per_tensor():
    """Tensors side by side: one table each."""
    codec = TwoBit()
    shapes = [torch.Size([n]) for n in (1, 2, 5000, 0, 4096, 77)]
    layout = Layout(tuple(shapes))
    assert codec.size(layout) == 5 * 16 + 1 + 1 + 1250 + 1024 + 20
    buffer = torch.randn(layout.total, generator=torch.Generator().manual_seed(0))
    for got, x in zip(decoded(codec, layout, buffer), tensors(buffer, layout), strict=True):
        np.testing.assert_allclose(got, reference.two_bit(x), rtol=1e-5, atol=1e-6)


def test_two_bit_of_a_whole_buffer():
    """One table for each block of 4096."""
    layout, buffer = filled(TwoBit(), [torch.Size(s) for s in [(100, 100), (3,), (4096,)]])
    for got, x in zip(decoded(TwoBit(), layout, buffer), tensors(buffer, layout), strict=True):
        want = np.concatenate([reference.two_bit(block) for block in reference.blocks(x, 4096)])
        np.testing.assert_allclose(got.reshape(-1), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_two_bit_of_equal_values(value):
    layout = Layout((torch.Size([10]),))
    buffer = torch.full((10,), value)
    assert torch.equal(TwoBit().decode(TwoBit().encode(buffer, layout), layout), buffer)

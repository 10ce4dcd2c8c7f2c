"""Packing: against one long integer, and there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import reference
from thinwire.codec.bits import pack, packed, unpack


@st.composite
def numbers(draw):
    bits = draw(st.integers(1, 16))
    return bits, draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))


@given(numbers())
@settings(max_examples=300, deadline=None)
def test_packing_is_one_long_integer_and_comes_back(drawn):
    bits, values = drawn
    payload = pack(torch.tensor(values, dtype=torch.int64), bits)
    assert payload.tolist() == reference.pack(values, bits)
    assert payload.numel() == packed(len(values), bits)
    assert unpack(payload, len(values), bits).tolist() == values


@given(st.lists(st.integers(0, 2**12 - 1), min_size=2, max_size=40), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_payload_may_start_at_any_byte(values, skip):
    payload = torch.cat([torch.full((skip,), 255, dtype=torch.uint8), pack(torch.tensor(values), 12)])
    assert unpack(payload[skip:], len(values), 12).tolist() == values


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_bits_take_no_bytes(count):
    assert pack(torch.zeros(count, dtype=torch.int64), 0).numel() == 0
    assert unpack(torch.empty(0, dtype=torch.uint8), count, 0).tolist() == [0] * count


def test_pairs_of_twelve_bits_take_three_bytes():
    assert pack(torch.tensor([0x123, 0x456]), 12).tolist() == [0x23, 0x61, 0x45]

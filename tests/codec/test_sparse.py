"""TopK: selection, indices and both merges against references in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import reference
from tests.codec.reference import filled, tensors
from thinwire.codec import DCT, BFloat16, Float32, Int8, Layout, TopK, TwoBit
from thinwire.codec.bits import packed

SIZES = [(32, 4096), (5, 64), (40, 64), (64, 64), (7, 100), (1, 1), (3, 1024), (60, 1000)]
BIG = [torch.Size(s) for s in [(300, 70), (4096,), (5000,), (1,), (4099,), (2, 4096), (17,)]]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k, chunk", SIZES)
def test_selection(k, chunk, ties):
    codec = TopK(k, chunk)
    layout, buffer = filled(codec, [*reference.SHAPES, *BIG], ties=ties)
    got = codec.decode(codec.encode(buffer, layout), layout)
    for y, x in zip(tensors(got, layout), tensors(buffer, layout), strict=True):
        np.testing.assert_array_equal(y, reference.top_k(x, k, chunk))


def test_ties_across_the_edges_of_what_is_looked_at_first():
    """Equal values at the end of one run of 16 and the start of later ones."""
    codec = TopK(3, chunk=256)
    layout = Layout((torch.Size([256]),), 256)
    buffer = torch.zeros(256)
    buffer[[15, 16, 100, 200, 255]] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    assert codec.decode(codec.encode(buffer, layout), layout).nonzero().view(-1).tolist() == [15, 16, 100]


@pytest.mark.parametrize("k, chunk", SIZES)
def test_bytes_are_those_of_the_indices_and_values(k, chunk):
    codec = TopK(k, chunk)
    shapes = [*reference.SHAPES, *BIG]
    kept: dict[tuple[bool, int], int] = {}
    for shape in shapes:
        for n in [min(chunk, shape.numel() - at) for at in range(0, shape.numel(), chunk)]:
            kind = (n == chunk, (n - 1).bit_length())
            kept[kind] = kept.get(kind, 0) + reference.keep(n, k, chunk)
    want = sum(packed(count, bits) for (_, bits), count in kept.items()) + 4 * sum(kept.values())
    assert codec.size(Layout(tuple(shapes), chunk)) == want


SHAPE = st.one_of(
    st.tuples(), st.tuples(st.integers(0, 300)), st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 3))
)
VALUES = st.sampled_from([Float32(), BFloat16(), Int8(), TwoBit()])


@given(st.lists(SHAPE, max_size=5), st.integers(1, 70), st.data(), VALUES)
@settings(max_examples=60, deadline=None)
def test_a_size_is_that_of_a_payload_without_making_one(shapes, chunk, data, values):
    k = data.draw(st.integers(1, chunk))
    side = data.draw(st.integers(1, 9))
    for codec in (TopK(k, chunk, values), DCT(TopK(min(k, side * side), side * side, values), side)):
        layout, buffer = filled(codec, [torch.Size(shape) for shape in shapes])
        assert codec.size(layout) == codec.encode(buffer, layout).numel()


def test_a_size_is_arithmetic():
    """A row that no machine could hold."""
    layout = Layout((torch.Size([1 << 24, 1 << 20]),), 4096)
    assert TopK(64).size(layout) == (1 << 32) * 64 * 12 // 8 + (1 << 32) * 64 * 4


def test_the_payload_is_packed_indices_then_values():
    codec = TopK(2, chunk=4096)
    layout = Layout((torch.Size([4096]),), 4096)
    buffer = torch.zeros(4096)
    buffer[0x123], buffer[0x456] = 2.0, -3.0
    payload = codec.encode(buffer, layout)
    assert payload[:3].tolist() == reference.pack([0x123, 0x456], 12)
    assert payload[3:].clone().view(torch.float32).tolist() == [2.0, -3.0]


def test_two_bit_values_have_one_table_per_tensor():
    codec = TopK(64, values=TwoBit())
    layout, buffer = filled(codec, [torch.Size([40960]), torch.Size([5000])])
    got = codec.decode(codec.encode(buffer, layout), layout)
    for y, x in zip(tensors(got, layout), tensors(buffer, layout), strict=True):
        sent = reference.mask_k(x, 64, 4096) > 0
        np.testing.assert_allclose(y[sent], reference.two_bit(x[sent]), rtol=1e-5)
        assert not y[~sent].any()


def merged(x, weights, k, chunk, rule):
    """One tensor of each worker; weights are numbers."""
    masks = [reference.mask_k(v, k, chunk) for v in x]
    total = sum(w * m * v for w, m, v in zip(weights, masks, x, strict=True))
    heard = sum(w * m for w, m in zip(weights, masks, strict=True)) if rule == "senders" else sum(weights)
    return total / np.where(heard > 0, heard, 1.0)


@pytest.mark.parametrize("rule", ["senders", "mean"])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 3.0, 0.5), (2.0, 0.0, 1.0)])
def test_merge(rule, weights):
    codec = TopK(5, 64, merge=rule)
    made = [filled(codec, seed=seed) for seed in range(3)]
    layout = made[0][0]
    payloads = [codec.encode(buffer, layout) for _, buffer in made]
    got = tensors(codec.merge(payloads, list(weights), layout), layout)
    per_tensor = codec.merge(payloads, [torch.full((layout.total,), w) for w in weights], layout)
    columns = zip(got, tensors(per_tensor, layout), *[tensors(buffer, layout) for _, buffer in made], strict=True)
    for one, other, *x in columns:
        want = merged(x, weights, 5, 64, rule)
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(other, want, rtol=1e-5, atol=1e-7)


def test_a_worker_without_weight_is_no_sender():
    codec = TopK(1, 4)
    layout = Layout((torch.Size([4]),), 4)
    payloads = [codec.encode(torch.tensor(x), layout) for x in ([9.0, 0, 0, 1], [9.0, 0, 0, 1], [1.0, 0, 0, 5])]
    weights = [torch.tensor([1.0, 1, 1, 1]), torch.tensor([0.0, 0, 0, 0]), torch.tensor([2.0, 2, 2, 2])]
    assert codec.merge(payloads, weights, layout).tolist() == [9.0, 0.0, 0.0, 5.0]


def test_everything_kept_is_the_dense_mean():
    codec, dense = TopK(64, 64), Float32()
    layout, a = filled(codec)
    _, b = filled(codec, seed=1)
    got = codec.merge([codec.encode(a, layout), codec.encode(b, layout)], [1.0, 3.0], layout)
    assert torch.equal(got, dense.merge([dense.encode(a, layout), dense.encode(b, layout)], [1.0, 3.0], layout))


def test_what_makes_no_sense_is_refused():
    for options in ({"k": 0}, {"k": 65, "chunk": 64}, {"k": 1, "chunk": 1 << 17}, {"k": 1, "merge": "median"}):
        with pytest.raises(ValueError, match="k of each chunk|senders"):
            TopK(**options)
    with pytest.raises(ValueError, match="dense"):
        TopK(4, values=TopK(2))
    assert repr(TopK(4, values=Int8()).values) == "Int8()"

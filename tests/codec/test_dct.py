"""DCT: transform, selection and merges against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.codec import reference
from tests.codec.reference import SHAPES, filled, tensors
from thinwire.codec import DCT, BFloat16, Float32, Layout, TopK, TwoBit
from thinwire.codec.cosine import Blocks


def kept(x, k, s):
    """The blocks of one tensor with their largest coefficients, and where these are."""
    found = reference.transform(x, s)
    shape, real = found[0].shape, reference.transform(np.ones_like(x), s, lambda block: block.sum().astype(int))
    counts = [c.size if k == s * s else reference.keep(n, k, s * s) for c, n in zip(found, real, strict=True)]
    masks = [reference.mask_k(c.reshape(-1), n, c.size).reshape(shape) for c, n in zip(found, counts, strict=True)]
    return [c * m for c, m in zip(found, masks, strict=True)], masks


@pytest.mark.parametrize("s", [64, 16, 13, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transform(s, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    blocks, again = Blocks.of(shape, s), torch.zeros_like(x)
    matrix = (blocks.rows, blocks.columns)
    found = [strip.forward(x.view(matrix), torch.empty(2, strip.size)) for strip in blocks.strips(x.device)]
    for strip, coefficients in zip(blocks.strips(x.device), found, strict=True):
        strip.inverse(coefficients, again.view(matrix), torch.empty(2, strip.size))
    torch.testing.assert_close(again, x, atol=3e-6, rtol=0)
    if x.numel():
        want = np.stack([c.reshape(-1) for c in reference.transform(x.double().numpy(), s)])
        np.testing.assert_allclose(torch.cat(found).numpy(), want, atol=3e-6)


@pytest.mark.parametrize("k, s", [(32, 64), (3, 64), (4, 16), (5, 13), (4096, 64)])
def test_selection(k, s):
    codec = DCT(TopK(k), s) if k <= s * s else DCT(TopK(s * s), s)
    layout, buffer = filled(codec)
    got = codec.decode(codec.encode(buffer, layout), layout)
    for y, x in zip(tensors(got, layout), tensors(buffer, layout), strict=True):
        if x.size:
            np.testing.assert_allclose(y, reference.back(kept(x, k, s)[0], x), atol=5e-6)


@pytest.mark.parametrize("k", [1, 32, 40])  # four workers: entries that are added up one by one, and too many for that
@pytest.mark.parametrize("rule", ["senders", "mean"])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 0.0, 3.0)])
def test_merge(k, rule, weights):
    codec = DCT(TopK(k, merge=rule))
    made = [filled(codec, seed=seed) for seed in range(4)]
    layout = made[0][0]
    payloads = [codec.encode(buffer, layout) for _, buffer in made]
    got = tensors(codec.merge(payloads, list(weights), layout), layout)
    per_tensor = tensors(codec.merge(payloads, [torch.full((layout.total,), w) for w in weights], layout), layout)
    for one, other, *x in zip(got, per_tensor, *[tensors(b, layout) for _, b in made], strict=True):
        if one.size:
            want = reference.back(merged(x, weights, k, rule), x[0])
            np.testing.assert_allclose(one, want, atol=5e-6)
            np.testing.assert_allclose(other, want, atol=5e-6)


def merged(x, weights, k, rule):
    sent = [kept(v, k, 64) for v in x]
    out = []
    for block in range(len(sent[0][0])):
        total = sum(w * values[block] for w, (values, _) in zip(weights, sent, strict=True))
        heard = sum(w * masks[block] for w, (_, masks) in zip(weights, sent, strict=True))
        over = heard if rule == "senders" else np.full_like(heard, sum(weights))
        out.append(total / np.where(over > 0, over, 1.0))
    return out


def test_a_prime_size_is_padded_never_cut_into_ones():
    """67 x 131 is 2 x 3 blocks of 64 x 64, and each keeps as large a part as its real values are."""
    codec = DCT(TopK(32, values=BFloat16()))
    right, below, corner = 2, 2, 1  # 64 x 3, 3 x 64 and 3 x 3 values: 1.5 rounds up
    counts = [32, 32, right, below, below, corner]
    indices = 64 * 12 // 8 + -(-6 * 12 // 8) + -(-1 * 12 // 8)
    assert codec.size(Layout((torch.Size([67, 131]),), 64)) == indices + 2 * sum(counts)
    assert codec.size(Layout((torch.Size([67]),), 64)) == 2 * 2 + 2


def test_two_bit_values_have_a_table_for_full_blocks_and_for_each_padded_edge():
    """67 x 131 as above: 64 values of full blocks, 2, 4 and 1 at the edges."""
    codec = DCT(TopK(32, values=TwoBit()))
    layout, buffer = filled(codec, [torch.Size([67, 131])])
    indices = 64 * 12 // 8 + -(-6 * 12 // 8) + -(-1 * 12 // 8)
    assert codec.size(layout) == indices + 4 * 16 + 16 + 1 + 1 + 1
    x, got = (tensors(b, layout)[0] for b in (buffer, codec.decode(codec.encode(buffer, layout), layout)))
    blocks, masks = kept(x, 32, 64)
    places = [[0, 1], [2], [3, 4], [5]]
    for mine in places:
        sent = reference.two_bit(np.concatenate([blocks[i][masks[i] > 0] for i in mine]))
        for i in mine:
            blocks[i][masks[i] > 0], sent = np.split(sent, [int(masks[i].sum())])
    np.testing.assert_allclose(got, reference.back(blocks, x), atol=5e-6)


def test_a_vocabulary_that_does_not_divide():
    codec = DCT(TopK(32))
    layout, buffer = filled(codec, [torch.Size([50257, 64])])
    got = tensors(codec.decode(codec.encode(buffer, layout), layout), layout)[0]
    x = tensors(buffer, layout)[0]
    part = slice(50257 // 64 * 64 - 64, None)  # the last whole block and the padded one
    np.testing.assert_allclose(got[part], reference.back(kept(x[part], 32, 64)[0], x[part]), atol=5e-6)


def test_everything_kept_gives_everything_back():
    codec = DCT(TopK(4096))
    layout, buffer = filled(codec)
    torch.testing.assert_close(codec.decode(codec.encode(buffer, layout), layout), buffer, atol=3e-6, rtol=0)


def test_the_same_bits_again():
    codec = DCT(TopK(32))
    layout, buffer = filled(codec, [*SHAPES, torch.Size([200, 500])])
    payload, own = codec.encode_with_own(buffer, layout)
    for _ in range(3):
        again, mine = codec.encode_with_own(buffer.clone(), layout)
        assert torch.equal(payload, again) and torch.equal(own, mine)
    merged = [codec.merge([payload, again], [1.0, 2.0], layout) for _ in range(3)]
    assert torch.equal(merged[0], merged[1]) and torch.equal(merged[0], merged[2])


def test_precision_does_not_follow_the_users_settings():
    codec = DCT(Float32())
    layout, buffer = filled(codec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = codec.encode(buffer, layout)
    assert torch.equal(low, codec.encode(buffer, layout))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="blocks of 1 to 256"):
        DCT(TopK(1), chunk=0)
    with pytest.raises(ValueError, match="k <= chunk"):
        DCT(TopK(32), chunk=4)

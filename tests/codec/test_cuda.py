"""The same bits on a GPU as on a CPU; the cosine transform alone may differ by rounding."""

from __future__ import annotations

import pytest
import torch

from tests.codec.reference import SHAPES, filled
from thinwire.codec import DCT, E3M0, BFloat16, Float32, Int8, TopK, TwoBit
from thinwire.codec.bits import pack, unpack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BIG = [*SHAPES, torch.Size([300, 700]), torch.Size([4096]), torch.Size([257, 1000]), torch.Size([128, 128])]
SAME = [
    Int8(),
    E3M0(),
    BFloat16(),
    TopK(32),
    TopK(5, chunk=64, values=BFloat16()),
    TopK(40, chunk=64, values=Int8()),
    TopK(7, chunk=100, values=E3M0(), merge="mean"),
    TopK(3, chunk=20000),
    TopK(3, chunk=16384),
]
CLOSE = [
    TwoBit(),
    DCT(TopK(32)),
    DCT(TopK(32, merge="mean")),
    DCT(TopK(100)),
    DCT(TopK(4), chunk=16),
    DCT(TopK(4), chunk=13),
    DCT(TopK(4096)),
    DCT(Float32()),
]


def odd(codec, kind):
    layout, buffer = filled(codec, BIG, ties=kind == "ties")
    if kind == "tiny":
        buffer *= torch.logspace(-44, -30, 29).repeat(layout.total // 29 + 1)[: layout.total]
    if kind == "halves":
        buffer.copy_((buffer * 40).round() / 2)
    return layout, buffer


@pytest.mark.parametrize("kind", ["plain", "ties", "tiny", "halves"])
@pytest.mark.parametrize("codec", SAME, ids=repr)
def test_same_bits(codec, kind):
    layout, buffer = odd(codec, kind)
    payload, own = codec.encode_with_own(buffer, layout)
    there, mine = codec.encode_with_own(buffer.cuda(), layout)
    assert torch.equal(there.cpu(), payload) and torch.equal(mine.cpu(), own)
    assert torch.equal(codec.encode(buffer.cuda(), layout).cpu(), payload)
    assert torch.equal(codec.decode(there, layout), mine)
    merged = codec.merge([payload, payload], [1.0, 0.5], layout)
    torch.testing.assert_close(codec.merge([there, there], [1.0, 0.5], layout).cpu(), merged)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 0.0, 3.0, 2.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("codec", [Float32(), BFloat16(), Int8(), E3M0(), TwoBit()], ids=repr)
def test_a_dense_mean_has_the_same_bits(codec, weights):
    made = [filled(codec, BIG, seed=seed) for seed, _ in enumerate(weights)]
    layout = made[0][0]
    payloads = [codec.encode(buffer, layout) for _, buffer in made]
    sent = [torch.cat([payload.new_zeros(3), payload]).cuda()[3:] for payload in payloads]  # from an odd byte on
    want = codec.merge(payloads, list(weights), layout)
    assert torch.equal(codec.merge(sent, list(weights), layout).cpu(), want)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 0.0, 3.0), (1.0, 2.0, 0.5, 0.0, 1.0, 1.0)])
@pytest.mark.parametrize("codec", CLOSE, ids=repr)
def test_close(codec, weights):
    made = [filled(codec, BIG, seed=seed) for seed, _ in enumerate(weights)]
    layout = made[0][0]
    mixed = [made[0][1] + 0.3 * buffer for _, buffer in made]
    payloads = [codec.encode(buffer, layout) for buffer in mixed]
    for buffer, payload in zip(mixed, payloads, strict=True):
        there, own = codec.encode_with_own(buffer.cuda(), layout)
        assert torch.equal(codec.encode(buffer.cuda(), layout), there)
        assert torch.equal(codec.decode(there, layout), own)
        torch.testing.assert_close(own.cpu(), codec.decode(payload, layout), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(codec.decode(payload.cuda(), layout), own, atol=1e-5, rtol=1e-5)
    want = codec.merge(payloads, list(weights), layout)
    sent = [payload.cuda() for payload in payloads]
    torch.testing.assert_close(codec.merge(sent, list(weights), layout).cpu(), want, atol=1e-5, rtol=1e-5)
    per_value = [torch.full((layout.total,), weight, device="cuda") for weight in weights]
    torch.testing.assert_close(codec.merge(sent, per_value, layout).cpu(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("codec", [*SAME, *CLOSE], ids=repr)
@pytest.mark.parametrize("value", [0.0, 1e-42, float("inf"), float("nan")])
def test_no_value_breaks_a_codec(codec, value):
    layout, buffer = filled(codec, BIG)
    for view in layout.views(buffer):
        view.fill_(value)
    payload, own = codec.encode_with_own(buffer.cuda(), layout)
    torch.cuda.synchronize()
    assert payload.shape == (codec.size(layout),) and own.shape == buffer.shape


@pytest.mark.parametrize("bits", range(1, 17))
def test_packing(bits):
    values = torch.randint(0, 2**bits, (1001,), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(pack(values.cuda(), bits).cpu(), pack(values, bits))
    assert torch.equal(unpack(pack(values, bits).cuda(), 1001, bits).cpu(), values.int())

"""What holds for every codec."""

from __future__ import annotations

import pytest
import torch

from tests.codec.reference import CPU, SHAPES, filled
from thinwire.codec import DCT, E3M0, BFloat16, Float32, Int8, Layout, TopK, TwoBit
from thinwire.codec.dense import levels

DENSE = [Float32(), BFloat16(), Int8(), E3M0(), TwoBit()]
SPARSE = [
    TopK(32),
    TopK(5, chunk=64, values=BFloat16()),
    TopK(40, chunk=64, values=Int8()),
    TopK(7, chunk=100, values=E3M0(), merge="mean"),
    TopK(64, values=TwoBit()),
    TopK(16, chunk=16),
    TopK(1, chunk=1),
]
TRANSFORMED = [
    DCT(TopK(32)),
    DCT(TopK(32, values=BFloat16())),
    DCT(TopK(64, values=TwoBit(), merge="mean")),
    DCT(TopK(4, values=Int8()), chunk=16),
    DCT(TopK(20), chunk=16),
    DCT(TopK(4096)),
    DCT(Int8()),
    DCT(E3M0(), chunk=13),
    DCT(TwoBit()),
    DCT(Float32()),
]
CODECS = DENSE + SPARSE + TRANSFORMED
each = pytest.mark.parametrize("codec", CODECS, ids=repr)


@each
def test_own_is_what_the_others_read_to_the_bit(codec):
    layout, buffer = filled(codec)
    before = buffer.clone()
    payload, own = codec.encode_with_own(buffer, layout)
    assert payload.dtype == torch.uint8 and payload.shape == (codec.size(layout),)
    assert torch.equal(payload, codec.encode(buffer, layout))
    assert torch.equal(own.view(torch.int32), codec.decode(payload, layout).view(torch.int32))
    assert torch.equal(buffer, before)


@each
def test_a_payload_may_lie_anywhere_in_a_message(codec):
    layout, buffer = filled(codec)
    payload = codec.encode(buffer, layout)
    message = torch.cat([payload.new_full((3,), 7), payload, payload.new_full((5,), 9)])
    assert torch.equal(codec.decode(message[3:-5], layout), codec.decode(payload, layout))


@each
def test_gaps_stay_zero(codec):
    layout, buffer = filled(codec)
    payload, own = codec.encode_with_own(buffer, layout)
    for values in (own, codec.merge([payload, payload], [1.0, 1.0], layout)):
        for view in layout.views(values):
            view.zero_()
        assert not values.any()


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_buffers_are_fp32_whatever_the_users_default_is(codec, dtype):
    layout, buffer = filled(codec)
    payload, own = codec.encode_with_own(buffer, layout)
    merged = codec.merge([payload, payload], [1.0, 2.0], layout)
    levels.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        again, mine = codec.encode_with_own(buffer, layout)
        both = codec.merge([payload, payload], [1.0, 2.0], layout)
        assert layout.zeros(CPU).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
        levels.cache_clear()
    assert torch.equal(payload, again) and mine.dtype == both.dtype == torch.float32
    assert torch.equal(own, mine) and torch.equal(merged, both)


@each
@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-38, 3e38, float("inf"), float("nan")])
def test_no_value_breaks_a_codec(codec, value):
    layout, buffer = filled(codec, SHAPES[:6])
    for view in layout.views(buffer):
        view.fill_(value)
    payload, own = codec.encode_with_own(buffer, layout)
    assert payload.shape == (codec.size(layout),) and own.shape == buffer.shape
    if value == 0.0:
        assert not own.any()


@each
@pytest.mark.parametrize("shapes", [(), ((0,),), ((1,),), ((), (0, 3), (1, 1))])
def test_hardly_anything_to_send(codec, shapes):
    layout, buffer = filled(codec, [torch.Size(shape) for shape in shapes])
    payload, own = codec.encode_with_own(buffer, layout)
    assert payload.shape == (codec.size(layout),) and torch.equal(own, codec.decode(payload, layout))
    torch.testing.assert_close(codec.merge([payload], [1.0], layout), own)


@each
def test_a_value_that_nobody_has_is_zero(codec):
    layout, buffer = filled(codec)
    payload = codec.encode(buffer, layout)
    assert not codec.merge([payload, payload], [0.0, 0.0], layout).any()
    absent = torch.ones_like(buffer)
    layout.views(absent)[4].zero_()
    merged = codec.merge([payload, payload], [absent, absent], layout)
    assert not layout.views(merged)[4].any() and merged.any()


@each
def test_equal_payloads_merge_to_what_they_say(codec):
    layout, buffer = filled(codec)
    payload, own = codec.encode_with_own(buffer, layout)
    torch.testing.assert_close(codec.merge([payload] * 3, [1.0, 2.5, 0.5], layout), own)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.second is not None], ids=repr)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_say_the_same_as_the_whole(codec, count):
    """Two-shot: each worker encodes the part of every other one by itself."""
    layout, buffer = filled(codec, [*SHAPES, torch.Size([300, 70])])
    parts = layout.parts(count)
    assert sum(codec.size(part.layout) for part in parts) == codec.size(layout)
    pieces = [buffer[part.start : part.stop] for part in parts]
    read = [codec.decode(codec.encode(x, p.layout), p.layout) for x, p in zip(pieces, parts, strict=True)]
    assert torch.equal(torch.cat(read), codec.decode(codec.encode(buffer, layout), layout))


def test_second_codecs():
    assert isinstance(E3M0().second, Int8) and isinstance(TwoBit().second, Int8) and isinstance(Int8().second, Int8)
    assert isinstance(BFloat16().second, BFloat16)
    assert Float32().second is None and TopK(1).second is None and DCT(Int8()).second is None
    assert all(codec.coarse for codec in CODECS[2:]) and not Float32().coarse and not BFloat16().coarse


@each
def test_a_printed_codec_can_be_read_back(codec):
    names = {cls.__name__: cls for cls in (Float32, BFloat16, Int8, E3M0, TwoBit, TopK, DCT)}
    assert repr(eval(repr(codec), names)) == repr(codec)


def test_the_defaults_are_140_times_smaller_than_fp32():
    """GPT-2's shapes, one layer of each kind."""
    shapes = tuple(torch.Size(s) for s in [(50257, 768), (1024, 768), (768, 2304), (2304,), (768,), (768, 3072)])
    for codec in (DCT(TopK(32, values=BFloat16())), TopK(64, values=TwoBit())):
        layout = Layout(shapes, codec.align)
        assert 4 * layout.values / codec.size(layout) >= 140
    assert 16 * 1024 / Int8().size(Layout((torch.Size([4096]),), 128)) > 3.8

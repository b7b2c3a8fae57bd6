"""A step's arrays in one buffer."""

import numpy as np
import pytest
import torch

from radixrt.exec.packing import ALIGNED_WORDS, WORD_BYTES, PackedLayout
from radixrt.exec.staging import NUM_TURNS, Staging
from tests.support.devices import FakeDevice

DTYPES = [np.int32, np.int64, np.float32, np.float64]


def random_arrays(rng, *, most=5):
    arrays = {}
    for index in range(rng.integers(1, 9)):
        shape = tuple(rng.integers(0, most, rng.integers(1, 3)))
        dtype = DTYPES[rng.integers(len(DTYPES))]
        arrays[f"a{index}"] = rng.integers(-1000, 1000, shape).astype(dtype)
    return arrays


def test_arrays_come_back_as_they_were_and_aligned():
    rng = np.random.default_rng(0)
    for _ in range(200):
        arrays = random_arrays(rng)
        layout = PackedLayout.fitting(arrays)
        tensor = torch.full((layout.num_words,), -1, dtype=torch.int32)
        assert layout.write(tensor.numpy(), arrays) <= layout.num_words
        for field, (name, view) in zip(layout.fields, layout.views(tensor).items(), strict=True):
            assert field.start % ALIGNED_WORDS == 0
            assert (view.data_ptr() - tensor.data_ptr()) % (ALIGNED_WORDS * WORD_BYTES) == 0
            assert view.numpy().dtype == arrays[name].dtype
            assert np.array_equal(view.numpy(), arrays[name])


def test_smaller_arrays_are_padded_with_zeros_and_the_last_one_with_nothing():
    large = {"a": np.ones((4, 3), np.int64), "b": np.ones(5, np.float64), "c": np.ones(6, np.int32)}
    small = {"a": np.full((2, 3), 7, np.int64), "b": np.full(0, 7.0), "c": np.full(2, 7, np.int32)}
    layout = PackedLayout.fitting(large)
    buffer = np.full(layout.num_words, -1, np.int32)
    num_words = layout.write(buffer, small)
    views = layout.views(torch.from_numpy(buffer))
    assert views["a"].tolist() == [[7] * 3] * 2 + [[0] * 3] * 2
    assert views["b"].tolist() == [0.0] * 5
    assert views["c"].tolist() == [7, 7, -1, -1, -1, -1]
    assert num_words == layout.fields[-1].start + 2
    assert layout.takes(small)
    assert not layout.takes({**small, "c": np.zeros(7, np.int32)})


def test_another_order_or_type_is_a_bug():
    layout = PackedLayout.fitting({"a": np.ones(2, np.int32), "b": np.ones(2, np.int64)})
    buffer = np.zeros(layout.num_words, np.int32)
    with pytest.raises(AssertionError):
        layout.write(buffer, {"b": np.ones(2, np.int64), "a": np.ones(2, np.int32)})
    with pytest.raises(AssertionError):
        layout.write(buffer, {"a": np.ones(2, np.int64), "b": np.ones(2, np.int64)})


def test_host_buffers_take_turns_and_the_device_has_one():
    staging = Staging(FakeDevice(), num_words=64)
    seen = []
    for number in range(3):
        arrays = {"a": np.full(5, number, np.int32)}
        views = staging.send(arrays)
        seen.append(views["a"].data_ptr())
        assert views["a"].tolist() == [number] * 5
    assert len(set(seen)) == 1
    assert [buffer[0].item() for buffer in staging._host] == [1, 2] or NUM_TURNS != 2
    grown = staging.send({"a": np.arange(1000)})
    assert torch.equal(grown["a"], torch.arange(1000))

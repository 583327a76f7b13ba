"""The message of a step: what an observer sends is what the agent reads."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.jobs.rl.messages import pack, unpack

DTYPES = st.sampled_from([np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64])
SHAPES = st.one_of(st.just(()), hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5))


@given(st.data(), DTYPES, SHAPES, st.integers(1, 6))
@settings(deadline=None, max_examples=200)
def test_unpack_is_the_inverse_of_pack(data: st.DataObject, dtype: Any, shape: tuple[int, ...], count: int) -> None:
    observations = data.draw(hnp.arrays(dtype, (count, *shape)))
    rewards = data.draw(hnp.arrays(np.float32, count))
    dones = data.draw(hnp.arrays(np.uint8, count, elements=st.integers(0, 2)))
    got = unpack(pack(observations, rewards, dones), shape, dtype)
    for received, sent in zip(got, (observations, rewards, dones), strict=True):
        assert (received.shape, received.dtype) == (sent.shape, sent.dtype)
        assert received.tobytes() == sent.tobytes()  # to the bit, NaN too
        assert not received.flags.writeable


def test_observations_in_another_order_in_memory() -> None:
    images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(5, 4, 3, 2).T
    received, *_ = unpack(pack(images, np.zeros(2, np.float32), np.zeros(2, np.uint8)), (3, 4, 5), np.uint8)
    assert np.array_equal(received, images)

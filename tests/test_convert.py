import ml_dtypes
import numpy as np
import pytest

from hydrax._convert import convert
from hydrax.errors import ValueRangeError


def converted(values, source, target):
    array = np.asarray(values, source)
    result = np.empty(array.shape, target)
    convert("x", array, result)
    return result


@pytest.mark.parametrize(
    ("values", "source", "target"),
    [
        ([0, -1, 2**31 - 1, -(2**31)], np.int64, np.int32),
        ([0, 2**32 - 1], np.uint64, np.uint32),
        ([0, 255], np.uint64, np.uint8),
        ([0, 127], np.uint8, np.int8),
        ([-8, 7], np.int32, ml_dtypes.int4),
        ([0.0, -0.0, 3.4e38, np.inf, -np.inf], np.float64, np.float32),
        ([1.5, -2.0, 448.0], np.float32, ml_dtypes.float8_e4m3fn),
        ([1.0, 3e38], np.float32, ml_dtypes.bfloat16),
        ([1 + 2j, 3e38], np.complex128, np.complex64),
        ([0, 1, 255], np.uint8, np.float32),
        ([True, False], bool, np.float32),
        ([-2.9, 2.9], np.float32, np.int8),
        ([2.0**31 - 1, -(2.0**31)], np.float64, np.int32),
        ([0.0, 2.5, -1.0], np.float32, bool),
    ],
)
def test_values_that_fit_arrive_as_numpy_converts_them(values, source, target):
    expected = np.asarray(values, source).astype(target)
    assert np.array_equal(converted(values, source, target), expected)


def test_nan_stays_nan_between_floating_point_dtypes():
    assert np.isnan(converted([np.nan], np.float64, np.float32)).all()


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (2**31, np.int64, np.int32),
        (-(2**31) - 1, np.int64, np.int32),
        (2**32, np.uint64, np.uint32),
        (2**63, np.uint64, np.int64),
        (-1, np.int64, np.uint64),
        (-1, np.int8, np.uint8),
        (8, np.int32, ml_dtypes.int4),
        (3.5e38, np.float64, np.float32),
        (1e5, np.float32, np.float16),
        (1e4, np.float32, ml_dtypes.float8_e4m3fn),
        (1e39, np.complex128, np.complex64),
        (np.nan, np.float32, np.int32),
        (np.inf, np.float64, np.int64),
        (2.0**63, np.float64, np.int64),
        (-1.0, np.float32, np.uint8),
        (256.0, np.float32, np.uint8),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_item(value, source, target):
    array = np.zeros((3, 2), source)
    array[1, 1] = value
    with pytest.raises(ValueRangeError, match="array 'image'") as caught:
        convert("image", array, np.empty((3, 2), target))
    assert caught.value.item == 1


def test_a_wide_value_hints_at_64_bit_types():
    with pytest.raises(ValueRangeError, match="jax_enable_x64"):
        converted([2**40], np.int64, np.int32)


def test_no_items_convert_to_none():
    assert converted(np.zeros((0, 3)), np.int64, np.int32).shape == (0, 3)


def test_a_dtype_that_was_made_native_keeps_large_integers_exact():
    native = np.dtype(np.int64).newbyteorder("=")  # equal to int64, but another object
    source = np.array([2**53 + 1], native)
    target = np.empty(1, np.uint64)
    convert("x", source, target)
    assert target[0] == 2**53 + 1
    with pytest.raises(ValueError, match=f"{2**53 + 1} does not fit int32"):
        convert("x", source, np.empty(1, np.int32))

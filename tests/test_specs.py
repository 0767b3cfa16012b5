import ml_dtypes
import numpy as np
import pytest

from hydrax._specs import ALIGNMENT, lay_out, parse_specs, placed_specs


def test_every_array_starts_at_a_multiple_of_64_bytes_and_none_overlap():
    specs = parse_specs(
        "arrays",
        {
            "flags": ((13,), bool, bool),
            "scalar": ((), np.int8, np.int8),
            "odd": ((3, 5), np.float16, np.float16),
            "image": ((7, 7, 3), np.uint8, np.uint8),
            "empty": ((0, 4), np.float32, np.float32),
            "last": ((5,), np.float64, np.float64),
        },
    )
    layouts, nbytes = lay_out(specs, 3)
    end = 0
    for name, layout in layouts.items():
        assert layout.offset % ALIGNMENT == 0, name
        assert layout.offset >= end, name
        end = layout.offset + layout.nbytes
    assert end == nbytes
    assert list(layouts) == [spec.name for spec in specs]


def test_a_layout_is_the_tuple_that_programs_unpack():
    layouts, _ = lay_out(parse_specs("arrays", {"x": ((2,), "f4", ml_dtypes.bfloat16)}), 4)
    shape, dtype, jax_dtype, offset, count = layouts["x"]
    assert (shape, dtype, offset, count) == ((4, 2), np.float32, 0, 8)
    assert jax_dtype == ml_dtypes.bfloat16


def test_layouts_cannot_be_changed():
    layouts, _ = lay_out(parse_specs("arrays", {"x": ((), "f4", "f4")}), 1)
    with pytest.raises(TypeError):
        layouts["y"] = layouts["x"]  # type: ignore[index]


def test_placed_specs_take_the_dtype_of_jax_and_its_replacement():
    specs = parse_specs("arrays", {"a": ((), "f4", ml_dtypes.bfloat16), "b": ((), "i8", "i8")})
    placed = placed_specs(specs, {np.dtype("int64"): np.dtype("int32")})
    assert [spec.dtype.name for spec in placed] == ["bfloat16", "int32"]


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (((2, -1), "f4", "f4"), ValueError, "negative"),
        (((2, 1.5), "f4", "f4"), TypeError, "1.5"),
        (((True,), "f4", "f4"), TypeError, "True"),
        ((3, "f4", "f4"), TypeError, "tuple"),
        (("abc", "f4", "f4"), TypeError, "tuple"),
        (((), object, "f4"), TypeError, "object"),
        (((), "U5", "f4"), TypeError, "<U5"),
        (((), "S5", "f4"), TypeError, "S5"),
        (((), "datetime64[s]", "f4"), TypeError, "datetime64"),
        (((), [("a", "f4")], "f4"), TypeError, "cannot be an array"),
        (((), ">f4", "f4"), TypeError, "byte order"),
        (((), "f4", None), TypeError, "jax_dtype"),
        (((), "nonsense", "f4"), TypeError, "no dtype"),
        (((), "c8", "f4"), ValueError, "imaginary"),
        (((), "f4"), TypeError, "expected \\(shape"),
    ],
)
def test_a_bad_spec_is_refused_with_the_array_named(spec, error, words):
    with pytest.raises(error, match=words) as caught:
        parse_specs("loader_arrays", {"image": spec})
    assert "loader_arrays['image']" in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "error"),
    [({}, ValueError), ([("x", 1)], TypeError), ({3: ((), "f4", "f4")}, TypeError)],
)
def test_specs_that_are_no_named_arrays_are_refused(specs, error):
    with pytest.raises(error, match="loader_arrays"):
        parse_specs("loader_arrays", specs)

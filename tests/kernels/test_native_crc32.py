"""The checksum of expert records is zlib's, by every method that this processor has."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aegis.kernels.native._native", exc_type=ImportError)

from aegis.kernels.native import _native

DATA = np.random.default_rng(0).integers(0, 256, 1 << 17, dtype=np.uint8)

every_method = pytest.mark.parametrize("method", ["", *_native.crc32_methods()])


def test_there_is_always_the_portable_method_and_it_comes_last() -> None:
    assert _native.crc32_methods()[-1] == "table"


@every_method
def test_every_length_up_to_5000_is_right(method: str) -> None:
    for nbytes in range(5001):
        start = nbytes % 67
        expected = zlib.crc32(DATA[start : start + nbytes].data)
        assert _native.crc32(DATA.ctypes.data + start, nbytes, method) == expected, nbytes


@every_method
@given(st.data())
def test_it_is_right_wherever_the_bytes_lie_and_whatever_they_are(
    method: str, data: st.DataObject
) -> None:
    content = data.draw(st.binary(max_size=400)) * data.draw(st.integers(1, 5))
    start = data.draw(st.integers(0, 70))
    buffer = np.frombuffer(b"\xff" * start + content + b"\xff" * 64, np.uint8)
    found = _native.crc32(buffer.ctypes.data + start, len(content), method)
    assert found == zlib.crc32(content)


@every_method
@pytest.mark.parametrize("nbytes", [4096, 65536, 100001])
@pytest.mark.parametrize("fill", [None, 0, 255])
def test_records_of_the_usual_sizes_are_right(method: str, nbytes: int, fill: int | None) -> None:
    data = DATA[:nbytes] if fill is None else np.full(nbytes, fill, np.uint8)
    assert _native.crc32(data.ctypes.data, nbytes, method) == zlib.crc32(data.data)


def test_a_method_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="crc32_methods lists them"):
        _native.crc32(DATA.ctypes.data, 1, "abacus")

from pathlib import Path

import numpy as np
import pytest

from aegis.tiers import RoutingTrace


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.int16)])
def test_what_was_recorded_is_what_is_read_back(
    tmp_path: Path, num_experts: int, dtype: type
) -> None:
    trace = RoutingTrace(2, num_experts, 2)
    trace.record(0, np.array([[0, 5], [1, num_experts - 1]], dtype=np.int32))
    trace.record(0, [2, 3])
    path = trace.save(tmp_path / "routing")
    assert path == tmp_path / "routing.npz"
    with np.load(path, allow_pickle=False) as saved:
        assert saved["layer_000"].dtype == dtype
        assert saved["layer_000"].tolist() == [[0, 5], [1, num_experts - 1], [2, 3]]
        assert saved["layer_001"].shape == (0, 2)
    assert list(tmp_path.iterdir()) == [path]

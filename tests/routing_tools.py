"""Small traces of routing."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from aegis.tiers.trace import RoutingTrace


def made(chosen: object, one: object, two: object, experts: int = 8) -> RoutingTrace:
    parts = [np.array(part, np.uint8) for part in (chosen, one, two)]
    return RoutingTrace("m", experts, "", parts[0], (parts[1], parts[2]))


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    tokens, layers, experts = draw(st.integers(1, 20)), draw(st.integers(1, 4)), 12
    per_token = draw(st.integers(1, 4))
    orders = np.argsort(rng.random((tokens, layers, experts)), axis=-1)
    chosen = np.sort(orders[..., :per_token], axis=-1)
    return made(chosen, orders[:, 1:], orders[:, 2:], experts)

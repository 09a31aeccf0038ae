"""Expert tiers: a fixed pool of slots in memory over expert files on an SSD."""

from aegis.tiers.acquisition import Acquisition
from aegis.tiers.arena import Arena
from aegis.tiers.errors import (
    ArenaError,
    DamagedExpertError,
    ExpertFileError,
    ReadError,
    ReadPoolError,
    SlotError,
    TiersError,
    TraceError,
)
from aegis.tiers.facade import ExpertTiers
from aegis.tiers.guess import GUESS_KINDS
from aegis.tiers.policy import POLICIES
from aegis.tiers.read_pool import PythonReadPool, ReadPool, open_read_pool
from aegis.tiers.slots import SlotPool
from aegis.tiers.staging import Batch, LayerVisit
from aegis.tiers.stats import Counters, TierStats
from aegis.tiers.store import ExpertFiles
from aegis.tiers.trace import RoutingTrace, TraceRecorder

__all__ = [
    "GUESS_KINDS",
    "POLICIES",
    "Acquisition",
    "Arena",
    "ArenaError",
    "Batch",
    "Counters",
    "DamagedExpertError",
    "ExpertFileError",
    "ExpertFiles",
    "ExpertTiers",
    "LayerVisit",
    "PythonReadPool",
    "ReadError",
    "ReadPool",
    "ReadPoolError",
    "RoutingTrace",
    "SlotError",
    "SlotPool",
    "TierStats",
    "TiersError",
    "TraceError",
    "TraceRecorder",
    "open_read_pool",
]

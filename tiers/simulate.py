"""A trace through the real tiers without weights, under a clock that is computed.

Slots, hot tier, policy, guesses and the read queue are those of a run and decide as they do there;
only the disk and the time that layers take are numbers. What is counted is therefore what a run
counts whose tokens go through one by one, as in ``aegis trace``: exactly where no result depends on
when a read ends, which is so without guesses, and with them where every read ends before anybody
looks; otherwise as exactly as these numbers are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aegis.tiers.facade import ExpertTiers
from aegis.tiers.read_pool import ReadPool
from aegis.tiers.slots import SlotPool
from aegis.tiers.stats import Counters
from aegis.tiers.store import READ_ALIGN, ExpertFiles
from aegis.tiers.trace import RoutingTrace
from aegis.tiers.virtual_disk import Disk, VirtualPool

Advance = Callable[[float], None]


@dataclass(frozen=True)
class Times:
    """What computing takes, in seconds."""

    layer_s: float = 0.0
    """A layer until its experts are chosen: attention and router."""
    shared_s: float = 0.0
    """What a layer computes besides, while reads are on their way: a shared expert."""
    expert_s: float = 0.0
    """One expert."""
    head_s: float = 0.0
    """Everything that a token takes but its MoE layers."""
    read_s: float = 0.0
    """What beginning and ending one read takes of whoever computes."""

    def token_s(self, layers: int, per_token: int) -> float:
        """A token with every expert in a slot."""
        return self.head_s + layers * (self.layer_s + self.shared_s + per_token * self.expert_s)


@dataclass(frozen=True)
class Tiering:
    """How slots are used: what ``aegis run`` calls slots, policy, guess and guess width."""

    slots: int
    """All of them while decoding, borrowed ones too."""
    policy: str = "lfu"
    guess: str = "none"
    guess_width: int | None = 6
    """None: it adapts, as that of ``aegis run``."""


@dataclass(frozen=True)
class Simulated:
    """What became of the counted tokens."""

    tokens: int
    counters: Counters
    compute_s: float
    """Seconds of all tokens together, without what was waited for: computing, and reads' own."""
    wait_s: float
    """Seconds that stood still for reads."""
    disk_share: float
    """The part of the time in which bytes flowed."""
    record_nbytes: int

    @property
    def seconds(self) -> float:
        """What the tokens took."""
        return self.compute_s + self.wait_s

    @property
    def tokens_per_s(self) -> float | None:
        """None where nothing takes time."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def read_nbytes(self) -> int:
        """What came from the disk."""
        return self.counters.read_nbytes

    @property
    def wasted_nbytes(self) -> int:
        """What was read for guesses and dropped without ever being chosen."""
        return self.counters.wasted * self.record_nbytes


def least_seconds(
    misses: int, tokens: int, disk: Disk, record_nbytes: int, token_s: float
) -> float:
    """The least that tokens can take whose experts miss so often while nothing is guessed: reads
    hide behind computing or computing behind reads, and no guess saves a byte."""
    return max(disk.seconds(misses * record_nbytes), tokens * token_s)


class NoFiles(ExpertFiles):
    """Records of a size, which nobody can read."""

    def __init__(self, num_layers: int, num_experts: int, stride: int = READ_ALIGN) -> None:
        super().__init__((), stride, stride, num_experts)
        self.num_layers = num_layers

    def locate(self, layer_index: int, expert: int) -> tuple[int, int, int]:
        """In no file."""
        del layer_index
        return -1, expert * self.stride, self.stride

    def checksum(self, layer_index: int, expert: int) -> int:
        """Nothing is compared."""
        del layer_index, expert
        return -1

    def note_intact(self, layer_index: int, expert: int) -> None:
        """Nothing is remembered."""


@dataclass
class Decoding:
    """The tokens of a trace on their way through tiers, as ``Forward`` of the engine sends them."""

    trace: RoutingTrace
    tiers: ExpertTiers
    times: Times = field(default_factory=Times)
    advance: Advance | None = None
    """Told how long computing takes; None: it takes no time."""
    issued: Callable[[], int] = lambda: 0
    """How many reads were asked for so far."""

    def token(self, index: int) -> None:
        """Every layer of one token."""
        chosen, guessed = self.trace.chosen[index].tolist(), self._guessed(index)
        advance, times, last = self.advance, self.times, len(chosen) - 1
        for layer, experts in enumerate(chosen):
            if advance is not None:
                advance(times.layer_s)
            before = self.issued()
            acquired = self.tiers.acquire(layer, experts)
            if layer < last:
                self.tiers.guess(layer + 1, guessed[layer])
            if advance is not None and times.read_s:
                advance((self.issued() - before) * times.read_s)
            came = len(acquired.ready()[0])
            if advance is not None:
                advance(times.shared_s + came * times.expert_s)
            while not acquired.complete:
                came = len(acquired.wait()[0])
                if advance is not None:
                    advance(came * times.expert_s)
            acquired.release()
        if advance is not None:
            advance(times.head_s)

    def _guessed(self, index: int) -> list[list[int]]:
        """As many of the ranking as the engine asks the router for."""
        ranked: list[list[int]] = self.trace.guesses[0][index, :, : self.tiers.candidates].tolist()
        return ranked


def open_tiers(
    trace: RoutingTrace, tiering: Tiering, pool: ReadPool, record_nbytes: int = READ_ALIGN
) -> ExpertTiers:
    """Tiers with slots and files in name only."""
    _, layers, per_token = trace.shape
    stride = -(-record_nbytes // READ_ALIGN) * READ_ALIGN
    return ExpertTiers(
        NoFiles(layers, trace.num_experts, stride),
        SlotPool(max(tiering.slots, per_token), stride),
        num_experts_per_tok=per_token,
        staging_slots=1,
        policy=tiering.policy,
        guess=tiering.guess,
        guess_width=tiering.guess_width,
        pool=pool,
    )


def simulate(
    trace: RoutingTrace,
    tiering: Tiering,
    *,
    disk: Disk | None = None,
    times: Times | None = None,
    record_nbytes: int = READ_ALIGN,
    skip: int = 0,
) -> Simulated:
    """Decode the trace's tokens with that disk (None: one that takes no time).

    record_nbytes: of an expert on the disk, rounded up to what reads are aligned to.
    skip: so many tokens at first are not counted: the slots are empty then. None of them is left
    out where there are no more than that.
    """
    tokens, layers, per_token = trace.shape
    skip = skip if skip < tokens else 0
    pool, times = VirtualPool(disk or Disk()), times or Times()
    begun = waited = busy = 0.0
    issued = 0
    with open_tiers(trace, tiering, pool, record_nbytes) as tiers:
        advance = pool.advance if times != Times() else None
        decoding = Decoding(trace, tiers, times, advance, lambda: pool.issued)
        for token in range(tokens):
            if token == skip:
                tiers.stats.reset()
                begun, waited, busy, issued = pool.now, pool.waited_s, pool.busy_s, pool.issued
            decoding.token(token)
        total, stride = tiers.stats.totals("decode"), tiers.files.stride
        passed, waited = pool.now - begun, pool.waited_s - waited
        busy = pool.busy_s - busy
    total.wait_s = waited  # Theirs is what this loop took.
    reading_s = (pool.issued - issued) * times.read_s
    return Simulated(
        tokens - skip,
        total,
        compute_s=(tokens - skip) * times.token_s(layers, per_token) + reading_s,
        wait_s=waited,
        disk_share=min(1.0, busy / passed) if passed else 0.0,
        record_nbytes=stride,
    )

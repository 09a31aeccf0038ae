"""From a plan, a probe and a trace to tokens per second."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aegis.models import family
from aegis.predict.cut import kinds_of
from aegis.tiers.simulate import Simulated, Tiering, Times, simulate

if TYPE_CHECKING:
    from aegis.checkpoint.layout import StoreLayout
    from aegis.planner import MemoryPlan
    from aegis.predict.probe import Kernels, Probe
    from aegis.settings import ExpertBits
    from aegis.tiers.trace import RoutingTrace
    from aegis.tiers.virtual_disk import Disk


@dataclass(frozen=True)
class Prediction:
    """What is said of one plan."""

    simulated: Simulated
    times: Times

    @property
    def tokens_per_s(self) -> float:
        """0 where nothing takes time."""
        return self.simulated.tokens_per_s or 0.0

    def to_json(self) -> dict[str, Any]:
        """Per token, as a row of ``aegis predict --json`` has it."""
        found = self.simulated
        counters, tokens = found.counters, found.tokens
        seconds = found.seconds / tokens
        return {
            "tps": self.tokens_per_s,
            "s_per_token": seconds,
            "compute_s": found.compute_s / tokens,
            "wait_s": found.wait_s / tokens,
            "hit_rate": counters.hit_rate,
            "late_rate": counters.late / counters.choices if counters.choices else 0.0,
            "wasted_rate": counters.wasted / counters.guesses if counters.guesses else 0.0,
            "read_nbytes_per_token": found.read_nbytes / tokens,
            "disk_busy": found.disk_share,
        }


def predict(
    plan: MemoryPlan,
    times: Times,
    kernels: Kernels,
    disk: Disk,
    trace: RoutingTrace,
    record_nbytes: int,
    *,
    policy: str = "lfu",
    guess: str = "cross-layer",
    guess_width: int | None = None,
) -> Prediction:
    """Decode the trace with a plan's slots, twice: the second time is counted, as slots are full
    then and whatever has a slot for good is in it.

    How long reads are under way, which makes blocks slower, is found with half of the tokens."""
    tiering = Tiering(plan.total_slots, policy, guess, guess_width)

    def decoded(part: RoutingTrace, times: Times) -> Simulated:
        return simulate(
            part.twice(),
            tiering,
            disk=disk,
            times=times,
            record_nbytes=record_nbytes,
            skip=part.shape[0],
        )

    if kernels.slower > 1:
        times = slower(times, kernels, decoded(_half(trace), times).disk_share)
    return Prediction(decoded(trace, times), times)


def _half(trace: RoutingTrace) -> RoutingTrace:
    """The first tokens."""
    count = -(-trace.shape[0] // 2)
    guesses = tuple(part[:count] for part in trace.guesses)
    return replace(trace, chosen=trace.chosen[:count], guesses=guesses)


def slower(times: Times, kernels: Kernels, busy: float) -> Times:
    """Times of blocks beside reads that are under way for a share of the time."""
    if not kernels.slower_busy or kernels.slower <= 1:
        return times
    factor = 1 + (kernels.slower - 1) * min(1.0, busy / kernels.slower_busy)
    return replace(
        times,
        layer_s=times.layer_s * factor,
        shared_s=times.shared_s * factor,
        expert_s=times.expert_s * factor,
        head_s=times.head_s * factor,
    )


def times_of(layout: StoreLayout, probe: Probe, experts: ExpertBits) -> Times:
    """What a token of the whole model takes, from what the small one's took.

    Every kind of layer counts as often as the model has it. The head and the routers grow with
    their rows; the bytes of a shared expert say which part of the experts' time is its."""
    shape = family(layout.model_type).shape(layout.config)
    kernels, sizes = probe.kernels, probe.sizes
    kinds, moe = kinds_of(shape), len(shape.moe_layers)
    head_s = kernels.head_s * shape.vocab_size / sizes.words
    rows = shape.num_experts - sizes.experts
    router_s = kernels.router_s + 2 * rows * head_s / shape.vocab_size
    before = [
        (kernels.delta_s if is_delta else kernels.attention_s) + kernels.between_s
        for is_delta, _ in kinds
    ]
    outside = sum(
        seconds + kernels.mlp_s
        for seconds, (_, has_experts) in zip(before, kinds, strict=True)
        if not has_experts
    )
    inside = sum(seconds for seconds, kind in zip(before, kinds, strict=True) if kind[1])
    shared = _shared_share(layout, experts)
    return Times(
        layer_s=inside / moe + router_s,
        shared_s=shared * kernels.experts_s,
        expert_s=(1 - shared) * kernels.experts_s / shape.num_experts_per_tok,
        head_s=head_s + outside,
        read_s=kernels.read_s,
    )


def _shared_share(layout: StoreLayout, experts: ExpertBits) -> float:
    """The part of the bytes of a layer's experts that is its shared expert."""
    shape = family(layout.model_type).shape(layout.config)
    shared = sum(t.nbytes for name, t in layout.resident.items() if ".shared_expert" in name)
    shared //= len(shape.moe_layers)
    routed = shape.num_experts_per_tok * layout.geometry(experts).record_nbytes
    return shared / (shared + routed)

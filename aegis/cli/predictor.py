"""Predictions of one command: every model, kind of experts and number of threads is probed once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aegis.cli.options import Options, engine_settings
from aegis.cli.progress import ProgressBar
from aegis.engine.planning import backend_layout
from aegis.errors import AegisError, UsageError
from aegis.models import family
from aegis.predict.prediction import predict, times_of
from aegis.predict.probe import Probe, run_probe
from aegis.predict.routing import Routing, routing_for
from aegis.tiers.errors import TraceError
from aegis.tiers.trace import RoutingTrace

if TYPE_CHECKING:
    from aegis.engine.sources import Source
    from aegis.planner import MemoryPlan


class Predictor:
    """Probes, and the traces that are replayed."""

    def __init__(self, backend: str, depth: int, quiet: bool, trace: str | None = None) -> None:
        """depth: the position in the context. trace: a file of routing; None: one that comes with
        aegis."""
        self._backend, self._depth, self._quiet, self._trace = backend, depth, quiet, trace
        self._probes: dict[tuple[Any, ...], Probe] = {}
        self._routings: dict[str, Routing] = {}

    def routing(self, source: Source) -> Routing:
        """What is replayed for a model.

        Raises:
            UsageError: the trace that was named is of another shape.
            AegisError: a trace is damaged.
        """
        if source.name not in self._routings:
            try:
                self._routings[source.name] = self._found(source)
            except TraceError as error:
                raise AegisError(str(error)) from None
        return self._routings[source.name]

    def _found(self, source: Source) -> Routing:
        layout = source.layout(backend_layout(self._backend))
        shape = family(layout.model_type).shape(layout.config)
        sizes = (len(shape.moe_layers), shape.num_experts, shape.num_experts_per_tok)
        if self._trace is None:
            return routing_for(source.name, *sizes)
        trace = RoutingTrace.load(self._trace)
        tokens, layers, per_token = trace.shape
        if (layers, trace.num_experts, per_token) != sizes or not tokens:
            raise UsageError(
                f"{self._trace} has {tokens} tokens through {layers} layers of"
                f" {trace.num_experts} experts, {per_token} per token, but {source.name} has"
                f" {sizes[0]} of {sizes[1]}, {sizes[2]} per token; record one with 'aegis trace'"
            )
        return Routing(trace, f"the trace in {self._trace}")

    def probe(self, source: Source, plan: MemoryPlan, options: Options) -> Probe:
        """Of a model that fits, with a bar on a terminal.

        Raises:
            AegisError: it failed.
        """
        key = (source.name, *(options[name] for name in ("experts", "threads", "io_threads")))
        if key not in self._probes:
            bar = ProgressBar("probing", self._quiet, lambda done: f"{done} %")
            settings, place = engine_settings(options), plan.embedding
            try:
                self._probes[key] = run_probe(
                    source, settings, self._backend, place, self._depth, lambda done: bar(done, 100)
                )
            finally:
                bar.clear()
        return self._probes[key]

    def predicted(
        self,
        source: Source,
        plan: MemoryPlan,
        options: Options,
        disk_nbytes_per_s: float | None = None,
    ) -> dict[str, Any]:
        """What is said of a plan, per token.

        disk_nbytes_per_s: of reads while nothing is computed; None: as the probe found it.

        Raises:
            As ``routing`` and ``probe``.
        """
        routing = self.routing(source)
        probe = self.probe(source, plan, options)
        if disk_nbytes_per_s is not None:
            probe = replace(probe, disk=replace(probe.disk, nbytes_per_s=disk_nbytes_per_s))
        layout = source.layout(backend_layout(self._backend))
        return predict(
            plan,
            times_of(layout, probe, options["experts"]),
            probe.kernels,
            probe.computing_disk,
            routing.trace,
            layout.geometry(options["experts"]).stride,
            policy=options["policy"],
            guess=options["guess"],
            guess_width=options["guess_width"],
        ).to_json()

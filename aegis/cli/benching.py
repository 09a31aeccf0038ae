"""The configurations of one ``aegis bench``, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from aegis.bench.formats import Format, open_format
from aegis.bench.rows import Row, refused, rows_of
from aegis.bench.runs import Configuration, Limits, configurations, limits_request, measured
from aegis.cli.machine import read_machine
from aegis.cli.options import Options, engine_settings
from aegis.cli.plan import find_model, plan_for
from aegis.cli.predictor import Predictor
from aegis.cli.progress import DownloadBar, ProgressBar
from aegis.cli.report import SCHEMA_VERSION, check_cap, note
from aegis.engine.planning import backend_layout, choose_backend, compute_threads
from aegis.errors import PlanError, UsageError
from aegis.models import family
from aegis.planner import format_size

if TYPE_CHECKING:
    from aegis.checkpoint.store import Store
    from aegis.engine.sources import Name, Source
    from aegis.planner import MemoryPlan

_VARIED = ("experts", "guess_width", "threads", "io_threads")


def bench(model: Name, caps: Sequence[int], options: Options) -> int:
    """Measure and print all configurations; returns the exit code.

    What has been measured is printed, whatever ends it.

    Raises:
        PlanError: no configuration fits.
        CapExceededError: one took more than its cap.
        AegisError: as the processes that measure say.
    """
    configs = configurations(
        caps,
        options["experts"],
        options["guess_width"],
        options["threads"] or (None,),
        options["io_threads"],
    )
    run = _Run(model, configs, options)
    shown = _format(run, configs, options)
    try:
        for row in run.rows():
            run.bar.clear()
            shown.row(row)
    except BaseException:
        run.bar.clear()
        shown.end(False)
        raise
    shown.end(True)
    run.judge()
    return 0


def _format(run: _Run, configs: Sequence[Configuration], options: Options) -> Format:
    head = {
        "schema_version": SCHEMA_VERSION,
        "model": run.name,
        "backend": run.backend,
        "prompt_tokens": options["n_prompt"],
        "generation_tokens": options["n_gen"],
        "repetition_count": options["repetitions"],
        "seed": options["seed"],
        "context": run.context,
    }
    varied = [name for name in _VARIED if len({getattr(one, name) for one in configs}) > 1]
    name = "json" if options["as_json"] and options["output"] == "md" else options["output"]
    return open_format(name, head, varied, click.echo)


class _Run:
    """What the configurations share: the model, its stores and the progress."""

    def __init__(self, model: Name, configs: Sequence[Configuration], options: Options) -> None:
        self._configs, self._options = configs, {**options, "experts": configs[0].experts}
        self.backend = choose_backend(options["backend"])
        self._layout = backend_layout(self.backend)
        self._sources: dict[str, Source] = {}
        self._stores: dict[str, Store] = {}
        for config in configs:
            if config.experts not in self._sources:
                self._sources[config.experts] = self._source(model, config)
        source = self._sources[configs[0].experts]
        self.name = source.name
        self.context = self._options["ctx_size"] = self._context(source)
        self._each = options["repetitions"] * self._tokens
        self._before = 0
        self.bar = ProgressBar("measuring", options["quiet"], lambda tokens: f"{tokens} tokens")
        self._predictor: Predictor | None = None
        self._plans: list[tuple[MemoryPlan, int | None]] = []
        """Of every configuration so far, with the most memory that it took."""

    @property
    def _tokens(self) -> int:
        tokens: int = self._options["n_prompt"] + self._options["n_gen"]
        return tokens

    def _with(self, config: Configuration) -> Options:
        return {**self._options, **config.settings}

    def _source(self, model: Name, config: Configuration) -> Source:
        source = find_model(model, self._with(config))
        if config.experts == "3bit":
            source.refuse_without_3bit(self._layout)
        return source

    def _context(self, source: Source) -> int:
        """As asked for, or just what is needed."""
        asked, needed = self._options["ctx_size"], self._tokens
        layout = source.layout(self._layout)
        most = family(layout.model_type).shape(layout.config).max_position_embeddings
        what = f"-p {self._options['n_prompt']} and -n {self._options['n_gen']} are {needed} tokens"
        if needed > most:
            raise UsageError(f"{what}, but this model's context ends at {most}; give fewer")
        if asked is not None and asked < needed:
            raise UsageError(f"{what}, more than the context of {asked}; leave --ctx-size out")
        return asked or needed

    def rows(self) -> Iterator[Row]:
        """Those of all configurations, as they come."""
        for config in self._configs:
            plan = plan_for(self._sources[config.experts], config.cap_nbytes, self._with(config))
            if plan.feasible:
                yield from self._measured(config, plan)
                continue
            self._plans.append((plan, None))
            row = refused(config, plan, compute_threads(config.threads))
            if not self._options["quiet"]:
                self.bar.clear()
                note(f"{format_size(config.cap_nbytes)} does not fit: {row['reason']}")
            yield row

    def _measured(self, config: Configuration, plan: MemoryPlan) -> list[Row]:
        store = self._store(config)
        request = {
            "model": self._sources[config.experts].argument,
            "cap_nbytes": config.cap_nbytes,
            "settings": engine_settings(self._with(config)),
            "prompt_tokens": self._options["n_prompt"],
            "tokens": self._options["n_gen"],
            "repetitions": self._options["repetitions"],
            "seed": self._options["seed"],
        }
        probe: dict[str, Any] | None = None
        if not self._options["no_limits"]:
            threads = 0 if self.backend == "mlx" else compute_threads(config.threads)
            free = read_machine().free_nbytes
            probe = limits_request(store.path, config, plan, threads, free)
        found, limits = measured(request, config, probe, self._tick)
        self._before += self._each
        self._plans.append((plan, found["peak_nbytes"]))
        rows = rows_of(config, plan, found, limits)
        for row in rows:
            row["predicted"] = self._predicted(config, plan, row, limits)
        return rows

    def _predicted(
        self, config: Configuration, plan: MemoryPlan, row: Row, limits: Limits | None
    ) -> dict[str, Any] | None:
        """What would have been said of the tokens beforehand, and how wrong it is; of prompts
        nothing is said. The disk is the one that was measured beside them."""
        if limits is None or self._options["no_predict"] or row["token_s"] is None:
            return None
        source, options = self._sources[config.experts], self._with(config)
        if self._predictor is None:
            depth = self._options["n_prompt"] + self._options["n_gen"] // 2
            self._predictor = Predictor(self.backend, max(1, depth), self._options["quiet"])
        self.bar.clear()
        found = self._predictor.predicted(source, plan, options, limits.disk[1])
        return {**found, "error": found["tps"] / row["tps"] - 1}

    def _store(self, config: Configuration) -> Store:
        """Made before anything is measured, where it is not there."""
        if (store := self._stores.get(config.experts)) is None:
            source = self._sources[config.experts].brought(0, DownloadBar(self._options["quiet"]))
            bar = ProgressBar(source.making, self._options["quiet"])
            store = source.make(self._layout, config.experts, bar)
            self._stores[config.experts], self._sources[config.experts] = store, source
        return store

    def _tick(self, done: int) -> None:
        self.bar(self._before + done, self._each * len(self._configs))

    def judge(self) -> None:
        """Raise where nothing fitted, or where something took more than its cap."""
        took = [(plan, peak) for plan, peak in self._plans if peak is not None]
        if not took:
            smallest = min(plan.min_cap_nbytes for plan, _ in self._plans)
            raise PlanError(f"no cap fits: the smallest that opens is {smallest}B")
        for plan, peak in took:
            check_cap({"peak_nbytes": peak, "plan": {"cap_nbytes": plan.cap_nbytes}})

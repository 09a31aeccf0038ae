"""``aegis eval``: perplexity of a model on a text, and how far another one is from it."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aegis.cli.options import (
    DEFAULT_CAP_HELP,
    Options,
    Whole,
    cap_option,
    engine_options,
    engine_settings,
    json_option,
    noted_caps,
    quiet_option,
    verbose_option,
)
from aegis.cli.plan import find_model
from aegis.cli.progress import DownloadBar, ProgressBar
from aegis.cli.report import (
    SCHEMA_VERSION,
    check_cap,
    note,
    note_fallback,
    note_ledger,
    print_json,
)
from aegis.cli.source import Request as Asked
from aegis.cli.source import resolve_model
from aegis.errors import PlanError, UsageError
from aegis.settings import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from aegis.engine.comparison import Distance
    from aegis.engine.engine import Engine
    from aegis.engine.evaluate import Likelihood
    from aegis.engine.planning import Request
    from aegis.engine.sources import Name, Source

DEFAULT_TOKENS = 2048
_TEXT = "perplexity.txt"
_TOKEN_NBYTES = 16
"""Of a text; none that has more bytes per token is read further."""


@dataclass
class _Side:
    """One of the two models; its part of ``--json`` fills while it runs."""

    letter: str
    model: Name
    source: Source
    options: Options
    request: Request
    result: dict[str, Any] = field(default_factory=dict)
    free_nbytes: int = 0
    """What the cap leaves before anything is loaded."""

    @contextmanager
    def opened(self) -> Iterator[Engine]:
        """The engine, at the cap; what it is and took goes to stderr.

        Raises:
            CapExceededError: the process took more than the cap.
        """
        from aegis.cli.answer import open_engine
        from aegis.engine.memory import peak_nbytes

        asked = Asked(self.model, None)
        with open_engine(asked, self.request.settings.cap_nbytes, self.options, None) as engine:
            if not self.options["quiet"]:
                note(f"{self.letter}: {engine.name}: {engine.describe()}")
            yield engine
            named = {name: self.options[name] for name in ("experts", "activations")}
            self.result |= {"model": engine.name, "backend": engine.backend, **named}
            self.result |= {"plan": engine.plan.to_json(), "peak_nbytes": peak_nbytes()}
            if self.options["verbose"]:
                note_ledger(engine.ledger())
        check_cap(self.result)

    def tokenizer_folder(self) -> Path:
        """Where its tokenizer is, once the model is downloaded or, if it is random, written."""
        from aegis.engine.planning import store_nbytes

        quiet = self.options["quiet"]
        self.source = self.source.brought(store_nbytes(self.request), DownloadBar(quiet))
        if self.source.folder is not None:
            return self.source.folder
        bar, layout = ProgressBar(self.source.making, quiet), self.request.layout.layout
        return self.source.make(layout, self.options["experts"], bar).path

    def note_likelihood(self, found: Likelihood) -> None:
        """Keep what was measured."""
        self.result |= {"perplexity": found.perplexity, "mean_nll": found.mean_nll}

    def line(self) -> str:
        """For people."""
        what = f"{self.result['model']}, {self.result['experts']} experts"
        if self.result["activations"] != "auto":
            what += f", {self.result['activations']}"
        figures = f"perplexity {self.result['perplexity']:.4f}"
        return f"{self.letter}  {figures}  mean nll {self.result['mean_nll']:.5f}  {what}"


@click.command("eval", short_help="Perplexity of a model, and how far another one is from it.")
@click.argument("a", required=False, metavar="[A]")
@click.argument("b", required=False, metavar="[B]")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, allow_dash=False),
    metavar="FILE",
    help="The text, in UTF-8. [default: 2000 tokens that come with aegis]",
)
@click.option(
    "-n",
    "--tokens",
    type=Whole(min=2),
    default=DEFAULT_TOKENS,
    show_default=True,
    metavar="N",
    help="Tokens of the text to take at most.",
)
@click.option(
    "--stride",
    type=Whole(min=1),
    metavar="N",
    help="Tokens from one window of the context to the next. [default: half of the context]",
)
@click.option(
    "--experts-b", type=click.Choice(["4bit", "3bit"]), help="Expert files of B. [default: of A]"
)
@click.option(
    "--activations-b",
    type=click.Choice(["auto", "f32", "bf16", "f16"]),
    help="Numbers that B computes in. [default: of A]",
)
@cap_option(f"Memory cap, as 4GiB or 512MiB; each of the two has all of it. {DEFAULT_CAP_HELP}")
@engine_options
@json_option
@quiet_option
@verbose_option
def command(a: str | None, b: str | None, **options: Any) -> int:
    """Perplexity of A (the embedded model if absent) on a text; with B also how far B is from A.

    How far: the KL divergence of B's predictions from A's, and how often both find the same token
    most likely. B is A where only an option of B's is given: ``aegis eval --experts-b 3bit``
    compares the 3-bit experts of the embedded model with its 4-bit ones.

    The text is computed in windows of the context, each afresh, and every token but the first is
    predicted once. A and B run one after the other; A's logits are kept in a file without a name
    beside the cache, 4 bytes for each token of the text and of the vocabulary.
    """
    from aegis.engine.evaluate import refuse_stride

    note_fallback(options)
    choice = noted_caps(options)
    own = {name: options.pop(f"{name}_b") for name in ("experts", "activations")}
    asked = {name: value for name, value in own.items() if value is not None}
    models = [resolve_model(a)]
    if b is not None or asked:
        models.append(models[0] if b is None else resolve_model(b))
    sides = _sides(models, options, asked, choice.single)
    context = sides[0].request.context
    options["stride"] = options["stride"] or max(1, context // 2)
    refuse_stride(options["stride"], context)
    _run(sides, _ids(sides, options), options)
    return 0


def _ids(sides: list[_Side], options: Options) -> list[int]:
    """The text as ids, the same to every model.

    Raises:
        UsageError: it is not, or there is too little or too much of it.
    """
    from aegis.engine.engine import ENCODING_NBYTES
    from aegis.text.tokenizer import Tokenizer

    room = min(side.free_nbytes for side in sides) // ENCODING_NBYTES
    text = _read_text(options["text"], options["tokens"], room)
    found: list[list[int]] = []
    for folder in dict.fromkeys(side.tokenizer_folder() for side in sides):
        ids = Tokenizer.open(folder).encode(text)[: options["tokens"]]
        if found and ids != found[0]:
            raise UsageError(
                f"{sides[0].source.name} and {sides[1].source.name} have different tokenizers,"
                " which make other tokens of the text, so that their predictions cannot be"
                " compared; give stores of one model"
            )
        found.append(ids)
    if len(found[0]) < 2:
        raise UsageError(
            f"the text has {len(found[0])} tokens; give one of at least 2, so that there is one to"
            " predict"
        )
    return found[0]


def _read_text(path: str | None, tokens: int, room: int) -> str:
    """As much of the text as so many tokens can be; UsageError if that is more than ``room``."""
    from aegis.convert.cache import embedded_path

    file, limit = Path(path) if path else embedded_path() / _TEXT, tokens * _TOKEN_NBYTES
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    try:
        with file.open("rb") as stream:
            data = stream.read(min(limit, room) + 1)
        if len(data) > room:
            raise UsageError(
                f"encoding more than {room} bytes of text at once takes more than the cap leaves;"
                " take fewer tokens (-n) or a larger cap"
            )
        return decoder.decode(data[:limit], final=len(data) <= limit)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the text {file} cannot be read as UTF-8: {error}") from None


def _sides(models: list[Name], options: Options, asked: Options, cap_nbytes: int) -> list[_Side]:
    """The models with their plans, before anything is computed.

    Raises:
        PlanError: one of them does not fit the cap.
        UsageError: their vocabularies differ.
    """
    sides = []
    for letter, model, change in zip("AB", models, ({}, asked), strict=False):
        chosen = {**options, **change, "chat_template": None}
        source = find_model(model, chosen)
        request = _request(source, cap_nbytes, chosen)
        sides.append(_Side(letter, model, source, chosen, request))
    shapes = [side.request.shape for side in sides]
    sizes = [shape.vocab_size for shape in shapes]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"{sides[0].source.name} has a vocabulary of {sizes[0]} tokens and"
            f" {sides[1].source.name} one of {sizes[1]}, so that their predictions cannot be"
            " compared; give stores of one model"
        )
    limits = [shape.max_position_embeddings for shape in shapes]
    context = options["ctx_size"] or min(DEFAULT_CONTEXT, options["tokens"] - 1, *limits)
    for side in sides:
        side.options["ctx_size"] = context
        side.request = _request(side.source, cap_nbytes, side.options)
        _refuse(side)
    return sides


def _request(source: Source, cap_nbytes: int, options: Options) -> Request:
    from aegis.engine.planning import choose_backend, resolve
    from aegis.settings import Settings

    try:
        settings = Settings(cap_nbytes=cap_nbytes, **engine_settings(options))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return resolve(source, settings, choose_backend(settings.backend))


def _refuse(side: _Side) -> None:
    """What opening would refuse, before the other model has run for minutes."""
    from aegis.engine.planning import request_plan

    plan = request_plan(side.request)
    if not plan.feasible:
        raise PlanError(plan.refusal())
    side.free_nbytes = plan.cap_nbytes - dict(plan.items)["runtime"]
    if side.options["experts"] == "3bit":
        side.source.refuse_without_3bit(side.request.layout.layout)


def _run(sides: list[_Side], ids: list[int], options: Options) -> None:
    from aegis.convert.cache import cache_folder
    from aegis.engine.evaluate import compare, likelihood

    request, stride = sides[0].request, options["stride"]
    bars = [ProgressBar(side.letter, options["quiet"], str) for side in sides]
    distance = None
    if len(sides) == 1:
        with sides[0].opened() as engine:
            found = [likelihood(engine, ids, stride, bars[0])]
    else:
        *found, distance = compare(
            sides[0].opened,
            sides[1].opened,
            ids,
            stride,
            request.shape.vocab_size,
            cache_folder(),
            (bars[0], bars[1]),
        )
    for side, figures in zip(sides, found, strict=True):
        side.note_likelihood(figures)
    if options["as_json"]:
        where = {"text": options["text"], "tokens": len(ids)}
        cut = {"context": request.context, "stride": stride}
        models = {side.letter.lower(): side.result for side in sides}
        head = {"schema_version": SCHEMA_VERSION, **where, **cut, "a": None, "b": None, **models}
        print_json(head | ({} if distance is None else distance.to_json()))
        return
    click.echo(
        f"{len(ids)} tokens of {options['text'] or 'the text of aegis'} in windows of"
        f" {request.context}, each {stride} behind the one before"
    )
    for side in sides:
        click.echo(side.line())
    if distance is not None:
        _show(distance)


def _show(distance: Distance) -> None:
    percentiles = ", ".join(f"{at} % {kl:.4f}" for at, kl in distance.percentiles.items())
    click.echo(
        f"KL of B from A  mean {distance.mean:.4f}, median {distance.median:.4f}, {percentiles},"
        f" most {distance.most:.4f}"
    )
    click.echo(
        f"top-1 the same at {100 * distance.top1:.2f} %, of the top 20"
        f" {100 * distance.top20:.2f} % shared"
    )

"""Where the time of a pass goes: clocks around the blocks of an open model, while a bench asks.

Outside of a ``Timing`` that is entered nothing is measured and nothing is in the way. Inside, each
call of a block costs about 0.2 us more. Where a backend queues its calls (``mlx``), a clock around
one would measure how long queueing takes: there only the waiting for reads is told.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aegis.engine.embedding import DiskEmbedding
from aegis.models.base import DecoderLayer, MoeBlocks

if TYPE_CHECKING:
    from aegis.engine.forward import Embed
    from aegis.engine.opening import Opened
    from aegis.models.base import Decoder


@dataclass(slots=True)
class Spent:
    """Seconds by what they went into; what a wall clock shows beyond them is the rest."""

    attention: float = 0.0
    """Attention, what takes its place, and MLPs of layers without experts."""
    experts: float = 0.0
    """Routed and shared ones."""
    router: float = 0.0
    """With the guess for the next layer."""
    head: float = 0.0
    """Final norm, logits, and the embedding where the table is in memory."""
    wait: float = 0.0
    """Waiting for reads: of experts, and of the embedding's rows where these are on disk."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.attention + self.experts + self.router + self.head + self.wait

    def since(self, before: Spent) -> Spent:
        """What was spent after ``before``."""
        names = [field.name for field in fields(self)]
        return Spent(*(getattr(self, name) - getattr(before, name) for name in names))


class _Timed:
    """Calls through, adding the seconds to one of the parts."""

    __slots__ = ("_inner", "_part", "_spent")

    def __init__(self, inner: Any, part: str, spent: Spent) -> None:
        self._inner, self._part, self._spent = inner, part, spent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter()
        try:
            return self._inner(*args, **kwargs)
        finally:
            spent, part = self._spent, self._part
            setattr(spent, part, getattr(spent, part) + perf_counter() - begin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _TimedExperts(_Timed):
    """The same for experts that come one after the other."""

    __slots__ = ("add", "begin", "finish")

    def __init__(self, inner: Any, spent: Spent) -> None:
        super().__init__(inner, "experts", spent)
        self.begin = _Timed(inner.begin, "experts", spent)
        self.add = _Timed(inner.add, "experts", spent)
        self.finish = _Timed(inner.finish, "experts", spent)


class Timing:
    """Clocks around the blocks of an open model, while it is entered."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._spent = Spent()
        self._blocks: tuple[Decoder, Embed] | None = None
        """What the model goes through when nobody looks."""

    @property
    def has_blocks(self) -> bool:
        """Whether calls of blocks return when they are done, so that a clock says anything."""
        return self._opened.backend.queue is None

    def __enter__(self) -> Timing:
        if self.has_blocks:
            forward = self._opened.forward
            self._blocks = decoder, embed = forward.blocks
            part = "wait" if isinstance(embed, DiskEmbedding) else "head"
            timed = replace(
                decoder,
                layers=[self._layer(layer) for layer in decoder.layers],
                head=_Timed(decoder.head, "head", self._spent),
            )
            self._opened.decoder = timed
            forward.blocks = timed, _Timed(embed, part, self._spent)
        return self

    def _layer(self, layer: DecoderLayer) -> DecoderLayer:
        spent, mlp = self._spent, layer.mlp
        attention = _Timed(layer.attention, "attention", spent)
        if not isinstance(mlp, MoeBlocks):
            return replace(layer, attention=attention, mlp=_Timed(mlp, "attention", spent))
        router = _Timed(mlp.router, "router", spent)
        moe = replace(mlp, router=router, experts=_TimedExperts(mlp.experts, spent))
        return replace(layer, attention=attention, mlp=moe)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._blocks is not None:
            self._opened.forward.blocks = self._blocks
            self._opened.decoder = self._blocks[0]
            self._blocks = None

    @property
    def spent(self) -> Spent:
        """Seconds of each part so far, with all that the tiers have waited since they count."""
        return replace(
            self._spent, wait=self._spent.wait + self._opened.tiers.stats.totals().wait_s
        )

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return self._opened.request.threads

    @property
    def record_nbytes(self) -> int:
        """What one read brings for an expert."""
        return self._opened.files.stride

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one read was under way, since the model was opened."""
        return self._opened.tiers.busy_s

    def touched_nbytes(self, position: float, experts: float) -> float:
        """What computing one token reads of memory at least: resident weights (but for an embedding
        table that no head is tied to), so many chosen experts, the keys and values of ``position``
        tokens, the recurrent states."""
        request = self._opened.request
        layout, shape = request.layout, request.shape
        unread = () if shape.tie_word_embeddings else {"embed_tokens"}
        resident = layout.resident_nbytes(unread)
        records = experts * layout.geometry(request.settings.experts).record_nbytes
        cached = self._opened.backend.kv_nbytes(request.kv_spec) / request.context * position
        # Half of a state's bytes are the copy that is kept.
        delta = shape.delta
        states = 0 if delta is None else self._opened.backend.recurrent_nbytes(delta) // 2
        kept = cached * shape.num_attention_layers + states * len(shape.delta_layers)
        return resident + records + kept

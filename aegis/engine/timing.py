"""Where the time of a pass goes: clocks around the blocks of an open model, while a bench asks.

Outside of a ``Timing`` that is entered nothing is measured and nothing is in the way. Inside, each
call of a block costs about 0.3 us more. Where a backend queues its calls (``mlx``), a clock around
one would measure how long Python takes to describe it: there the queue's own clocks are told, of
handing calls over and of waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aegis.engine.embedding import DiskEmbedding
from aegis.models.base import DecoderLayer, MoeBlocks

if TYPE_CHECKING:
    from aegis.engine.forward import Embed
    from aegis.engine.opening import Opened
    from aegis.kernels.base import ExpertsBlock
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
    queue: float = 0.0
    """Handing calls to the device, where they queue."""
    device: float = 0.0
    """Waiting for the device, there."""

    @property
    def total(self) -> float:
        """All of them."""
        blocks = self.attention + self.experts + self.router + self.head
        return blocks + self.wait + self.queue + self.device

    def since(self, before: Spent) -> Spent:
        """What was spent after ``before``."""
        names = [field.name for field in fields(self)]
        return Spent(*(getattr(self, name) - getattr(before, name) for name in names))


_EXPERTS, _ROUTER, _HEAD, _WAIT, _LAYERS = range(5)
"""Places of the parts in a list, which is quicker to add to than attributes; from the last on, each
layer's attention and MLP."""


def _timed(call: Callable[..., Any], seconds: list[float], part: int) -> Any:
    """The same call, adding what it takes to one of the parts."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = perf_counter()
        result = call(*args, **kwargs)
        seconds[part] += perf_counter() - begin
        return result

    return timed


class _TimedExperts:
    """The same for experts, which may come one after the other."""

    __slots__ = ("_call", "add", "begin", "finish", "unordered_rows")

    def __init__(self, inner: ExpertsBlock, seconds: list[float]) -> None:
        self._call = _timed(inner, seconds, _EXPERTS)
        self.begin = _timed(inner.begin, seconds, _EXPERTS)
        self.add = _timed(inner.add, seconds, _EXPERTS)
        self.finish = _timed(inner.finish, seconds, _EXPERTS)
        self.unordered_rows = inner.unordered_rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class Timing:
    """Clocks around the blocks of an open model, while it is entered."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        layers = opened.request.shape.num_hidden_layers
        self._seconds = [0.0] * (_LAYERS + 2 * layers)
        self._blocks: tuple[Decoder, Embed] | None = None
        """What the model goes through when nobody looks."""

    @property
    def has_blocks(self) -> bool:
        """Whether calls of blocks return when they are done, so that clocks around them say
        anything."""
        return self._opened.backend.queue is None

    def __enter__(self) -> Timing:
        if self.has_blocks:
            forward = self._opened.forward
            self._blocks = decoder, embed = forward.blocks
            part = _WAIT if isinstance(embed, DiskEmbedding) else _HEAD
            timed = replace(
                decoder,
                layers=[self._layer(*layer) for layer in enumerate(decoder.layers)],
                head=_timed(decoder.head, self._seconds, _HEAD),
            )
            self._opened.decoder = timed
            forward.blocks = timed, _timed(embed, self._seconds, part)
        return self

    def _layer(self, index: int, layer: DecoderLayer) -> DecoderLayer:
        seconds, mlp, part = self._seconds, layer.mlp, _LAYERS + 2 * index
        attention = _timed(layer.attention, seconds, part)
        if not isinstance(mlp, MoeBlocks):
            return replace(layer, attention=attention, mlp=_timed(mlp, seconds, part + 1))
        router = _timed(mlp.router, seconds, _ROUTER)
        moe = replace(mlp, router=router, experts=_TimedExperts(mlp.experts, seconds))
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
        experts, router, head, rows, *layers = self._seconds
        attention = sum(layers)
        waited = self._opened.tiers.stats.totals().wait_s
        queue = self._opened.backend.queue
        queued, device = (0.0, 0.0) if queue is None else queue.spent()
        return Spent(attention, experts, router, head, rows + waited, queued, device)

    @property
    def layers_s(self) -> list[tuple[float, float]]:
        """Seconds so far of each layer's attention (or what takes its place) and, where it has no
        experts, of its MLP."""
        layers = self._seconds[_LAYERS:]
        return list(zip(layers[::2], layers[1::2], strict=True))

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

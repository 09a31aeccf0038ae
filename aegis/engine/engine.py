"""Engine: one model, open under a cap."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np

from aegis.engine.comparison import nll
from aegis.engine.logits_room import LogitsRoom
from aegis.engine.lookahead import Lookahead
from aegis.engine.opening import Opened, open_model
from aegis.engine.planning import settings_for
from aegis.engine.timing import Timing
from aegis.engine.token_ids import refuse_no_ids, token_array, whole
from aegis.engine.tracing import Tracing
from aegis.engine.turn import Turn, in_turn
from aegis.errors import AegisError, UsageError
from aegis.planner import format_size
from aegis.settings import LOGIT_ROWS
from aegis.tiers.errors import TiersError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aegis.checkpoint.store import Store
    from aegis.engine.sampling import Sampler
    from aegis.engine.sources import Model
    from aegis.hub.remote import OnDownload
    from aegis.planner import LedgerRow, MemoryPlan
    from aegis.text.tokenizer import Tokenizer
    from aegis.tiers.stats import TierStats

Visit = Callable[[int, "NDArray[np.float32]"], object]
"""Takes a position and its logits."""

_SHORT = 2
"""Characters per token of the context that are no trouble, whatever they are."""
_USUAL = 8
"""No text has more characters per token; runs of blanks have, and take more than is planned."""
ENCODING_NBYTES = 160
"""What encoding takes for a moment per character of such a text; 90 to 130 were measured."""
_PIECE = 1 << 14
"""Characters of a long text that are counted at once."""


class Engine:
    """A model that is open: computes logits, likelihoods and tokens inside its memory plan.

    One sequence at a time: several threads may use it, each call waits for the one before. Close
    it, or use it as a context manager; one that is dropped is closed. After a failed or interrupted
    call it is as it was before.
    """

    def __init__(self, opened: Opened) -> None:
        """Use ``Engine.open``."""
        self._opened = opened
        self._cached = array("i")
        self._closed = False
        self._unsound = False
        """An interruption left the books of slots and reads in disorder."""
        queue = opened.backend.queue
        self.turn = Turn() if queue is None else Turn(queue.stream)
        """Hold it to make several calls one, as far as other threads can tell."""
        self._room = LogitsRoom(opened)
        self._look = Lookahead(opened.forward, queue)
        self._recurrence = opened.recurrence
        # One that is dropped closes itself. Not when the interpreter ends: all ends then.
        self._dropped = weakref.finalize(self, _close, opened, self.turn)
        self._dropped.atexit = False

    @classmethod
    def open(
        cls,
        path: Model = None,
        *,
        cap: str | int = "4GiB",
        progress: Callable[[int, int], None] | None = None,
        on_plan: Callable[[MemoryPlan], None] | None = None,
        on_download: OnDownload | None = None,
        **options: Any,
    ) -> Engine:
        """Open a store, or a checkpoint folder, which is converted into the cache first, or a model
        of the Hugging Face hub, which is downloaded before.

        Args:
            path: folder, or as text ``ORG/NAME`` or ``ORG/NAME@REVISION`` on the hub, or
                ``synthetic:SHAPE``; None is the embedded model. See ``aegis.engine.sources``.
            cap: the memory cap, as bytes or as text such as ``"200MiB"``.
            progress: called with (done, total) bytes while converting.
            on_plan: called with the plan before anything large is downloaded or allocated.
            on_download: called with (done, total, sentence) while downloading: bytes, and what goes
                where.
            options: fields of ``aegis.settings.Settings``: backend, context, experts, bits and
                group_size (of a plain checkpoint, quantised to 4 bits otherwise), embedding,
                policy, guess, guess_width, io_threads, threads, prefill_step, max_slots,
                activations; ``device_cap``, as bytes or text: what may lie in the memory of an
                NVIDIA GPU, while ``cap`` is for the host alone.

        Raises:
            PlanError: the plan does not fit; nothing was allocated.
            UsageError, HubError, CheckpointError, StoreError, TokenizerError, BackendError: as they
            say.
        """
        settings = settings_for(cap, options)
        return cls(open_model(path, settings, progress, on_plan, on_download))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "an Engine holds memory, threads and open files, so that it cannot be copied or"
            " pickled; open the model again where it is needed"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading, stop computing and give all memory back.

        Out of a signal's handler that interrupts a call: when that call has ended.
        """
        if self._closed:
            return
        if not self.turn.here:
            self._closed = True
            self._dropped.detach()
            self._opened.close_in_child()
            return
        with self.turn.lock:
            if self._closed:
                return
            self._closed = True
            self._dropped.detach()
            if self.turn.under_way:
                self.turn.afterwards(self._opened.close)
            else:
                self._opened.close()

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan this engine was opened with."""
        return self._opened.plan

    @property
    def context(self) -> int:
        """Positions the KV cache holds."""
        return self._opened.request.context

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._opened.tokenizer

    @property
    def store(self) -> Store:
        """The converted store the model was opened from."""
        return self._opened.store

    @property
    def arena_nbytes(self) -> int:
        """What holds weights, caches, scratch and slots: a region, or the backend's own memory."""
        own = self._opened.backend.memory
        return self._opened.arena.nbytes + (0 if own is None else sum(own.measured().values()))

    @property
    def name(self) -> str:
        """The model's name: its folder's."""
        return self._opened.name

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._opened.request.backend

    def describe(self) -> str:
        """Backend, threads, reads and pages in one line for people."""
        return self._opened.describe()

    @property
    def stats(self) -> TierStats:
        """Hits, misses, late and wasted guesses, bytes read and waits, per layer and phase."""
        if self._opened.forward.has_uncounted and self.turn.here:
            with self.turn.lock:
                # In a signal's handler that interrupts a call: what is counted so far.
                if not self.turn.under_way:
                    self._guarded(self._opened.forward.count)
        return self._opened.tiers.stats

    def ledger(self) -> list[LedgerRow]:
        """Planned against measured, per item, now."""
        return self._opened.ledger()

    def cached_prefix(self, ids: Sequence[int]) -> int:
        """How many leading tokens of ``ids`` the KV cache already holds."""
        count = 0
        for cached, wanted in zip(self._cached, ids, strict=False):
            if cached != wanted:
                break
            count += 1
        return count

    def uncached(self, ids: Sequence[int]) -> int:
        """How many tokens of ``ids`` feeding them would compute: at least the last, and where
        layers have recurrent states, what lies behind the copy of them."""
        start = min(self.cached_prefix(ids), max(len(ids) - 1, 0))
        return len(ids) - self._recurrence.reachable(start)

    @in_turn
    def feed(self, ids: Sequence[int]) -> Any:
        """Compute ``ids`` and return the last token's hidden state, reusing a cached prefix.

        The last token is always computed, so that there is a state to return; it is valid until
        the next call.
        """
        return self._feed(ids)

    def tracing(self) -> Tracing:
        """A context in which the routing of every token that is decoded is recorded."""
        self._check_open()
        return Tracing(self._opened)

    def timing(self) -> Timing:
        """A context in which it is measured where the time goes."""
        self._check_open()
        return Timing(self._opened)

    def _feed(self, ids: Sequence[int]) -> Any:
        self._check_open()
        refuse_no_ids(ids)
        if 1 < len(ids) == len(self._cached) + 1 and self._cached == token_array(ids[:-1]):
            return self._feed_token(ids[-1])
        ids = self._check(ids)
        start = min(self.cached_prefix(ids), len(ids) - 1)
        hidden = [chunk[-1:] for chunk, _ in self._hidden(ids, start)]
        return hidden[-1]

    @in_turn
    def feed_token(self, token: int) -> Any:
        """Compute one more token behind everything cached; its hidden state [1, H]."""
        self._check_open()
        return self._feed_token(token)

    def _feed_token(self, token: int) -> Any:
        token = self._checked_token(token)
        if len(self._cached) >= self.context:
            raise UsageError(f"the context of {self.context} tokens is full; open a longer one")
        self._catch_up(len(self._cached))
        hidden = self._guarded(self._recurrence.moving, len(self._cached) + 1, self._decoded, token)
        self._cached.append(token)
        return hidden

    def _decoded(self, token: int) -> Any:
        ahead = self._look.take(token)
        return self._opened.forward.decode(token, len(self._cached)) if ahead is None else ahead

    def _catch_up(self, position: int) -> None:
        """Compute what recurrent states lack of the cached tokens, where a pass before failed."""
        if not self._recurrence.are_behind(position):
            for _ in self._hidden(self._cached.tolist(), position):
                pass

    @in_turn
    def next_token(self, ids: Sequence[int], sampler: Sampler, more: bool = False) -> int:
        """The token that a sampler chooses behind ``ids``.

        more: another is likely to be asked for behind it. Where the backend queues and the choice
        is greedy, that one is computed while the caller looks at this one.
        """
        hidden = self._feed(ids)
        if self._look.can_choose and sampler.is_greedy:
            position = len(self._cached)
            begin = position if more and position < self.context else None
            token = int(self._guarded(self._look.choose, hidden, begin))
            if token >= 0:
                return token
        return sampler.sample(self._logits(hidden)[0], ids)

    @in_turn
    def logits(self, hidden: Any) -> NDArray[np.float32]:
        """Logits of hidden states [T, H], T <= LOGIT_ROWS; valid until the next call."""
        self._check_open()
        return self._logits(hidden)

    @np.errstate(all="ignore")
    def _logits(self, hidden: Any) -> NDArray[np.float32]:
        return self._opened.decoder.head(hidden)

    @in_turn
    def score(self, ids: Sequence[int], last: int | None = 1) -> NDArray[np.float32]:
        """Logits float32 [last, vocab_size] of the last positions; None: of all of them.

        Raises:
            UsageError: the array, which is the caller's, does not fit what the plan leaves.
        """
        ids = self._check(ids)
        rows = len(ids) if last is None else whole(last, "last")
        if not 1 <= rows <= len(ids):
            raise UsageError(f"last is {last}; with {len(ids)} tokens it can be 1 to {len(ids)}")
        vocab_size = self._opened.request.shape.vocab_size
        out: NDArray[np.float32] = self._guarded(self._room.array, rows, vocab_size)
        first = len(ids) - rows
        self._visit(ids, first, lambda at, logits: out.__setitem__(at - first, logits))
        return out

    @in_turn
    def nll(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """-ln p(ids[t + 1] | ids[..t]) as float32 [len(ids) - 1]."""
        ids = self._check(ids)
        out = np.empty(len(ids) - 1, np.float32)

        def note(at: int, logits: NDArray[np.float32]) -> None:
            if at + 1 < len(ids):
                out[at] = nll(logits, ids[at + 1])

        self._visit(ids, 0, note)
        return out

    @in_turn
    def visit_logits(self, ids: Sequence[int], first: int, visit: Visit) -> None:
        """Call ``visit(t, logits)`` for every position t from ``first`` on.

        Logits are float32 [vocab_size] of what follows ids[t], valid during the call, which must
        not use the engine.
        """
        self._visit(self._check(ids), first, visit)

    def _visit(self, ids: Sequence[int], first: int, visit: Visit) -> None:
        with closing(self._hidden(ids, 0)) as chunks:
            for hidden, start in chunks:
                for row in range(max(first - start, 0), len(hidden), LOGIT_ROWS):
                    for offset, logits in enumerate(self._logits(hidden[row : row + LOGIT_ROWS])):
                        visit(start + row + offset, logits)

    def generate(
        self,
        ids: Sequence[int],
        max_tokens: int = 256,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        sampler: Sampler | None = None,
        **sampling: Any,
    ) -> Iterator[int]:
        """Tokens after ``ids``, one at a time; ends before an end token or at the context.

        Args:
            temperature: 0 is greedy. ``sampling``: top_p, top_k, min_p, seed, repeat_penalty.
            sampler: takes the place of all of these.
        """
        from aegis.engine.generate import stream
        from aegis.engine.sampling import choose_sampler

        sampler = choose_sampler(sampler, {"temperature": temperature, **sampling})
        for step in stream(self, ids, max_tokens, sampler, ignore_eos=ignore_eos):
            if step.token is not None:
                yield step.token

    def _check(self, ids: Sequence[int]) -> list[int]:
        """The ids as whole numbers that the vocabulary and the context have room for."""
        self._check_open()
        refuse_no_ids(ids)
        if not len(ids):
            raise UsageError("there are no tokens to compute; give at least one")
        if len(ids) > self.context:
            raise self.too_long(len(ids))
        return [self._checked_token(token) for token in ids]

    def too_long(self, tokens: int, about: bool = False) -> UsageError:
        """What to tell someone whose prompt does not fit the context."""
        limit = self._opened.request.shape.max_position_embeddings
        remedy = f"this model's context ends at {limit}, so give a shorter one"
        if tokens <= limit:
            remedy = f"open the model with a context of at least {tokens} (--ctx-size {tokens})"
        return UsageError(
            f"{'about ' * about}{tokens} tokens do not fit the context of {self.context}; {remedy}"
        )

    def refuse_far_too_long(self, texts: Sequence[str]) -> None:
        """Before encoding it whole takes more memory than the plan has for a prompt.

        Counts in pieces, and no further than is needed to be sure.

        Raises:
            UsageError: together the texts are more than twice as long as the context, or encoding
                them takes more than the cap leaves without the hot tier (long runs of blanks).
        """
        length = sum(map(len, texts))
        if length <= _SHORT * self.context:
            return
        about = seen = 0
        for text in texts:
            for at in range(0, len(text), _PIECE):
                piece = text[at : at + _PIECE]
                about += self.tokenizer.estimate(piece)
                seen += len(piece)
                if about > 4 * self.context:
                    raise self.too_long(about * length // seen, about=True)
        if about > 2 * self.context:
            raise self.too_long(about, about=True)
        if length > _USUAL * self.context:
            self._make_room(length * ENCODING_NBYTES)

    @in_turn
    def _make_room(self, nbytes: int) -> None:
        """Let slots go for what is taken for a moment; the next prompt takes them again."""
        governor = self._opened.governor
        if nbytes > governor.room():
            self._guarded(self._opened.tiers.release_nbytes, nbytes - governor.room())
        short = nbytes - governor.room()
        if short > 0:
            raise UsageError(
                f"encoding this prompt takes {format_size(nbytes)} for a moment, which is"
                f" {format_size(short)} more than the cap leaves; give a shorter prompt or a larger"
                " cap"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise AegisError("the engine is closed; open it again")

    def _checked_token(self, token: int) -> int:
        vocab_size = self._opened.request.shape.vocab_size
        wanted = whole(token)
        if not 0 <= wanted < vocab_size:
            raise UsageError(f"token id {wanted} is outside the vocabulary of {vocab_size}")
        return wanted

    def _hidden(self, ids: Sequence[int], start: int) -> Generator[tuple[Any, int], None, None]:
        """Compute ids[start:] in chunks; yields (hidden [T, H], absolute position of its first).

        Where layers have recurrent states it may begin before ``start``.
        """
        self._guarded(self._begin_prompt)
        start = self._guarded(self._recurrence.resume, start)
        del self._cached[start:]
        step, tiers = self.plan.prefill_step, self._opened.tiers
        if len(ids) - start == 1:
            yield self._feed_token(ids[start]), start
            return
        self._guarded(tiers.begin_prefill)
        try:
            begin = start
            while begin < len(ids):
                # On a grid of absolute positions: some backends' bits depend on a chunk's rows.
                end = min(len(ids), (begin // step + 1) * step)
                if begin and end == len(ids):
                    self._guarded(self._recurrence.keep, begin)
                yield self._chunk(list(ids[begin:end]), begin), begin
                begin = end
        finally:
            self._guarded(tiers.end_prefill)

    def _chunk(self, ids: list[int], begin: int) -> Any:
        """Hidden states [T, H] of one chunk."""
        if len(ids) == 1:
            return self._feed_token(ids[0])
        prefill, end = self._opened.forward.prefill, begin + len(ids)
        hidden = self._guarded(self._recurrence.moving, end, prefill, ids, begin)
        self._cached.extend(ids)
        return hidden

    def _begin_prompt(self) -> None:
        self._opened.governor.read_limits()
        self._room.take_back()
        self._look.drop()
        self._opened.forward.count()

    def _guarded(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Run a pass; a failed one leaves the cache as it was before."""
        try:
            if self._unsound:
                self._recover()
            with np.errstate(all="ignore"):  # Whatever the caller's program has set.
                return compute(*args)
        except TiersError as error:
            raise self._opened.read_error(error) from error
        except AegisError:
            raise
        except BaseException:
            # Ctrl-C, or what a signal's handler raises, can come between any two steps of the
            # bookkeeping of slots and reads. A recovery that fails, too, comes with the next call.
            self._unsound = True
            with suppress(TiersError):
                self._recover()
            raise

    def _recover(self) -> None:
        self._opened.tiers.recover()
        self._unsound = False


def _close(opened: Opened, turn: Turn) -> None:
    (opened.close if turn.here else opened.close_in_child)()

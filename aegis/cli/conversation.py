"""What a chat keeps: the turns so far, as far as the context holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.cli.answer import Messages, first_messages
from aegis.cli.options import Options

if TYPE_CHECKING:
    from aegis.engine.engine import Engine


class Conversation:
    """The system message, which stays, and turns of a question and its answer.

    When a prompt leaves no room for an answer, the oldest turns are left out until half of the
    context is free: the next turns can then go on from what the KV cache holds, where leaving out
    one turn at a time would compute the whole prompt anew every time.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine, self._raw = engine, options["raw"]
        self._system = first_messages(options)
        self._room = min(options["max_tokens"], engine.context // 4)
        self._turns: list[Messages] = []

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._turns.clear()

    def ask(self, line: str) -> tuple[list[int], int]:
        """The prompt's ids with ``line`` as the next question, and how many turns it cost.

        Raises:
            UsageError: even alone the line is longer than the context.
        """
        texts = [message["content"] for message in self._system]
        self._engine.refuse_far_too_long([*texts, line])
        context, kept = self._engine.context, list(self._turns)
        ids = self._ids(kept, line)
        if len(ids) + self._room > context:
            while kept and len(ids) > context // 2:
                del kept[0]
                ids = self._ids(kept, line)
        if len(ids) > context:
            raise self._engine.too_long(len(ids))
        left_out, self._turns = len(self._turns) - len(kept), kept
        return ids, left_out

    def answered(self, line: str, answer: str) -> None:
        """Keep a question and what was answered."""
        said = (("user", line), ("assistant", answer))
        self._turns.append([{"role": role, "content": content} for role, content in said])

    def _ids(self, turns: list[Messages], line: str) -> list[int]:
        said = [message for turn in turns for message in turn]
        messages = [*self._system, *said, {"role": "user", "content": line}]
        if self._raw:
            return self._engine.tokenizer.encode("\n".join(m["content"] for m in messages))
        return self._engine.tokenizer.encode_chat(messages)

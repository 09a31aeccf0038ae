"""A chat of any length goes on: what the context cannot hold is left out, oldest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aegis import Engine
from aegis.cli.answer import generate
from aegis.cli.conversation import Conversation
from aegis.engine.sampling import Sampler
from aegis.errors import UsageError

CONTEXT = 192
OPTIONS: dict[str, Any] = {
    "raw": False,
    "system_prompt": "Be brief.",
    "max_tokens": 3,
    "stop": (),
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AEGIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        with Engine.open(cap="300MiB", context=CONTEXT) as opened:
            yield opened


def test_a_hundred_turns_go_on_with_the_newest_that_fit(engine: Engine) -> None:
    conversation, costs, added = Conversation(engine, OPTIONS), [], 0
    said: list[dict[str, str]] = []
    before: list[int] = []
    for turn in range(100):
        line = f"turn {turn}: " + "word " * (turn % 7)
        ids, left_out = conversation.ask(line)
        costs.append(left_out)
        assert len(ids) + 3 <= CONTEXT
        said = said[2 * left_out :]
        system = {"role": "system", "content": "Be brief."}
        expected = [system, *said, {"role": "user", "content": line}]
        assert ids == engine.tokenizer.encode_chat(expected)
        answer = f"answer {turn}"
        if turn % 33 == 32:
            answer = generate(engine, ids, OPTIONS, Sampler(), lambda text: None).text
        conversation.answered(line, answer)
        said += [expected[-1], {"role": "assistant", "content": answer}]
        same = (i for i, (old, new) in enumerate(zip(before, ids, strict=False)) if old != new)
        added += len(ids) - next(same, min(len(before), len(ids)))
        before = ids
    assert sum(costs) > 80
    # Room is made for several turns at once, so most prompts only add to what is cached.
    assert sum(cost > 0 for cost in costs) < 34
    assert added < 100 * CONTEXT / 2


def test_a_line_too_long_for_the_context_costs_no_turn(engine: Engine) -> None:
    conversation = Conversation(engine, OPTIONS)
    conversation.ask("one")
    conversation.answered("one", "two")
    before, _ = conversation.ask("three")
    for line in ("word " * CONTEXT, "word " * 50_000):
        with pytest.raises(UsageError, match=rf"\d+ tokens do not fit the context of {CONTEXT}"):
            conversation.ask(line)
    assert conversation.ask("three") == (before, 0)


def test_the_system_message_stays_and_clear_forgets_the_rest(engine: Engine) -> None:
    conversation = Conversation(engine, OPTIONS)
    first, _ = conversation.ask("hello")
    conversation.answered("hello", "hi")
    assert conversation.ask("hello")[0] != first
    conversation.clear()
    assert conversation.ask("hello") == (first, 0)


def test_an_answer_may_take_what_is_left_where_nothing_can_be_left_out(engine: Engine) -> None:
    options = {**OPTIONS, "max_tokens": 10_000}
    conversation = Conversation(engine, options)
    line = "word " * (CONTEXT - 60)
    ids, left_out = conversation.ask(line)
    assert left_out == 0
    assert CONTEXT - len(ids) < CONTEXT // 4
    answer = generate(engine, ids, options, Sampler(), lambda text: None)
    assert answer.finish_reason == "length"
    assert len(ids) + len(answer.token_ids) == CONTEXT + 1


def test_raw_chats_keep_lines_of_text(engine: Engine) -> None:
    conversation = Conversation(engine, {**OPTIONS, "raw": True, "system_prompt": None})
    conversation.answered("a", "b")
    assert conversation.ask("c")[0] == engine.tokenizer.encode("a\nb\nc")

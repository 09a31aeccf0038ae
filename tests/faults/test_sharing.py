"""An engine in a forked child, in several threads, in a signal's handler, and in a copy."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from engine_tools import Result, difference, result_of
from fault_tools import POOLS, always, faulty_disk, in_child, python_script
from small_model import IDS, SMALL, linux, needs_native, open_small

from aegis import Engine
from aegis.checkpoint.store import Store
from aegis.engine import turn
from aegis.errors import AegisError

TOKENS = 4
BACKENDS = ("reference", pytest.param("native", marks=needs_native))


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, sound_store: Store) -> Iterator[Engine]:
    """Streams nearly every expert."""
    with open_small(
        sound_store, backend=request.param, max_slots=SMALL.num_experts_per_tok
    ) as opened:
        yield opened


@pytest.fixture
def expected(engine: Engine) -> Result:
    return result_of(engine, IDS, TOKENS)


def attempt(engine: Engine, what: str) -> str:
    calls = {
        "score": lambda: engine.score(IDS),
        "nll": lambda: engine.nll(IDS),
        "feed": lambda: engine.feed(IDS),
        "feed_token": lambda: engine.feed_token(1),
        "logits": lambda: engine.logits(None),
        "generate": lambda: next(engine.generate(IDS, 1)),
    }
    try:
        calls[what]()
    except AegisError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["score", "nll", "feed", "feed_token", "logits", "generate"])
def test_a_forked_child_is_told_whose_the_model_is(engine: Engine, what: str) -> None:
    said = in_child(lambda: attempt(engine, what), limit_s=20)
    assert said.startswith("this model was opened by another process, which forked this one;")


def test_a_forked_child_may_close_it_and_the_parent_goes_on(
    engine: Engine, expected: Result
) -> None:
    def close() -> str:
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 9
        engine.close()
        engine.close()
        after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        return "closed" if after < before else "files stay open"

    assert in_child(close, limit_s=20) == "closed"
    assert difference(expected, result_of(engine, IDS, TOKENS)) == ""


def test_a_fork_during_a_generation_does_not_disturb_it(engine: Engine, expected: Result) -> None:
    tokens = []
    for token in engine.generate(IDS, TOKENS, ignore_eos=True):
        tokens.append(token)
        assert in_child(lambda: attempt(engine, "score"), limit_s=20).startswith("this model was")
    assert tokens == expected.tokens


WAYS_OUT = """
import os, sys, warnings
from aegis import Engine
warnings.simplefilter("ignore")  # newer Pythons' about forks
path, backend, way = sys.argv[1:]
engine = Engine.open(path, cap="300MiB", context=64, max_slots=4, backend=backend)
list(engine.generate([5, 90, 411], 2, ignore_eos=True))
child = os.fork()
if not child:
    if way == "forgetting it":
        del engine
    elif way == "an error":
        raise SystemExit(3)
    sys.exit(3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["forgetting it", "an error"])
def test_a_forked_child_ends_as_any_process_does(
    backend: str, way: str, sound_store: Store
) -> None:
    """Joining threads that it does not have would take for ever."""
    done = python_script(WAYS_OUT, str(sound_store.path), backend, way, timeout=60)
    assert (done.stdout, done.stderr) == ("3\n", "")


@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_of_the_parent_refuses_instead_of_waiting(kind: str) -> None:
    with faulty_disk(always(0)) as disk:
        pool = disk.pool(kind, 2)

        def use() -> str:
            said = []
            for call in (
                lambda: pool.submit(0, 0, 4096, 0, True),
                lambda: pool.wait_any([1]),
                lambda: pool.cancel(1),
                lambda: pool.promote(1),
                lambda: pool.result(1),
                lambda: pool.damaged(1),
                lambda: pool.done(1),
            ):
                try:
                    call()
                except RuntimeError as error:
                    said.append("another process" in str(error))
            pool.close()
            return str(said)

        assert in_child(use, limit_s=20) == str([True] * 7)
        pool.close()


@linux
@needs_native
def test_a_fork_does_not_double_the_memory(sound_store: Store) -> None:
    """What slots get while a child lives is not kept twice: the child has nothing of the arena."""
    with open_small(sound_store, backend="native") as engine:
        arena = engine._opened.arena

        def mapped() -> str:
            with open("/proc/self/maps") as lines:
                spans = [line.split()[0].split("-") for line in lines]
            inside = [low for low, high in spans if int(low, 16) <= arena.base < int(high, 16)]
            return "mapped" if inside else "not mapped"

        assert mapped() == "mapped"
        assert in_child(mapped) == "not mapped"


def test_threads_take_turns_and_each_gets_its_own_tokens(engine: Engine) -> None:
    prompts = [IDS[i:] + IDS[:i] for i in range(3)]
    expected = [list(engine.generate(ids, TOKENS, ignore_eos=True)) for ids in prompts]
    scores = [engine.score(ids).copy() for ids in prompts]
    found: list[bool] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(3):
                tokens = list(engine.generate(prompts[number], TOKENS, ignore_eos=True))
                score = engine.score(prompts[number])
                found.append(tokens == expected[number])
                found.append(score.tobytes() == scores[number].tobytes())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == [True] * 18


def test_closing_waits_for_the_thread_whose_turn_it_is(engine: Engine) -> None:
    """And that thread then finds it closed, not its memory gone."""
    begun = threading.Event()
    said: list[str] = []

    def work() -> None:
        try:
            while True:
                engine.score(IDS)
                begun.set()
        except AegisError as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    engine.close()
    thread.join(60)
    assert said == ["the engine is closed; open it again"]


def test_a_turn_held_over_calls_keeps_other_threads_out(engine: Engine) -> None:
    entered: list[str] = []

    def other() -> None:
        engine.feed(IDS)
        entered.append("other")

    thread = threading.Thread(target=other)
    with engine.turn:
        thread.start()
        engine.feed(IDS[::-1])
        entered.append("holder")
    thread.join(60)
    assert entered == ["holder", "other"]


def test_ctrl_c_while_waiting_for_a_turn_is_heard(engine: Engine) -> None:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.turn:
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.score(IDS)
    done.set()
    thread.join()
    assert len(engine.score(IDS))


def interrupt(engine: Engine, monkeypatch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    """Let a signal's handler run before the third layer that is computed from now on."""
    monkeypatch.setattr(engine._opened.forward, "_watch", _Interruption(handler).look)


class _Interruption:
    def __init__(self, handler: Callable[[], None]) -> None:
        self._handler, self._looks = handler, 0

    def look(self) -> None:
        self._looks += 1
        if self._looks == 3:
            before = signal.signal(signal.SIGUSR1, lambda number, frame: self._handler())
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)


@linux
def test_closed_by_a_handler_in_mid_token_it_closes_behind_that_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the token is computed with must not be gone, and read as zeros."""
    expected = list(engine.generate(IDS, 2, ignore_eos=True))
    engine.feed(IDS[:3])
    interrupt(engine, monkeypatch, engine.close)
    tokens = engine.generate(IDS, 2, ignore_eos=True)
    assert next(tokens) == expected[0]
    assert not engine._opened.files.fds
    with pytest.raises(AegisError, match="the engine is closed"):
        next(tokens)
    engine.close()


@pytest.mark.parametrize("what", ["score", "nll", "feed", "feed_token", "logits", "generate"])
def test_a_handler_in_mid_token_may_not_compute_and_changes_no_bit(
    engine: Engine, expected: Result, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    engine.feed(IDS[:3])
    interrupt(engine, monkeypatch, lambda: said.append(attempt(engine, what)))
    assert not difference(expected, result_of(engine, IDS, TOKENS))
    assert [text[:39] for text in said] == ["this model is in the middle of a call, "]


def test_an_interrupted_call_is_no_longer_under_way(
    engine: Engine, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.turn, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.score(IDS)
    monkeypatch.undo()
    assert not difference(expected, result_of(engine, IDS, TOKENS))


class CtrlC:
    """Strikes at one step in a file: where a function begins, or one of the system's has ended."""

    def __init__(self, file: str, at: int) -> None:
        self._file, self._left = file, at

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename == self._file and event in ("call", "c_return"):
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt


def test_ctrl_c_at_any_step_of_taking_the_turn_leaves_it_to_others(
    engine: Engine, expected: Result
) -> None:
    struck, taken = 0, []

    def take() -> None:
        if engine.turn._lock.acquire(timeout=10):
            engine.turn._lock.release()
            taken.append(struck)

    while True:
        sys.setprofile(CtrlC(turn.__file__, struck + 1))
        try:
            engine.feed(IDS)
            break
        except KeyboardInterrupt:
            struck += 1
        finally:
            sys.setprofile(None)
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        assert taken[-1:] == [struck]
    assert struck > 4
    assert not difference(expected, result_of(engine, IDS, TOKENS))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_cannot_be_copied(engine: Engine, duplicate: Callable[[Engine], object]) -> None:
    """Two would close the same memory and files."""
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; open the model again"):
        duplicate(engine)


@linux
def test_engines_that_are_dropped_give_all_back(sound_store: Store) -> None:
    from aegis.engine.governor import ProcessGauge

    open_small(sound_store).close()
    known = len(ProcessGauge._all)
    counts = [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]
    for _ in range(3):
        engine = open_small(sound_store, io_threads=4)
        arena = engine._opened.arena
        next(engine.generate(IDS, 3, ignore_eos=True))
        del engine
        assert arena._closed
        assert len(ProcessGauge._all) == known
        assert [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")] == counts


def test_a_forked_child_may_not_take_what_its_parent_may(engine: Engine) -> None:
    from aegis.engine.governor import ProcessGauge

    cap_nbytes = 10 << 20
    arena = engine._opened.arena

    def allowed() -> int:
        gauge = ProcessGauge(cap_nbytes, arena, (0, 0), 0)
        try:
            return gauge.allowed_nbytes
        finally:
            gauge.close()

    assert in_child(allowed, limit_s=20) == str(cap_nbytes)
    assert allowed() == cap_nbytes + engine.plan.cap_nbytes


def test_a_forked_child_may_drop_it_and_the_parent_goes_on(sound_store: Store) -> None:
    engines = [open_small(sound_store)]
    expected = list(engines[0].generate(IDS, TOKENS, ignore_eos=True))

    def drop() -> str:
        engines.clear()
        return "dropped"

    assert in_child(drop, limit_s=20) == "dropped"
    with engines.pop() as engine:
        assert list(engine.generate(IDS[::-1] + IDS, 1, ignore_eos=True))
        assert list(engine.generate(IDS, TOKENS, ignore_eos=True)) == expected

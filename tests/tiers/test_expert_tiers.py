import errno
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from tier_fakes import (
    STRIDE,
    ShufflingPool,
    SlotReader,
    cached_nbytes,
    check_slots,
    open_files,
    write_expert_files,
)
from tier_runs import (
    NUM_LAYERS,
    Setup,
    decode_layer,
    open_tiers,
    prefill_layer,
    setups,
    use_at_random,
)

from aegis.tiers import (
    ExpertFiles,
    ExpertTiers,
    PythonReadPool,
    SlotError,
    open_read_pool,
)


@given(setups())
def test_every_slot_handed_out_holds_its_experts_bytes(
    stores: dict[int, ExpertFiles], setup: Setup
) -> None:
    files, memory = stores[setup.num_experts], SlotReader(setup.num_slots)
    pool = ShufflingPool(setup.seed, threads=1 + setup.seed % 3)
    tiers = open_tiers(files, memory, setup, pool)
    choices = use_at_random(tiers, memory, setup, 12)
    tiers.close()
    check_slots(memory.slots)
    assert not any(memory.slots.pins)
    total = tiers.stats.totals()
    assert total.hits + total.misses + total.late == total.choices == choices
    assert total.hot_hits <= total.hits
    assert total.useful + total.wasted + total.cancelled <= total.guesses
    assert total.read_nbytes == pool.read_nbytes
    memory.arena.close()


@given(setups())
def test_without_guesses_who_stays_does_not_depend_on_the_order_in_which_reads_end(
    stores: dict[int, ExpertFiles], setup: Setup
) -> None:
    files, seen = stores[setup.num_experts], []
    for order in (1, 2):
        memory, rng = SlotReader(setup.num_slots), random.Random(setup.seed)
        pool = ShufflingPool(setup.seed + order, threads=order)
        tiers = open_tiers(files, memory, replace(setup, guess="none"), pool)
        held = []
        for layer_index in (*range(NUM_LAYERS), *range(NUM_LAYERS)) * 3:
            chosen = sorted(rng.sample(range(setup.num_experts), setup.chosen))
            decode_layer(tiers, memory, layer_index, chosen, [])
            held.append([memory.slots.key_of[slot] for slot in memory.slots.hot])
        total = tiers.stats.totals()
        seen.append((held, total.hits, total.hot_hits, total.misses, total.late))
        tiers.close()
        memory.arena.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["native", "python"])
@pytest.mark.parametrize("threads", [1, 8])
def test_the_same_with_threads(stores: dict[int, ExpertFiles], kind: str, threads: int) -> None:
    pool = open_read_pool(threads) if kind == "native" else PythonReadPool(threads)
    for seed, num_slots in enumerate((3, 4, 9, 20, 38)):
        setup = Setup(12, 3, num_slots, 1 + num_slots // 3, "lfu", "cross-layer", 6, seed)
        memory = SlotReader(num_slots)
        tiers = open_tiers(stores[12], memory, setup, pool)
        use_at_random(tiers, memory, setup, 25)
        tiers.close()
        memory.arena.close()
    pool.close()


def test_prefill_fills_free_slots_for_good_and_decode_then_reads_nothing(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(NUM_LAYERS * 12)
    setup = Setup(12, 4, NUM_LAYERS * 12, 12, "lfu", "cross-layer", 6, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        for layer_index in range(NUM_LAYERS):
            prefill_layer(tiers, memory, layer_index, list(range(12)), list(range(12)), None)
        read = tiers.stats.read_nbytes
        assert read == NUM_LAYERS * 12 * STRIDE
        for layer_index in range(NUM_LAYERS):
            prefill_layer(tiers, memory, layer_index, list(range(12)), list(range(12)), None)
        for layer_index in range(NUM_LAYERS):
            decode_layer(tiers, memory, layer_index, [1, 3, 7, 9], [0, 2, 4])
        assert tiers.stats.read_nbytes == read
        assert tiers.stats.hit_rate == 1.0
    memory.arena.close()


def test_prefill_skips_hot_experts_and_reads_the_others_once(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(16)
    with open_tiers(stores[12], memory, Setup(12, 4, 16, 4, "lfu", "none", 0, 0), None) as tiers:
        for _ in range(3):
            decode_layer(tiers, memory, 1, [0, 4, 8, 11], [])
        tiers.begin_prefill()
        tiers.stats.reset()
        prefill_layer(tiers, memory, 1, list(range(12)), None, None)
        total = tiers.stats.totals("prefill")
        assert (total.hits, total.misses) == (4, 8)
        assert total.read_nbytes == 8 * STRIDE
    memory.arena.close()


def test_a_batch_leaves_half_of_the_staging_slots_for_reading(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(8)
    with open_tiers(
        stores[12], memory, Setup(12, 4, 8, 8, "lfu", "none", 0, 0), ShufflingPool(0)
    ) as tiers:
        for batch in tiers.prefill_layer(0, list(range(12))):
            assert 1 <= len(memory.check(0, batch)) <= 4
    memory.arena.close()


def test_what_is_guessed_is_late_or_there_when_it_is_wanted(
    stores: dict[int, ExpertFiles],
) -> None:
    memory, pool = SlotReader(12), PythonReadPool(1)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 12, 4, "lfu", "cross-layer", 3, 0), pool)
    assert tiers.candidates == 3
    assert tiers.guess(1, [4, 5, 6, 7]) == 3
    assert tiers.guess(1, [4, 5, 6]) == 0
    decode_layer(tiers, memory, 1, [4, 9], [])
    total = tiers.stats.totals("decode")
    assert (total.guesses, total.useful, total.misses) == (3, 1, 1)
    assert total.hits + total.late == 1
    tiers.close()
    pool.close()
    memory.arena.close()


def test_a_guess_that_is_chosen_is_read_ahead_of_other_guesses(
    stores: dict[int, ExpertFiles],
) -> None:
    gate, order = threading.Event(), list[int]()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        gate.wait()
        order.append(offset // STRIDE)
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(12), PythonReadPool(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 12, 4, "lfu", "cross-layer", 3, 0), pool)
    tiers.guess(1, [4, 5])
    tiers.guess(2, [6])
    acquisition = tiers.acquire(2, [6])
    gate.set()
    while not acquisition.complete:
        acquisition.wait()
    pool.close()
    # The one reader may have begun with the first guess, but not with the second.
    assert 5 not in order[: order.index(6)]
    memory.arena.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda tiers: tiers.acquire(1, [4]).release(),
        lambda tiers: tiers.begin_prefill(),
        lambda tiers: tiers.release_slots(1),
        lambda tiers: tiers.close(),
    ],
    ids=["choice", "prompt", "shrinking", "end"],
)
def test_guesses_that_nobody_needs_are_withdrawn_unless_they_have_begun(
    stores: dict[int, ExpertFiles], use: Callable[[ExpertTiers], None]
) -> None:
    begun, issued = threading.Event(), threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        begun.set()
        issued.wait()  # Before, it may be the only one that was submitted yet.
        for _ in range(1000):
            if pool.depth == 1:
                break
            time.sleep(0.01)
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(12), PythonReadPool(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 2, 12, 4, "lfu", "cross-layer", 4, 0), pool)
    assert tiers.guess(1, [4, 5, 6, 7]) == 4
    issued.set()
    begun.wait()
    use(tiers)
    tiers.close()
    counters = tiers.stats.decode[1]
    assert (counters.guesses, counters.cancelled) == (4, 3)
    assert pool.read_nbytes == tiers.stats.read_nbytes == STRIDE
    check_slots(memory.slots)
    assert not any(memory.slots.pins)
    pool.close()
    memory.arena.close()


class Looks(PythonReadPool):
    """A pool of one reader that counts how often somebody looks for what has ended."""

    looks = 0

    def wait_any(self, tickets: Sequence[int], block: bool = True) -> list[int]:
        self.looks += 1
        return super().wait_any(tickets, block)


def test_waiting_for_a_read_leaves_the_processor_alone(stores: dict[int, ExpertFiles]) -> None:
    begun, go = threading.Event(), threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        begun.set()
        go.wait()
        go.clear()
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(2), Looks(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 1, 2, 1, "lfu", "cross-layer", 1, 0), pool)
    timer = threading.Timer(0.05, go.set)
    timer.start()
    decode_layer(tiers, memory, 0, [7], [])
    timer.join()
    begun.clear()
    assert tiers.guess(1, [3]) == 1
    begun.wait()
    timer = threading.Timer(0.05, go.set)
    timer.start()
    tiers.close()
    assert pool.looks < 20
    timer.join()
    pool.close()
    memory.arena.close()


def test_it_is_known_where_what_is_on_its_way_will_lie(stores: dict[int, ExpertFiles]) -> None:
    go = threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        go.wait()
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(4), PythonReadPool(2, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 3, 4, 3, "lfu", "none", 0, 0), pool)
    acquired = tiers.acquire(0, [2, 5, 9])
    coming = acquired.coming()
    assert coming is not None
    assert coming[0].tolist() == [2, 5, 9]
    expected = dict(zip(*map(list, coming), strict=True))
    go.set()
    while not acquired.complete:
        experts, slots = acquired.wait()
        assert all(expected[e] == s for e, s in zip(experts, slots, strict=True))
    assert [batch.size for batch in acquired.coming() or ()] == [0, 0]
    acquired.release()
    with tiers.acquire(1, [0, 1]) as held:
        # Two of four slots are pinned: the third read has none yet.
        other = tiers.acquire(2, [3, 4, 6])
        assert other.coming() is None
        while not held.complete:
            held.wait()
        other.release()
    tiers.close()
    pool.close()
    memory.arena.close()


def test_a_slot_goes_once_the_guess_that_is_being_read_into_it_is_there(
    stores: dict[int, ExpertFiles],
) -> None:
    begun, go = threading.Event(), threading.Event()

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if offset == 4 * STRIDE:
            begun.set()
            go.wait()
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(2), Looks(1, read=read)
    tiers = open_tiers(stores[12], memory, Setup(12, 1, 2, 1, "lfu", "cross-layer", 1, 0), pool)
    decode_layer(tiers, memory, 0, [0], [4])
    begun.wait()
    looks = pool.looks
    timer = threading.Timer(0.05, go.set)
    timer.start()
    assert tiers.release_slots(1) == 1
    assert pool.looks < looks + 10
    assert tiers.stats.decode[1].wasted == 1
    check_slots(memory.slots)
    timer.join()
    tiers.close()
    pool.close()
    memory.arena.close()


def test_the_previous_choice_can_be_the_guess(stores: dict[int, ExpertFiles]) -> None:
    memory = SlotReader(8)
    setup = Setup(12, 4, 8, 4, "lfu", "previous", 4, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        assert tiers.candidates == 0
        assert tiers.guess(0) == 0
        decode_layer(tiers, memory, 0, [0, 1, 2, 3], [])
        for layer_index in (1, 2):
            decode_layer(tiers, memory, layer_index, [4, 5, 6, 7], [])
        decode_layer(tiers, memory, 0, [0, 1, 2, 3], [])
        assert tiers.stats.decode[1].guesses == 4
        decode_layer(tiers, memory, 1, [4, 5, 6, 8], [])
        assert tiers.stats.decode[1].useful == 3
    memory.arena.close()


def test_two_layers_may_be_held_at_once_as_far_as_slots_go(
    stores: dict[int, ExpertFiles],
) -> None:
    memory = SlotReader(4)
    setup = Setup(12, 2, 4, 1, "lfu", "none", 0, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        first, second = tiers.acquire(0, [0, 1]), tiers.acquire(1, [0, 1])
        third = tiers.acquire(2, [0, 1])
        for layer_index, acquisition in enumerate((first, second)):
            while not acquisition.complete:
                memory.check(layer_index, acquisition.wait())
        with pytest.raises(SlotError, match="pinned by someone else"):
            third.wait()
        first.release()
        while not third.complete:
            memory.check(2, third.wait())
        with pytest.raises(ValueError, match="use prefill_layer"):
            tiers.acquire(0, [0, 1, 2, 3, 4])
        second.release()
        third.release()
        third.release()
    memory.arena.close()


def test_a_prompt_needs_one_slot_that_nobody_else_holds(stores: dict[int, ExpertFiles]) -> None:
    memory = SlotReader(2)
    setup = Setup(12, 2, 2, 1, "lfu", "none", 0, 0)
    with open_tiers(stores[12], memory, setup, None) as tiers:
        held = tiers.acquire(0, [0, 1])
        while not held.complete:
            held.wait()
        visit = tiers.prefill_layer(1, [3])
        with pytest.raises(SlotError, match="release what was acquired first"):
            next(visit)
        held.release()
        assert memory.check(1, next(visit)) == [3]
        assert list(visit) == []
    check_slots(memory.slots)
    memory.arena.close()


def test_what_was_never_handed_out_can_be_given_up(stores: dict[int, ExpertFiles]) -> None:
    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if offset == 5 * STRIDE:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, views, offset)

    memory, pool = SlotReader(4), PythonReadPool(1, read=read)
    with open_tiers(stores[12], memory, Setup(12, 2, 4, 1, "lfu", "none", 0, 0), pool) as tiers:
        decode_layer(tiers, memory, 0, [0, 1], [])
        tiers.acquire(0, [0, 1]).release()
        given_up = tiers.acquire(0, [5])
        pool.wait_any(list(tiers._queue.in_flight))
        # Another layer takes note of the failure, which frees the slot.
        decode_layer(tiers, memory, 1, [0], [])
        given_up.release()
        check_slots(memory.slots)
        assert not any(memory.slots.pins)
    pool.close()
    memory.arena.close()


def test_sizes_that_cannot_work_are_refused(stores: dict[int, ExpertFiles]) -> None:
    memory = SlotReader(4)
    for changes, message in (
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"staging_slots": 0}, "staging_slots is 0"),
        ({"staging_slots": 5}, "staging_slots is 5"),
    ):
        sizes = {"num_experts_per_tok": 2, "staging_slots": 2} | changes
        with pytest.raises(ValueError, match=message):
            ExpertTiers(stores[12], memory.slots, **sizes)
    with pytest.raises(ValueError, match="slots of 8192 bytes"):
        ExpertTiers(stores[12], SlotReader(4, 8192).slots, num_experts_per_tok=2, staging_slots=2)
    memory.arena.close()


def process_read_nbytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("no read_bytes")


@pytest.mark.parametrize("direct", [True, False])
def test_bytes_counted_are_bytes_read_and_no_page_cache_stays(tmp_path: Path, direct: bool) -> None:
    if not os.access("/proc/self/io", os.R_OK):
        pytest.skip("this system does not say what a process reads")
    stride, num_experts = 1 << 18, 24
    paths = write_expert_files(tmp_path, NUM_LAYERS, num_experts, stride)
    memory = SlotReader(20, stride)
    rng = random.Random(0)
    with open_files(paths, num_experts, stride) as files:
        if direct and files.mode != "direct":
            pytest.skip(files.reason)
    with ExpertFiles(paths, stride, stride, num_experts, direct) as files:
        setup = Setup(num_experts, 4, 20, 8, "lfu", "cross-layer", 6, 0)
        with open_tiers(files, memory, setup, None) as tiers:
            before = process_read_nbytes()
            for layer_index in range(NUM_LAYERS):
                everyone = list(range(num_experts))
                prefill_layer(tiers, memory, layer_index, everyone, everyone, None)
            for _ in range(8):
                for layer_index in range(NUM_LAYERS):
                    chosen = sorted(rng.sample(range(num_experts), 4))
                    ranked = rng.sample(range(num_experts), 6)
                    decode_layer(tiers, memory, layer_index, chosen, ranked)
        read = process_read_nbytes() - before
        if not direct and read == 0:
            pytest.skip("this file system keeps its pages in memory")
        assert tiers.stats.read_nbytes > 32 << 20
        assert abs(read - tiers.stats.read_nbytes) <= 0.02 * read
        assert sum(map(cached_nbytes, paths)) == 0
    memory.arena.close()


def test_statistics_are_kept_per_layer_and_phase_and_can_be_reset(
    stores: dict[int, ExpertFiles],
) -> None:
    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.02)
        return os.preadv(fd, views, offset)

    begun = time.perf_counter()
    memory, pool = SlotReader(12), PythonReadPool(1, read=slow)
    setup = Setup(12, 4, 12, 4, "lfu", "none", 0, 0)
    with open_tiers(stores[12], memory, setup, pool) as tiers:
        prefill_layer(tiers, memory, 0, [1, 2], None, None)
        decode_layer(tiers, memory, 1, [0, 1, 2, 3], [])
        assert tiers.stats.prefill[0].misses == 2
        assert tiers.stats.decode[0].choices == 0
        assert tiers.stats.decode[1].misses == 4
        assert 0 < tiers.stats.decode[1].wait_s <= time.perf_counter() - begun
        told = tiers.stats.as_dict()
        assert told["decode"]["total"]["read_nbytes"] == 4 * STRIDE
        assert told["decode"]["layers"][1]["choices"] == 4
        tiers.stats.reset()
        assert tiers.stats.totals().choices == 0
        decode_layer(tiers, memory, 1, [0, 1, 2, 3], [])
        assert tiers.stats.hit_rate == 1.0
        with pytest.raises(ValueError, match="'decode', 'prefill' or None"):
            tiers.stats.totals("both")
    pool.close()
    memory.arena.close()


def test_slots_that_a_token_needs_do_not_go_where_no_range_would_come_of_it(
    tmp_path: Path,
) -> None:
    stride = 1 << 20
    paths = write_expert_files(tmp_path, 1, 4, stride)
    memory = SlotReader(4, stride)
    with (
        ExpertFiles(paths, stride, stride, 4) as files,
        ExpertTiers(files, memory.slots, num_experts_per_tok=3, staging_slots=1) as tiers,
    ):
        # Three slots reach into the last range of 2 MiB.
        assert tiers.release_nbytes(1) == 0
        assert (memory.slots.capacity, memory.arena.released_nbytes) == (4, 0)
        assert tiers.stats.given_back.times == 0
    memory.arena.close()

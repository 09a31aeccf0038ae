"""Machines that give little: files, threads, address space, stack, processors, huge pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import Result, difference, result_of
from fault_tools import FaultyDisk, always, in_child, python_script
from small_model import IDS, SMALL, linux, needs_native, open_small

from aegis.checkpoint.store import Store
from aegis.errors import StoreError
from aegis.tiers import Arena, PythonReadPool, ReadPoolError, open_read_pool

resource = pytest.importorskip("resource")

TOKENS = 4
RUN = """
import sys
from aegis import Engine
path, backend = sys.argv[1:]
with Engine.open(path, cap="300MiB", context=64, max_slots=4, backend=backend) as engine:
    print(list(engine.generate([5, 90, 411, 7, 300, 22], 4, ignore_eos=True)))
    print(engine.describe(), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def expected(sound_store: Store) -> Result:
    with open_small(sound_store, backend="reference") as engine:
        return result_of(engine, IDS, TOKENS)


@pytest.fixture(scope="module")
def backend() -> str:
    from aegis.kernels import registry
    from aegis.settings import default_backend

    return registry.resolve(default_backend())


@pytest.fixture(scope="module")
def usual(sound_store: Store, backend: str) -> str:
    """What RUN prints without a limit."""
    return python_script(RUN, str(sound_store.path), backend).stdout


def limited(store: Store, backend: str, shell: str) -> subprocess.CompletedProcess[str]:
    """RUN behind a line of shell that sets a limit."""
    return subprocess.run(
        ["bash", "-c", f'{shell} "$@"', "bash", sys.executable, "-c", RUN, store.path, backend],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
        timeout=120,
    )


@linux
@pytest.mark.parametrize(
    "shell", ["ulimit -s 256;", "ulimit -s unlimited;", "ulimit -l 0;", "taskset -c 0"]
)
def test_a_tiny_stack_or_a_single_processor_changes_nothing(
    shell: str, sound_store: Store, backend: str, usual: str
) -> None:
    done = limited(sound_store, backend, shell)
    if "command not found" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stdout) == (0, usual), done.stderr


@linux
def test_without_huge_pages_it_says_so_and_computes_the_same(
    sound_store: Store, backend: str, usual: str
) -> None:
    """prctl(PR_SET_THP_DISABLE): as if the system's setting were "never"."""
    code = "import ctypes; assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0\n" + RUN
    done = python_script(code, str(sound_store.path), backend)
    assert (done.returncode, done.stdout) == (0, usual), done.stderr
    assert ", 0 B in huge pages" in done.stderr


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
@pytest.mark.parametrize("refused", ["MADV_HUGEPAGE", "MADV_DONTFORK", "everything"])
def test_advice_that_the_kernel_does_not_know_is_done_without(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            if refused == "everything" or option == getattr(mmap, refused):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            super().madvise(option, *place)

    monkeypatch.setattr("aegis.tiers.arena.mmap.mmap", Refusing)
    arena = Arena(5 << 20)
    region = arena.take("all", 5 << 20)
    region[:] = 1
    assert int(region.sum()) == 5 << 20
    arena.close()


class FewThreads:
    """Lets only so many threads start."""

    def __init__(self, patch: pytest.MonkeyPatch, allowed: int) -> None:
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            nonlocal allowed
            if not allowed:
                raise RuntimeError("can't start new thread")
            allowed -= 1
            start(thread)

        patch.setattr(threading.Thread, "start", limited)


def test_fewer_readers_than_asked_for_will_do(
    sound_store: Store, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(always(0))
    disk.install(monkeypatch, "python")
    FewThreads(monkeypatch, 1)
    with open_small(
        sound_store, backend="reference", io_threads=8, max_slots=SMALL.num_experts_per_tok
    ) as engine:
        assert difference(expected, result_of(engine, IDS, TOKENS)) == ""
    disk.close()


def test_no_reader_at_all_is_a_sentence_and_leaves_the_interpreter_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interval = sys.getswitchinterval()
    monkeypatch.setitem(sys.modules, "aegis.kernels.native._native", None)
    FewThreads(monkeypatch, 0)
    with pytest.raises(ReadPoolError, match=r"no thread could be started .* \(ulimit -u\)"):
        open_read_pool(2)
    assert sys.getswitchinterval() == interval


def without_threads(allowed: int, work: Callable[[], Any]) -> str:
    """``work`` in a child whose user may have so many more processes (threads count)."""

    def limited() -> Any:
        if not os.geteuid():
            os.setgroups([])
            os.setresuid(61234, 61234, 61234)
        resource.setrlimit(resource.RLIMIT_NPROC, (allowed, allowed))
        return work()

    return in_child(limited)


@linux
@needs_native
def test_native_pools_do_with_the_threads_there_are() -> None:
    from aegis.kernels.native import _native

    def make() -> str:
        try:
            pool = open_read_pool(2)
            pool.close()
            read = "read"
        except ReadPoolError as error:
            read = str(error)
        compute = _native.Pool(2)
        count = compute.threads
        compute.set_threads(2)
        return f"{count} {read}"

    if os.geteuid():
        pytest.skip("how many processes this user has is not known: run it as root")
    assert without_threads(1, make).startswith("1 no thread could be started for reading")
    # The process itself, and one more.
    assert without_threads(2, make) == "2 read" or os.cpu_count() == 1


@linux
@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_too_few_open_files_name_the_limit_and_close_what_was_opened(
    allowed: int, store: Store
) -> None:
    def tried() -> str:
        used = len(os.listdir("/proc/self/fd"))
        # What the engine opens before and beside them.
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + allowed
        for fd in range(3, most):
            try:
                os.fstat(fd)
            except OSError:
                os.open(os.devnull, os.O_RDONLY)
        before = len(os.listdir("/proc/self/fd"))
        from aegis.tiers import ExpertFiles

        layout = store.layout
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            ExpertFiles(
                store.expert_paths(),
                layout.experts.record_nbytes,
                layout.experts.stride,
                layout.num_experts,
            )
        except Exception as error:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most + 9, most + 9))
            assert len(os.listdir("/proc/self/fd")) == before >= used
            return str(error)
        return "opened"

    said = in_child(tried)
    assert "of the 3 expert files can be open at once (Too many open files)" in said
    assert "raise the limit (ulimit -n)" in said


@linux
def test_too_little_address_space_is_a_sentence(sound_store: Store) -> None:
    def opened() -> str:
        with open_small(sound_store, backend="reference", context=2048, cap="1GiB") as engine:
            limit = engine.arena_nbytes // 2
        now = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (now + limit, now + limit))
        try:
            open_small(sound_store, backend="reference", context=2048, cap="1GiB").close()
        except StoreError as error:
            return str(error)
        return "opened"

    assert "use a smaller cap or raise the limit on address space" in in_child(opened)


def test_a_library_that_cannot_be_loaded_is_one_line() -> None:
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            try: raise ImportError('libx.so: failed to map segment from shared object')\n"
        "            except ImportError as error:\n"
        "                raise ImportError('IMPORTANT\\n\\nread this\\n') from error\n"
        "sys.meta_path.insert(0, Broken())\n"
        "sys.argv[1:] = ['run', 'hello', '-q']\n"
        "from aegis.cli import main\n"
        "main()"
    )
    done = python_script(code)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("error: a library could not be loaded: libx.so: failed to map segment")


def test_a_reader_that_gets_no_memory_says_so() -> None:
    """In Python any step may fail for memory: the read has failed, its thread goes on."""

    def hungry(fd: int, views: list[memoryview], offset: int) -> int:
        raise MemoryError

    pool = PythonReadPool(1, read=hungry)
    buffer = bytearray(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for _ in range(2):
        ticket = pool.submit(0, 0, 4096, address, True)
        pool.wait(ticket)
        assert pool.result(ticket) == -errno.ENOMEM
    pool.close()


@linux
def test_too_few_open_files_for_the_tokenizer_are_not_its_fault() -> None:
    code = (
        "import os, resource; from aegis.errors import TokenizerError\n"
        "from aegis.text import library\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try:\n"
        "    with library.failures_say('it is damaged', 'download it again'):\n"
        "        os.open('/dev/null', os.O_RDONLY)\n"
        "except TokenizerError as error: print(error)"
    )
    said = python_script(code).stdout
    assert said.startswith("too many files are open to load the model's tokenizer; close some or")

"""``aegis doctor``: the real machine end to end, and a selftest that finds what is wrong."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cgroup
import numpy as np
import pytest
from mlx_tools import ON_GPU, PLENTY

from aegis.checkpoint import storage
from aegis.checkpoint.storage import DIRECT, Storage
from aegis.doctor import selftest as selftests
from aegis.doctor.compare import LOGITS_WITHIN, check
from aegis.doctor.goldens import GOLDENS, Golden, load_goldens
from aegis.doctor.processor import native_isas
from aegis.doctor.selftest import Run, Skipped, plan_runs, selftest
from aegis.doctor.shelter import temporary_folder
from aegis.doctor.worker import answer
from aegis.engine.limits import MemoryLimits
from aegis.errors import AegisError, BackendError
from aegis.kernels import registry
from aegis.kernels.mlx import probe
from aegis.planner import parse_size

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
AVAILABLE = [name for name, reason in registry.available() if reason is None]
native_only = pytest.mark.skipif("native" not in AVAILABLE, reason="the extension is not built")

Aegis = Callable[..., "subprocess.CompletedProcess[str]"]

# The command on this machine


def test_the_real_machine_is_one_json_object(aegis: Aegis, command_env: dict[str, str]) -> None:
    before = sorted(Path(command_env["AEGIS_CACHE"]).iterdir())
    done = aegis("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema_version"] == 1
    assert found["selftest"] is None
    assert found["cache"]["folder"] == command_env["AEGIS_CACHE"]
    assert found["default_backend"] in AVAILABLE
    assert found["processor"]["usable_cores"] >= 1
    assert found["cap"]["embedded_model"]["min_cap_nbytes"] > 100 * MIB
    assert found["disk"]["skipped"] or len(found["disk"]["reads"]) == 4
    assert found["disk"]["file_nbytes"] <= 256 * MIB
    assert sorted(Path(command_env["AEGIS_CACHE"]).iterdir()) == before


def test_people_read_a_table_and_nothing_is_measured_that_they_left_out(aegis: Aegis) -> None:
    done = aegis("doctor", "--no-disk")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("versions", "processor", "memory", "huge pages", "cache", "backends", "cap"):
        assert f"\n{name} " in f"\n{done.stdout}"
    assert "not measured: asked for" in done.stdout


def test_a_backend_without_a_selftest_is_a_usage_error(aegis: Aegis) -> None:
    done = aegis("doctor", "--backend", "native")
    assert done.returncode == 2
    assert "--selftest" in done.stderr


def python_path(folder: Path, code: str, env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which every interpreter runs ``code`` first."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    # An empty entry would stand for the working folder.
    places = filter(None, [str(folder), env.get("PYTHONPATH")])
    return {**env, "PYTHONPATH": os.pathsep.join(places)}


def doctor(env: Mapping[str, str], folder: Path, *arguments: str) -> Any:
    """Exit code, the object on stdout, and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "aegis", "doctor", "--json", "-q", "--no-disk", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=dict(env),
        cwd=folder,
        check=False,
        timeout=600,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


HIDE_KERNELS = (
    "import sys; sys.modules['aegis.kernels.native._native'] = None; sys.modules['mlx'] = None"
)
"""And MLX, which would compute where there is a GPU."""


def test_without_compiled_kernels_that_is_the_first_problem(
    command_env: dict[str, str], tmp_path: Path
) -> None:
    env = python_path(tmp_path / "site", HIDE_KERNELS, command_env)
    del env["AEGIS_BACKEND"]
    code, found, _ = doctor(env, tmp_path)
    assert code == 0
    assert found["default_backend"] == "reference"
    assert found["processor"]["isa"] is None
    native = next(item for item in found["backends"] if item["name"] == "native")
    assert not native["available"]
    assert "compiler" in native["install"]
    assert "no_native_backend" in [problem["name"] for problem in found["problems"]]
    code, found, stderr = doctor(env, tmp_path, "--selftest", "--backend", "native")
    assert code == 1
    assert not found["selftest"]["ok"]
    assert "compiler" in found["selftest"]["error"]
    assert "compiler" in stderr


def test_inside_a_small_container_its_limit_is_known_and_kept(
    command_env: dict[str, str], tmp_path: Path
) -> None:
    cgroup.require()
    command = [sys.executable, "-m", "aegis", "doctor", "--json", "-q"]
    done = cgroup.run(command, 64 * MIB, cold=False, env=command_env, cwd=tmp_path)
    assert (done.rc, done.oom_kills) == (0, 0), done.stderr
    found = json.loads(done.stdout)
    assert found["memory"]["limit_nbytes"] == 64 * MIB
    assert found["memory"]["free_nbytes"] < 64 * MIB
    assert found["huge_pages"]["arena_nbytes"] < 16 * MIB
    assert "little_memory" in [problem["name"] for problem in found["problems"]]


# The selftest


@pytest.fixture
def cache(command_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The session's cache folder, with the embedded model converted in it."""
    from aegis.convert.cache import embedded_path, ensure_store

    monkeypatch.setenv("AEGIS_CACHE", command_env["AEGIS_CACHE"])
    ensure_store(embedded_path())
    return Path(command_env["AEGIS_CACHE"])


@native_only
def test_everything_is_right_here_and_nothing_is_left(
    command_env: dict[str, str], tmp_path: Path
) -> None:
    """All instruction sets, from a store that is made for the time being."""
    (cache := tmp_path / "cache").mkdir()
    env = {**command_env, "AEGIS_CACHE": str(cache), "AEGIS_ISA": "avx2"}
    code, found, stderr = doctor(env, tmp_path, "--selftest", "--backend", "native")
    assert code == 0, stderr
    runs = found["selftest"]["runs"]
    best = found["processor"]["isas"][0]
    assert [run["isa"] for run in runs] == [best, *found["processor"]["isas"]]
    assert runs[0]["cap_nbytes"] < runs[1]["cap_nbytes"]
    assert [run["identical"] for run in runs] == [None] + [True] * (len(runs) - 1)
    for run in runs:
        assert run["tokens_equal"] == run["tokens"] > 0
        assert run["top20_equal"] == run["top20"] > 0
        assert 0 < run["logit_error"] < LOGITS_WITHIN / 10
        assert 0 < run["peak_nbytes"] <= run["cap_nbytes"]
        assert run["failures"] == []
    assert list(cache.iterdir()) == []


def short_runs(
    backend: str, store: Path, prompts: int, steps: int
) -> tuple[list[Run], list[Skipped]]:
    """Two steps at two caps, or one where they are slow."""
    if backend != "native":
        cap = parse_size(PLENTY) if backend == "mlx" and ON_GPU else 600 * MIB
        return [Run(backend, None, cap, 1, 1, False)], []
    isa = native_isas()[0]
    return [Run(backend, isa, cap * MIB, 1, 2, True) for cap in (200, 250)], []


def in_process(run: Run, store: Path) -> Mapping[str, Any]:
    """What the worker does, where a test can reach it; peaks of this process mean nothing."""
    request = {**vars(run), "store": str(store), "context": 128, "goldens": str(GOLDENS)}
    return {**answer(request), "peak_nbytes": 0}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Short runs."""
    monkeypatch.setattr(selftests, "plan_runs", short_runs)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("backend", AVAILABLE)
def test_a_right_backend_passes(backend: str) -> None:
    shown: list[Any] = []
    done = selftest(backend, shown.append, in_process)
    assert done.ok, done.failures
    assert shown == done.results
    expected = [None, True] if backend == "native" else [None]
    assert [result.identical for result in done.results] == expected


def corrupted_head(scale: float) -> Callable[[Any, Any], Any]:
    """A head whose logits are slightly wrong in places."""
    from aegis.kernels.native.head import NativeHead

    usual = NativeHead.__call__

    def wrong(self: Any, x: Any) -> Any:
        logits = usual(self, x)
        logits[:, ::7] *= np.float32(scale)
        return logits

    return wrong


@native_only
@pytest.mark.usefixtures("quick")
def test_a_kernel_that_is_a_hundredth_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aegis.kernels.native.head.NativeHead.__call__", corrupted_head(1.01))
    done = selftest("native", compute=in_process)
    assert not done.ok
    assert all(result.failures for result in done.results)
    assert any("largest error of a logit" in failure for failure in done.failures)
    assert [result.identical for result in done.results] == [None, True]


@native_only
@pytest.mark.usefixtures("quick")
def test_one_bit_that_depends_on_the_cap_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(run: Run, store: Path) -> Mapping[str, Any]:
        scale = 1.0 if run.cap_nbytes == 200 * MIB else 1.0 + 2**-22
        with monkeypatch.context() as patch:
            patch.setattr("aegis.kernels.native.head.NativeHead.__call__", corrupted_head(scale))
            return in_process(run, store)

    done = selftest("native", compute=compute)
    assert [result.identical for result in done.results] == [None, False]
    assert done.failures == ["the logits of 2 steps have other bits than in the first run"]


BREAK_A_KERNEL = """\
import os, sys
import importlib.abc

class Break(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "aegis.kernels.native.head" and os.environ.get("AEGIS_ISA") == "avx2":
            os.kill(os.getpid(), {signal})

sys.meta_path.insert(0, Break())
"""


@native_only
@pytest.mark.usefixtures("quick")
def test_a_process_that_dies_of_its_kernels_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = BREAK_A_KERNEL.format(signal=int(signal.SIGILL))
    env = python_path(tmp_path / "site", code, os.environ)
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    runs = [Run("native", "avx2", 200 * MIB, 1, 1, True)]
    monkeypatch.setattr(selftests, "plan_runs", lambda *_: (runs, []))
    done = selftest("native")
    assert done.failures == ["its process was ended by SIGILL"]
    assert not done.ok


@pytest.mark.usefixtures("quick")
def test_deliberately_wrong_goldens_are_noticed(tmp_path: Path) -> None:
    """By the real worker process, which reads them."""
    goldens = json.loads(GOLDENS.read_text())
    first = goldens["prompts"][0]
    first["greedy_ids"][0] += 1
    first["top20_ids"][0][19] = 7
    first["top20_logits"][1][0] += 0.01
    (tmp_path / "wrong.json").write_text(json.dumps(goldens))
    done = selftest(AVAILABLE[0], goldens=tmp_path / "wrong.json")
    assert not done.ok
    name, token = first["name"], first["greedy_ids"][0]
    for says in (
        f"{name}: token 1 is {token - 1} instead of {token}",
        f"{name}: the 20 largest logits of step 1 are others",
        "the largest error of a logit is",
    ):
        assert any(failure.startswith(says) for failure in done.failures), done.failures


def test_the_goldens_that_ship_are_cut_from_those_of_the_tests() -> None:
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools/make_doctor_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    source = json.loads((ROOT / tool.SOURCE).read_text())
    assert GOLDENS.read_text() == tool.encode(tool.cut(source))
    assert GOLDENS.stat().st_size < 20_000


# Comparing


@pytest.fixture
def golden() -> Golden:
    return load_goldens()[0]


def right(golden: Golden, steps: int) -> dict[str, Any]:
    """An answer without any fault."""
    rows = [
        {
            "token": golden.greedy_ids[i],
            "bits": f"{i:x}",
            "top20_ids": golden.top20_ids[i],
            "logits": golden.top20_logits[i],
        }
        for i in range(steps)
    ]
    return {"cases": [{"ids": golden.ids, "rows": rows}], "peak_nbytes": 5}


def test_an_answer_that_is_the_golden_has_no_failure(golden: Golden) -> None:
    found = check(right(golden, 3), [golden], 3, right(golden, 2))
    assert (found.failures, found.logit_error, found.identical) == ([], 0.0, True)
    assert (found.tokens_equal, found.top20_equal, found.peak_nbytes) == (3, 3, 5)


def test_other_prompt_ids_fail(golden: Golden) -> None:
    wrong = right(golden, 1)
    wrong["cases"][0]["ids"] = golden.ids[:-1]
    assert "other prompt ids" in check(wrong, [golden], 1, None).failures[0]


@pytest.mark.parametrize("place", [0, 19])
def test_no_number_is_no_small_error(golden: Golden, place: int) -> None:
    wrong = right(golden, 2)
    wrong["cases"][0]["rows"][1]["logits"] = list(golden.top20_logits[1])
    wrong["cases"][0]["rows"][1]["logits"][place] = math.nan
    found = check(wrong, [golden], 2, None)
    assert found.logit_error is None
    assert "nan" in found.failures[0]
    assert "NaN" not in json.dumps(vars(found))


def test_a_process_above_its_cap_fails(
    golden: Golden, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(
        selftests, "plan_runs", lambda *_: ([Run("native", "any", 4, 1, 3, True)], [])
    )
    monkeypatch.setattr(selftests, "choose_backend", lambda name: name)
    done = selftest("native", compute=lambda *_: right(golden, 3))
    assert done.failures == ["the process took 5B, above its cap of 4B"]


# What is run where


def test_little_memory_leaves_out_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftests, "_caps", lambda *_: (100 * MIB, 150 * MIB, 0))
    monkeypatch.setattr(selftests, "native_isas", lambda: ("v", ("v", "w", "scalar")))

    def caps(free: int | None) -> tuple[list[tuple[str | None, int]], int]:
        limits = MemoryLimits(None, free, None)
        monkeypatch.setattr(selftests, "memory_limits", lambda: limits)
        runs, skipped = plan_runs("native", Path("store"), 4, 24)
        return [(run.isa, run.cap_nbytes // MIB) for run in runs], len(skipped)

    everything = [("v", 100), ("v", 150), ("w", 100), ("scalar", 100)]
    assert caps(None) == (everything, 0)
    assert caps(1 << 40) == (everything, 0)
    assert caps(120 * MIB) == ([("v", 100), ("v", 120), ("w", 100), ("scalar", 100)], 0)
    assert caps(100 * MIB) == ([("v", 100), ("w", 100), ("scalar", 100)], 1)
    assert caps(99 * MIB) == ([], 1)
    monkeypatch.setattr(selftests, "_caps", lambda *_: (100 * MIB, 150 * MIB, 60 * MIB))
    assert caps(60 * MIB)[0][:2] == [("v", 100), ("v", 120)]  # of which a store takes half
    monkeypatch.setattr(selftests, "native_isas", lambda: ("scalar", ("scalar",)))
    assert caps(None) == ([("scalar", 100), ("scalar", 150)], 0)


def test_where_nothing_fits_the_selftest_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    reason = Skipped("native", "it needs more")
    monkeypatch.setattr(selftests, "plan_runs", lambda *_: ([], [reason]))
    done = selftest(AVAILABLE[0])
    assert not done.ok
    assert done.skipped == [reason]


def test_a_backend_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_importable", lambda: False)
    with pytest.raises(BackendError, match="mlx"):
        selftest("mlx")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mlx_is_tested_in_float32_at_two_caps_and_in_a_gpus_own_numbers(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftests, "_caps", lambda *_: (100 * MIB, 150 * MIB, 0))
    monkeypatch.setattr(selftests, "device_of", lambda _: device)
    runs, skipped = plan_runs("mlx", Path("store"), 4, 24)
    exact = [("f32", 150 * MIB), ("f32", 100 * MIB)]
    wanted = exact if device == "cpu" else [*exact, ("auto", 150 * MIB)]
    assert [(run.activations, run.cap_nbytes) for run in runs] == wanted
    assert not skipped


def test_rounded_activations_may_change_tokens_but_not_lose_numbers(golden: Golden) -> None:
    other = right(golden, 2)
    other["cases"][0]["rows"][0]["token"] += 1
    assert check(other, [golden], 2, None).failures
    found = check(other, [golden], 2, None, rounded=True)
    assert not found.failures
    assert found.tokens_equal == 1
    other["cases"][0]["rows"][1]["logits"] = [math.nan] * 20
    assert check(other, [golden], 2, None, rounded=True).failures


# Temporary files


def test_a_temporary_folder_is_gone_whatever_happens(tmp_path: Path) -> None:
    def interrupted() -> None:
        with temporary_folder(tmp_path / "cache" / "deep", MIB) as folder:
            (folder / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_doctor_left_goes_next_time_and_a_living_ones_stays(tmp_path: Path) -> None:
    (dead := tmp_path / ".aegis-doctor-1-dead").mkdir()
    (dead / "file").touch()
    (other := tmp_path / "somebody's").mkdir()
    with temporary_folder(tmp_path, MIB) as alive, temporary_folder(tmp_path, MIB) as second:
        assert sorted(tmp_path.iterdir()) == sorted([alive, second, other])
    assert list(tmp_path.iterdir()) == [other]


def test_a_disk_is_preferred_to_memory_and_a_writable_folder_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache := tmp_path / "cache").mkdir()
    (other := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(storage.tempfile, "gettempdir", lambda: str(other))
    monkeypatch.setattr(storage, "storage_of", lambda folder: DIRECT)
    with temporary_folder(cache, MIB) as folder:
        assert folder.parent == cache
    monkeypatch.setattr(
        storage, "storage_of", lambda folder: Storage("memory") if folder == cache else DIRECT
    )
    with temporary_folder(cache, MIB) as folder:
        assert folder.parent == other
    monkeypatch.setattr(storage, "is_writable", lambda folder: folder == cache)
    with temporary_folder(cache, MIB) as folder:
        assert folder.parent == cache
    with pytest.raises(AegisError, match="AEGIS_CACHE"), temporary_folder(cache, 1 << 60):
        pass


@pytest.fixture
def selftesting(
    command_env: dict[str, str], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A selftest that has begun to make a temporary store in an empty cache."""
    (cache := tmp_path / "cache").mkdir()
    command = [sys.executable, "-m", "aegis", "doctor", "--selftest", "--no-disk", "-q"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**command_env, "AEGIS_CACHE": str(cache)},
        start_new_session=True,
        # Tests that run in the background of a shell inherit that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 120
        while not list(cache.iterdir()) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, cache
        process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_and_nothing_is_left(
    selftesting: tuple[subprocess.Popen[bytes], Path], number: int, code: int
) -> None:
    process, cache = selftesting
    process.send_signal(number)
    assert process.wait(60) == code
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert list(cache.iterdir()) == []


def test_a_signal_while_a_worker_is_born_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    born: list[subprocess.Popen[bytes]] = []

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        born.append(usual(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return born[0]

    usual = subprocess.Popen
    monkeypatch.setattr(selftests.subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            selftests._ask({"convert": "/nonexistent", "layout": "il16"}, {})
    finally:
        signal.signal(signal.SIGINT, before)
    assert born[0].returncode is not None


def test_a_worker_ends_when_the_doctor_that_started_it_is_gone(tmp_path: Path) -> None:
    """Its stdin ends then, as /dev/null does at once."""
    request = json.dumps({"convert": str(tmp_path / "store"), "layout": "il16"})
    done = subprocess.run(
        [sys.executable, "-m", "aegis.doctor.worker", request],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    assert not (tmp_path / "store").exists()

"""Figures and endings, from the object of --json."""

import subprocess
import sys

import pytest
from command_here import command_here

from aegis.cli.report import check_cap, figures
from aegis.errors import CapExceededError, Note, StoreError

RESULT = {
    "plan": {"cap_nbytes": 1 << 30},
    "prompt_tokens": 40,
    "prompt_tps": 20.0,
    "generation_tokens": 5,
    "generation_tps": 10.0,
    "ttft_s": 0.5,
    "hit_rate": 0.9,
    "read_nbytes_per_token": 1024.0,
    "wait_s": 0.0,
    "peak_nbytes": 1 << 30,
    "given_back": {"slots": 0, "nbytes": 0, "most_nbytes": 0, "times": 0},
}


def test_figures_tell_cached_prompt_tokens_from_computed_ones() -> None:
    assert "40 prompt tokens, 20.0 tok/s" in figures(RESULT)
    assert "40 prompt tokens (30 cached), 20.0 tok/s" in figures(RESULT, 30)


def test_figures_say_what_was_given_back() -> None:
    assert "given back" not in figures(RESULT)
    given = {"slots": 0, "nbytes": 0, "most_nbytes": 6 << 20, "times": 2}
    assert "6 MiB of slots given back" in figures(RESULT | {"given_back": given})


def test_a_peak_above_the_cap_is_an_error_with_its_own_exit_code() -> None:
    check_cap(RESULT)
    with pytest.raises(CapExceededError, match="1073741825B, above the cap of 1073741824B") as told:
        check_cap(RESULT | {"peak_nbytes": (1 << 30) + 1})
    assert told.value.exit_code == 4


def test_without_compiled_kernels_auto_says_why_it_is_slow() -> None:
    code = (
        "import os, sys; sys.modules['aegis.kernels.native._native'] = sys.modules['mlx'] = None; "
        "os.environ.pop('AEGIS_BACKEND'); "
        "from aegis.cli.app import _guarded; sys.exit(_guarded(['plan', '--cap', '1GiB']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "install a C++17 compiler" in done.stderr
    assert "slowly" in done.stderr


def test_a_current_folder_that_was_removed_is_said_to_be() -> None:
    code = (
        "import os, sys, tempfile; folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder);"
        "from aegis.cli.app import _guarded; sys.exit(_guarded(['convert', '-o', 'store']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: the current folder was removed; change to one that is there\n"


def test_of_an_errors_notes_only_those_of_aegis_are_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str | None) -> None:
        error = StoreError("it failed")
        error.add_note("Error calling __set_name__ on 'cached_property' instance 'x' in 'Y'")
        error.add_note(Note("9 MiB are kept"))
        raise error

    monkeypatch.setattr("aegis.cli.source.resolve_model", fail)
    done = command_here(capfd, monkeypatch)("plan", "--cap", "1GiB")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: it failed\n9 MiB are kept\n"

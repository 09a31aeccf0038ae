"""Every instruction set computes the same bits: x86's here, Arm's under an emulator."""

import platform
from pathlib import Path

import pytest
from native_builds import Build, build, build_for_aarch64

if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
    pytest.skip("kernels exist for x86-64 and aarch64", allow_module_level=True)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("here")
    build(folder)
    return Build(folder)


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build_for_aarch64(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def expected(here: Build) -> list[str]:
    return here.digests("scalar")


def differences(lines: list[str], expected: list[str]) -> list[tuple[str, str]]:
    assert len(lines) == len(expected)
    return [pair for pair in zip(lines, expected, strict=True) if pair[0] != pair[1]]


def test_the_instruction_sets_of_this_processor_agree(here: Build, expected: list[str]) -> None:
    for isa in here.run("aegis_digests", "list").split():
        assert differences(here.digests(isa), expected) == []


@pytest.mark.parametrize("isa", ["neon", "scalar"])
def test_aarch64_agrees_with_this_processor(isa: str, aarch64: Build, expected: list[str]) -> None:
    assert isa in aarch64.run("aegis_digests", "list").split()
    assert differences(aarch64.digests(isa), expected) == []


def test_more_threads_than_processors_give_the_same_bits(here: Build, expected: list[str]) -> None:
    best = here.run("aegis_digests", "list").split()[0]
    for threads in (2, 8):
        assert differences(here.digests(best, threads), expected) == []


def test_pools_keep_their_promises_under_load(here: Build) -> None:
    assert here.run("aegis_stress") == "ok\n"


@pytest.mark.parametrize("environment", ["flush", "down", "up", "zero", "traps"])
def test_a_foreign_floating_point_environment_changes_no_bit(
    environment: str, here: Build, expected: list[str]
) -> None:
    best = here.run("aegis_digests", "list").split()[0]
    assert differences(here.digests(best, 2, environment), expected) == []


@pytest.mark.parametrize("environment", ["flush", "up", "half"])
def test_nor_does_one_on_aarch64(environment: str, aarch64: Build, expected: list[str]) -> None:
    assert differences(aarch64.digests("neon", 2, environment), expected) == []


def test_the_extension_for_aarch64_is_one(aarch64: Build) -> None:
    (module,) = aarch64.folder.glob("_native*.so")
    header = Path(module).read_bytes()[:20]
    assert header[:5] == b"\x7fELF\x02"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64

"""The thread pool and the read pool under load, watched by ThreadSanitizer."""

import pytest
from native_builds import Build, build


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("watched")
    build(folder, "aegis_stress", "aegis_stress_blocks", AEGIS_SANITIZE="thread")
    return Build(folder)


def test_pools_keep_their_promises_under_load_without_a_race(watched: Build) -> None:
    assert watched.run("aegis_stress") == "ok\n"


def test_the_threads_of_every_block_write_no_place_together(watched: Build) -> None:
    assert watched.run("aegis_stress_blocks") == "ok\n"

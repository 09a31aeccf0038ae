"""The thread pool and the read pool under load, watched by ThreadSanitizer."""

from pathlib import Path

from native_builds import Build, build


def test_pools_keep_their_promises_under_load_without_a_race(tmp_path: Path) -> None:
    build(tmp_path, "aegis_stress", AEGIS_SANITIZE="thread")
    assert Build(tmp_path).run("aegis_stress") == "ok\n"

"""The drawing of a bench is XML that shows every row."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

TOOL = Path(__file__).resolve().parents[2] / "tools" / "plot_bench.py"
SVG = "{http://www.w3.org/2000/svg}"


if not TOOL.is_file():
    pytest.skip("tools are not part of what is installed", allow_module_level=True)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_bench", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plot = load()


def row(cap: int, test: str, tps: float = 5.0, **changed: Any) -> dict[str, Any]:
    same = {"experts": "4bit", "guess_width": 6, "threads": 2, "io_threads": 2, "feasible": True}
    return {**same, "cap_nbytes": cap, "test": test, "tps": tps, "tps_sd": 0.5, "hit_rate": 0.5} | (
        changed
    )


def test_every_row_has_its_points_inside_of_the_drawing(tmp_path: Path) -> None:
    caps = [2 << 30, 3 << 30, 5 << 30]
    rows = [
        row(cap, test, experts=bits)
        for cap in caps
        for test in ("pp512", "tg128")
        for bits in ("4bit", "3bit")
    ]
    rows.append({"feasible": False, "cap_nbytes": 1})
    source, target = tmp_path / "bench.json", tmp_path / "bench.svg"
    source.write_text(json.dumps({"model": "a <model> & more", "rows": rows}))
    plot.main([str(source), "-o", str(target)])
    svg = ET.parse(target).getroot()
    assert svg.tag == f"{SVG}svg"
    # A point for each speed and for each hit rate.
    dots = svg.findall(f"{SVG}circle")
    assert len(dots) == 2 * 12
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    for dot in dots:
        assert 0 < float(dot.get("cx", 0)) < width
        assert 0 < float(dot.get("cy", 0)) < height
    texts = {text.text for text in svg.findall(f"{SVG}text")}
    assert {"2 GiB", "3 GiB", "5 GiB", "— tg128 3bit", "— pp512 4bit", "hits, %"} <= texts
    assert len(svg.findall(f"{SVG}polyline")) == 2 + 2 + 4


def test_models_of_several_files_are_told_apart() -> None:
    documents = [{"model": name, "rows": [row(1 << 28, "tg8")]} for name in ("a<b", "c&d")]
    svg = ET.fromstring(ET.tostring(plot.drawing(plot.rows_of(documents))))
    texts = {text.text for text in svg.findall(f"{SVG}text")}
    assert {"— tg8 a<b", "— tg8 c&d", "256 MiB"} <= texts


@given(st.floats(1e-6, 1e9))
def test_an_axis_ends_at_a_round_number_that_is_not_below(most: float) -> None:
    top = plot.nice(most)
    assert most <= top <= 2 * most * (1 + 1e-9)


def test_nothing_measured_is_told() -> None:
    with pytest.raises(SystemExit, match="no row that was measured"):
        plot.drawing([])

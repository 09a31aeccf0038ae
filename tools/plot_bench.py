"""Draw what ``aegis bench -o json`` measured: tokens per second and hits over caps, as an SVG.

    aegis bench --cap 2GiB..6GiB -o json > bench.json
    python tools/plot_bench.py bench.json [MORE.json ...] -o bench.svg

One curve for each test and each combination of experts, guess width and threads that has more than
one value; bars are the standard deviation over repetitions. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
Point = tuple[float, float, float]
"""Cap in GiB, value, standard deviation."""

GIB = 1 << 30
WIDTH, PANEL, LEFT, TOP, GAP = 720, 230, 70, 40, 60
RIGHT = 24
TICKS = 5
COLOURS = ("#0b6e99", "#d1622b", "#4b8b3b", "#7b4fa3", "#b33951", "#5c5c5c", "#a98600", "#2a9d8f")
NAMED = (("model", ""), ("experts", ""), ("guess_width", "width "), ("threads", "threads "))
NAMED += (("io_threads", "io "),)


class Curve(NamedTuple):
    """The rows of one test and one configuration, at several caps."""

    name: str
    points: list[Point]


class Panel(NamedTuple):
    """A pair of axes, from zero to ``top``."""

    title: str
    top: float
    curves: list[Curve]


def rows_of(documents: Iterable[Row]) -> list[Row]:
    """Rows that were measured, each with its model."""
    return [
        {"model": document["model"], **row}
        for document in documents
        for row in document["rows"]
        if row["feasible"]
    ]


def names_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What tells rows apart, apart from cap and test."""
    return [(key, label) for key, label in NAMED if len({row[key] for row in rows}) > 1]


def curves(rows: Sequence[Row], value: Callable[[Row], float], sd: str | None) -> list[Curve]:
    """One curve per configuration, its points by cap."""
    varied = names_of(rows)
    found: dict[str, list[Point]] = {}
    for row in rows:
        told = (f"{label}{'auto' if row[key] is None else row[key]}" for key, label in varied)
        name = " ".join([row["test"], *told])
        point = row["cap_nbytes"] / GIB, value(row), row[sd] if sd else 0.0
        found.setdefault(name, []).append(point)
    return [Curve(name, sorted(points)) for name, points in found.items()]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Speeds of prompts and of tokens, which are far apart, and hits."""
    found = []
    for prefix, title in (("tg", "tokens/s, one by one"), ("pp", "tokens/s of prompts")):
        of_test = [row for row in rows if row["test"].startswith(prefix)]
        if of_test:
            speeds = curves(of_test, lambda row: float(row["tps"]), "tps_sd")
            most = max(value + sd for curve in speeds for _, value, sd in curve.points)
            found.append(Panel(title, nice(most), speeds))
    hits = curves(rows, lambda row: 100 * float(row["hit_rate"]), None)
    return [*found, Panel("hits, %", 100.0, hits)]


def nice(most: float) -> float:
    """A round number that is not below."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 7.5, 10) if step * power >= most)


def drawing(rows: Sequence[Row]) -> ET.Element:
    """All panels below each other."""
    if not rows:
        raise SystemExit("there is no row that was measured; run aegis bench at larger caps")
    drawn = panels(rows)
    lines = sum(len(panel.curves) for panel in drawn)
    height = TOP + len(drawn) * (PANEL + GAP) + 16 * lines
    svg = ET.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=str(WIDTH),
        height=str(height),
        viewBox=f"0 0 {WIDTH} {height}",
    )
    svg.set("font-family", "sans-serif")
    svg.set("font-size", "12")
    ET.SubElement(svg, "rect", width="100%", height="100%", fill="white")
    caps = [row["cap_nbytes"] / GIB for row in rows]
    y = TOP
    for panel in drawn:
        y = _draw(svg, panel, y, min(caps), max(caps))
    return svg


def _draw(svg: ET.Element, panel: Panel, top: float, low: float, high: float) -> float:
    """One panel and its legend; returns where the next one begins."""

    def x_of(cap: float) -> float:
        share = (cap - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return top + PANEL * (1 - value / panel.top)

    _text(svg, LEFT, top - 10, panel.title, weight="bold")
    for tick in range(TICKS + 1):
        value = panel.top * tick / TICKS
        _line(svg, LEFT, y_of(value), WIDTH - RIGHT, y_of(value), "#dddddd")
        _text(svg, LEFT - 8, y_of(value) + 4, f"{value:g}", anchor="end")
    for cap in sorted({point[0] for curve in panel.curves for point in curve.points}):
        _line(svg, x_of(cap), top + PANEL, x_of(cap), top + PANEL + 5, "#888888")
        _text(svg, x_of(cap), top + PANEL + 18, size_of(cap), anchor="middle")
    for index, curve in enumerate(panel.curves):
        colour = COLOURS[index % len(COLOURS)]
        places = [(x_of(cap), y_of(value)) for cap, value, _ in curve.points]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        ET.SubElement(svg, "polyline", points=points, fill="none", stroke=colour)
        for (cap, value, sd), (x, y) in zip(curve.points, places, strict=True):
            dot = ET.SubElement(svg, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="3", fill=colour)
            ET.SubElement(dot, "title").text = f"{curve.name}, {size_of(cap)}: {value:.2f}"
            if sd:
                _line(svg, x, y_of(value - sd), x, y_of(value + sd), colour)
        _text(svg, LEFT, top + PANEL + 38 + 16 * index, f"— {curve.name}", fill=colour)
    return top + PANEL + GAP + 16 * len(panel.curves)


def size_of(cap: float) -> str:
    """A cap in GiB, or in MiB where it is small."""
    return f"{cap:.4g} GiB" if cap >= 1 else f"{cap * 1024:.4g} MiB"


def _line(svg: ET.Element, x1: float, y1: float, x2: float, y2: float, stroke: str) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    ET.SubElement(svg, "line", {k: f"{v:.1f}" for k, v in ends.items()}, stroke=stroke)


def _text(
    svg: ET.Element,
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = "#333333",
) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "font-weight": weight}
    ET.SubElement(svg, "text", place, fill=fill).text = text


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files and write the drawing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="SVG")
    options = parser.parse_args(arguments)
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in options.files]
    svg = drawing(rows_of(documents))
    ET.indent(svg)
    options.output.write_bytes(ET.tostring(svg, encoding="utf-8", xml_declaration=True))


if __name__ == "__main__":
    main()

"""Draws the panels of a Grafana dashboard from results of Prometheus, as one SVG.

The picture is as wide as a page of the book, in two columns, so that its text is readable without
zooming. Lines that are always 0 are counted in the legend, not drawn.
"""
import math
import re
from xml.sax.saxutils import escape

WIDTH, COLUMNS, GAP = 750, 2, 14
PANEL_WIDTH = (WIDTH - GAP * (COLUMNS + 1)) / COLUMNS
LEFT, PLOT_HEIGHT, TITLE, AXIS, LEGEND_ROW = 62, 120, 26, 22, 15
LEGEND_WIDE = 24  # if a name has more characters, the legend has one column
# Colours that people with colour blindness can tell apart.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
           "#8c6d31"]
DECIMAL = [(1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")]
BINARY = [(2 ** 30, "Gi"), (2 ** 20, "Mi"), (2 ** 10, "Ki"), (1, "")]
TIME = [(1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")]


def svg(dashboard, result):
    """Returns the picture."""
    lines_of = {panel["title"]: [] for panel in dashboard["panels"]}
    for found in result["results"]:
        lines_of[found["panel"]] += lines(found, result["began"])
    seconds = result["ended"] - result["began"]
    drawn, top = [], GAP
    titled = dashboard["panels"]
    for row in range(0, len(titled), COLUMNS):
        pair = titled[row:row + COLUMNS]
        heights = [height(lines_of[panel["title"]]) for panel in pair]
        for column, panel in enumerate(pair):
            left = GAP + column * (PANEL_WIDTH + GAP)
            unit = panel["fieldConfig"]["defaults"]["unit"]
            title = panel["title"]
            drawn.append(f'<g transform="translate({left:.0f} {top:.0f})">'
                         f'{draw(title, unit, lines_of[title], seconds)}</g>')
        top += max(heights) + GAP
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" '
            f'width="{WIDTH}" height="{top:.0f}" font-family="sans-serif" font-size="11">\n'
            '<rect width="100%" height="100%" fill="white"/>\n'
            + "\n".join(drawn) + "\n</svg>\n")


def lines(found, began):
    """Returns a name and points for each series. The legend names labels in braces."""
    for series in found["series"]:
        labels = series["metric"]
        name = re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), found["legend"])
        points = [(at - began, float(value))
                  for at, value in series["values"] if value != "NaN"]
        if points:
            yield name, points


def shown(all_lines):
    return [line for line in all_lines if any(value for _, value in line[1])]


def legend(all_lines):
    zero = len(all_lines) - len(shown(all_lines))
    names = [name for name, _ in shown(all_lines)]
    return names + ([f"{zero} more: 0" if names else f"all {zero}: 0"] if zero else [])


def legend_columns(all_lines):
    return 1 if any(len(name) > LEGEND_WIDE for name in legend(all_lines)) else 2


def height(all_lines):
    rows = math.ceil(len(legend(all_lines)) / legend_columns(all_lines))
    return TITLE + PLOT_HEIGHT + AXIS + rows * LEGEND_ROW + 6


def draw(title, unit, all_lines, seconds):
    drawn = shown(all_lines)
    most = max((value for _, points in drawn for _, value in points), default=1)
    step = nice_step(most, unit)
    top = math.ceil(most / step - 1e-9) * step or step
    right, bottom = PANEL_WIDTH - 10, TITLE + PLOT_HEIGHT
    x = lambda at: LEFT + (right - LEFT) * at / seconds
    y = lambda value: bottom - PLOT_HEIGHT * value / top
    out = [f'<rect width="{PANEL_WIDTH:.0f}" height="{height(all_lines):.0f}" fill="none" '
           'stroke="#ccc"/>'
           f'<text x="8" y="17" font-size="13" font-weight="bold">{escape(title)}</text>']
    for tick in range(round(top / step) + 1):
        at = y(tick * step)
        out.append(f'<path d="M{LEFT} {at:.1f}H{right:.0f}" stroke="#e4e4e4"/>'
                   f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">'
                   f'{label(tick * step, unit)}</text>')
    every = nice_step(seconds * 0.8, "short")
    for tick in range(int(seconds / every) + 1):
        at = x(tick * every)
        out.append(f'<path d="M{at:.1f} {TITLE}V{bottom}" stroke="#f0f0f0"/>'
                   f'<text x="{at:.1f}" y="{bottom + 15}" '
                   f'text-anchor="{"end" if at > right - 12 else "middle"}">'
                   f'{tick * every:g} s</text>')
    for (_, points), colour in zip(drawn, colours()):
        path = "L".join(f"{x(at):.1f} {y(value):.1f}" for at, value in points)
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for index, (name, colour) in enumerate(zip(legend(all_lines), colours())):
        row, column = divmod(index, legend_columns(all_lines))
        left = 8 + column * (PANEL_WIDTH - 8) / 2
        base = bottom + AXIS + (row + 1) * LEGEND_ROW - 4
        if index < len(drawn):
            out.append(f'<path d="M{left:.0f} {base - 4:.0f}h12" stroke="{colour}" '
                       'stroke-width="3"/>')
        out.append(f'<text x="{left + 16:.0f}" y="{base:.0f}" fill="#333">{escape(name)}</text>')
    return "".join(out)


def colours():
    while True:
        yield from COLOURS


def scale(value, unit):
    """Returns the factor of a unit and its name, for a value of about this size."""
    units = TIME if unit == "s" else BINARY if unit == "bytes" else DECIMAL
    return next(((factor, name) for factor, name in units if value >= factor), units[-1])


def nice_step(most, unit):
    """Returns the distance of the lines: 1, 2 or 5 times a power of ten, about four of them."""
    factor, _ = scale(most, unit)
    raw = most / factor / 4
    power = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1
    return next(nice * power for nice in (1, 2, 5, 10) if nice * power >= raw * 0.99) * factor


def label(value, unit):
    if value == 0:
        return "0"
    factor, name = scale(value, unit)
    end = {"s": "", "bytes": "B", "Bps": "B/s", "ops": "/s"}.get(unit, "")
    number = f"{value / factor:.3g}"
    return f"{number} {name}{end}" if name or end not in ("", "/s") else f"{number}{end}"

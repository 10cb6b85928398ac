"""Plots as SVG, drawn as steps/cli/plot.cpp draws those of `flashsteps bench --plot` and `profile --plot`: same sizes, same
colours, so that a reader's own plot can be held beside these."""
import math

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 48, 56
PANEL = WIDTH - LEFT - RIGHT  # width of what is inside the axes
GAP = 34                      # between two panels
# Colours that stay apart for colour-blind readers. (Okabe and Ito 2008)
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]


class Series:
    """A line of points (x, y); `dashed` for what is not measured, `ends` for a word behind the last point."""

    def __init__(self, name, points, dashed=False, ends=""):
        self.name, self.points, self.dashed, self.ends = name, sorted(points), dashed, ends


def escaped(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(x):
    return f"{x:.6g}"


def length_label(n):
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{short(n / size)}{unit}"
    return short(n)


def round_up(x):
    """The smallest of 1, 2, 5 times a power of ten that is at least x."""
    power = 10 ** math.floor(math.log10(x))
    return next((step * power for step in (1, 2, 5) if step * power >= x * 0.999999), 10 * power)


def head(width, height, title):
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {short(width)} {short(height)}" font-family="sans-serif" font-size="13" '
            'fill="#222">', '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{LEFT}" y="26" font-size="16">{escaped(title)}</text>']


def y_ticks(lowest, most, logarithmic):
    """Ticks from the bottom of the axis to its top, and where a value lies between them: 0 to 1."""
    if not logarithmic:
        step = round_up(max(most, 1e-9) / 5)
        ticks = [i * step for i in range(math.ceil(max(most, 1e-9) / step) + 1)]
        return ticks, lambda y: y / ticks[-1]
    low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(most))
    return [10.0 ** e for e in range(low, high + 1)], lambda y: (math.log10(y) - low) / (high - low)


def line_plot(title, x_label, y_label, panels, logarithmic=False, x_logarithmic=True, foot=()):
    """Panels side by side, (heading, series) each, with one y axis and one legend; lines of `foot` below."""
    points = [p for _, series in panels for s in series for p in s.points]
    ticks, height_of = y_ticks(min(y for _, y in points), max(y for _, y in points), logarithmic)
    scale = math.log2 if x_logarithmic else float
    names = list(dict.fromkeys(s.name for _, series in panels for s in series))
    legend = max(RIGHT, 50 + 6.2 * max(map(len, names)))  # the names are of 11 points
    axes = LEFT + len(panels) * PANEL + (len(panels) - 1) * GAP
    width = axes + legend
    top = TOP + (14 if len(panels) > 1 else 0)
    place_y = lambda y: HEIGHT - BOTTOM - height_of(y) * (HEIGHT - top - BOTTOM)
    svg = head(width, HEIGHT + 16 * len(foot), title)
    for number, (heading, series) in enumerate(panels):
        left = LEFT + number * (PANEL + GAP)
        xs = sorted({x for s in series for x, _ in s.points})
        low, high = scale(xs[0]), scale(xs[-1])
        place_x = lambda x: left + (scale(x) - low) / ((high - low) or 1) * PANEL
        if len(panels) > 1:
            svg.append(f'<text x="{short(left)}" y="46">{escaped(heading)}</text>')
        for y in ticks:
            svg.append(f'<line x1="{short(left)}" x2="{short(left + PANEL)}" y1="{short(place_y(y))}" y2="{short(place_y(y))}" stroke="#ddd"/>')
            if number == 0:
                svg.append(f'<text x="{short(left - 8)}" y="{short(place_y(y) + 4)}" text-anchor="end">{short(y)}</text>')
        shown = xs if x_logarithmic else [x for x in xs if x == xs[0] or x % 10 == 0]
        svg += [f'<text x="{short(place_x(x))}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{length_label(x)}</text>' for x in shown]
        svg.append(f'<text x="{short(left + PANEL / 2)}" y="{HEIGHT - 14}" text-anchor="middle">{escaped(x_label)}</text>')
        for s in series:
            colour = COLOURS[names.index(s.name) % len(COLOURS)]
            dash = ' stroke-dasharray="6 4"' if s.dashed else ""
            path = " ".join(f"{short(place_x(x))},{short(place_y(y))}" for x, y in s.points)
            svg.append(f'<polyline fill="none" stroke-width="2" stroke="{colour}"{dash} points="{path}"/>')
            if not s.dashed:
                svg += [f'<circle r="3" fill="{colour}" cx="{short(place_x(x))}" cy="{short(place_y(y))}"/>' for x, y in s.points]
            if s.ends:
                x, y = s.points[-1]
                svg.append(f'<text x="{short(place_x(x) - 6)}" y="{short(place_y(y) - 8)}" font-size="11" text-anchor="end" fill="{colour}">'
                           f'{escaped(s.ends)}</text>')
    svg.append(f'<text transform="translate(18 {short((TOP + HEIGHT - BOTTOM) / 2)}) rotate(-90)" text-anchor="middle">{escaped(y_label)}</text>')
    dashed = {s.name for _, series in panels for s in series if s.dashed}
    for i, name in enumerate(names):
        y, x = top + 10 + 20 * i, axes
        dash = ' stroke-dasharray="6 4"' if name in dashed else ""
        svg.append(f'<line stroke-width="2" stroke="{COLOURS[i % len(COLOURS)]}"{dash} x1="{short(x + 14)}" x2="{short(x + 34)}" y1="{y}" '
                   f'y2="{y}"/><text font-size="11" x="{short(x + 40)}" y="{y + 4}">{escaped(name)}</text>')
    svg += [f'<text x="{LEFT}" y="{HEIGHT + 16 * i + 6}" font-size="11" fill="#666">{escaped(line)}</text>' for i, line in enumerate(foot)]
    return "\n".join(svg + ["</svg>"]) + "\n"


def bar_plot(title, label, bars, logarithmic=False, foot=()):
    """Lying bars, one below the other: (name, value, colour number), with the value at their ends."""
    names, values, row = 340, 60, 24
    most = max(value for _, value, _ in bars)
    ticks, place_of = y_ticks(min(value for _, value, _ in bars), most, logarithmic) if logarithmic else ([], lambda x: x / most)
    place = lambda x: names + place_of(x) * (WIDTH - names - values)
    height = TOP + row * len(bars) + 40 + 16 * len(foot)
    svg = head(WIDTH, height, title)
    svg[-1] = svg[-1].replace(f'x="{LEFT}"', 'x="16"')
    bottom = TOP + row * len(bars)
    for tick in ticks:
        svg.append(f'<line x1="{short(place(tick))}" x2="{short(place(tick))}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>'
                   f'<text x="{short(place(tick))}" y="{bottom + 16}" font-size="11" text-anchor="middle">{short(tick)}</text>')
    for i, (name, value, colour) in enumerate(bars):
        y = TOP + row * i
        svg.append(f'<text x="{names - 8}" y="{y + 15}" text-anchor="end">{escaped(name)}</text><rect x="{names}" y="{y + 3}" '
                   f'width="{short(place(value) - names)}" height="16" fill="{COLOURS[colour]}"/><text x="{short(place(value) + 6)}" y="{y + 15}">'
                   f'{value:.3g}</text>')
    svg.append(f'<text x="{names}" y="{bottom + 32}">{escaped(label)}</text>')
    svg += [f'<text x="16" y="{bottom + 50 + 16 * i}" font-size="11" fill="#666">{escaped(line)}</text>' for i, line in enumerate(foot)]
    return "\n".join(svg + ["</svg>"]) + "\n"

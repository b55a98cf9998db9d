"""Plot of the frontier: bytes of KV cache against loss, one line for each rule and format. Needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path

from h2o_flexgen.evaluation.extras import save
from h2o_flexgen.policy import MIB

#: of the lines, in the order of the rules; the markers tell them apart in black and white
COLOURS = ("#d9480f", "#1c7ed6", "#2b8a3e", "#9c36b5", "#e8a200", "#0b7285", "#868e96", "#c2255c", "#495057", "#74b816")
MARKERS = "os^Dv<>Pph"


def draw(result: dict, path: str | Path) -> None:
    """Plot the results of `perplexity.measure`, as `h2o-flexgen quality --output` writes them, as a PNG. Raises
    UserError if the file cannot be written."""
    from matplotlib.figure import Figure

    full, *rows = result["rows"]  # the full cache comes first
    fig = Figure(figsize=(7.5, 4.8), layout="constrained")
    ax = fig.subplots()
    for n, label in enumerate(dict.fromkeys(map(_label, rows))):
        points = sorted((row["kv_bytes"] / MIB, 100 * row["rise"]) for row in rows if _label(row) == label)
        look = {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)], "markersize": 5}
        ax.plot(*zip(*points), label=label, **look)
    ax.plot(full["kv_bytes"] / MIB, 0, "*", color="black", markersize=13, clip_on=False, zorder=3)
    ax.annotate("full cache", (full["kv_bytes"] / MIB, 0), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    _scale(ax, rows)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel("KV cache of a sequence, MiB")
    ax.set_ylabel("rise of the perplexity over the full cache")
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:+.0f} %" if y else "0 %")
    ax.grid(alpha=0.25)
    ax.spines["right"].set_visible(False)
    if rows:
        _slots_on_top(ax, rows)
        ax.legend(title="rule", fontsize=9, title_fontsize=9, frameon=False)
    ax.set_title(textwrap.fill(title(result), 90), fontsize=9)
    save(fig, path, dpi=120)


def title(result: dict) -> str:
    """What was measured."""
    w = result["workload"]
    lengths = f"prompts of up to {w['prompt_len']} tokens, up to {w['gen_len']} scored"
    return f"{w['model']} in {w['dtype']}, {w['passages']} passages of {', '.join(w['texts'])}: {lengths}"


def _label(row: dict) -> str:
    """Legend entry of a rule and a cache format."""
    return row["rule"] + (f", {row['compress_cache']}" if row.get("compress_cache") else "")


def _scale(ax, rows: list[dict]) -> None:
    """Linear; where a line goes far beyond a rise of 10 %, logarithmic above that."""
    highest = max((100 * row["rise"] for row in rows), default=0.0)
    if highest > 60:
        ax.set_yscale("symlog", linthresh=10)
        ax.set_yticks([0, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000])
        ax.minorticks_off()
    ax.set_ylim(min([0.0, *(100 * row["rise"] for row in rows)]) - 1, max(1.0, 1.15 * highest))


def _slots_on_top(ax, rows: list[dict]) -> None:
    """A second axis at the top, with the slots of the budgets."""
    if len({row.get("compress_cache") for row in rows}) > 1:  # in several formats the same bytes are different slots
        return
    places = {row["slots"]: row["kv_bytes"] / MIB for row in rows}
    top = ax.secondary_xaxis("top")
    top.set_xticks(list(places.values()), [str(slots) for slots in places])
    top.minorticks_off()
    top.set_xlabel("slots")

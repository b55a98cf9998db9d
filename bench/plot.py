"""Draw docs/throughput.png and docs/quality_*.png. Needs matplotlib (the extra `plot`).

python -m bench.plot
"""

from __future__ import annotations

import matplotlib

from bench.common import ROOT, load_result
from bench.rows import QUANTISED
from bench.tables import best, gain, gain_text, job_text, rows_measured
from h2o_flexgen.evaluation.figure import draw

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

#: system -> colour of its bar, in drawing order; peers are grey
COLOURS = {
    "transformers": "#d0d0d0",
    "Accelerate": "#b0b0b0",
    "ZeRO-Inference": "#909090",
    "FlexGen": "#707070",
    "llama.cpp": "#505050",
    "ours, full cache": "#8fbbe0",
    "ours, H2O": "#f0a070",
    QUANTISED: "#d9480f",
}
#: width of a bar, as a fraction of the distance between rows
WIDTH = 0.12


def plot_throughput(rows: list[dict]) -> None:
    """Bars of generated tokens/s for every system, grouped by row, under the gain of our best over the best peer."""
    fig, ax = plt.subplots(figsize=(1.4 * len(rows), 4.4), layout="constrained")
    for x, data in enumerate(rows):
        found = best(data)
        rates = {name: found[name][0] for name in COLOURS if name in found}
        positions = [x + (n - (len(rates) - 1) / 2) * WIDTH for n in range(len(rates))]
        bars = ax.bar(positions, rates.values(), WIDTH * 0.92, color=[COLOURS[name] for name in rates])
        ax.bar_label(bars, [f"{rate:.1f}" for rate in rates.values()], fontsize=7, color="#444444")
        ours = {"color": COLOURS[QUANTISED], "weight": "bold", "ha": "center"}
        ax.annotate(gain_text(data), (positions[-1], max(rates.values())), (0, 14), textcoords="offset points", **ours)
    labels = [f"{job_text(data['job'])} tokens\nin {ram_text(data)}".replace(", ", "\n") for data in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=8)
    ax.set_ylabel("generated tokens per second")
    ax.set_title("Two CPU cores. Bold: the best of ours over the best other system", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(y=0.12)
    measured = set().union(*map(best, rows))
    shown = [name for name in COLOURS if name in measured]
    patches = [Patch(color=COLOURS[name]) for name in shown]
    fig.legend(patches, shown, loc="outside lower center", ncols=len(shown), fontsize=9, frameon=False)
    fig.savefig(ROOT / "docs" / "throughput.png", dpi=120)


def ram_text(data: dict) -> str:
    """The memory that a row's runs had: the cap, or all of the machine's."""
    return f"{data['job']['cap_gib'] or data['machine']['ram_gib']:g} GiB"


if __name__ == "__main__":
    plot_throughput([data for data in rows_measured() if data["job"]["device"] == "cpu" and gain(data)])
    draw(load_result("quality_demo"), ROOT / "docs" / "quality_demo.png")

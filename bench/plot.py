"""Draw docs/throughput.png, docs/frontier.png and docs/quality_*.png. Needs matplotlib (the extra `plot`).

python -m bench.plot
"""

from __future__ import annotations

import textwrap

import matplotlib

from bench.common import ROOT, stored
from bench.rows import QUANTISED
from bench.tables import best, cap_text, gain_text, job_text, machine_text, rows_measured
from h2o_flexgen.evaluation.figure import draw

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

#: of the systems' bars, in their order: grey for the others
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
#: of a bar, in units of a row
WIDTH = 0.12


def plot_throughput(rows: list[dict]) -> None:
    """Generated tokens/s of every system, bars for each row; above them the best of ours over the best peer."""
    fig, ax = plt.subplots(figsize=(10, 4.2), layout="constrained")
    for x, data in enumerate(rows):
        found = best(data)
        rates = {name: found[name][0] for name in COLOURS if name in found}
        places = [x + (n - (len(rates) - 1) / 2) * WIDTH for n in range(len(rates))]
        bars = ax.bar(places, rates.values(), WIDTH * 0.92, color=[COLOURS[name] for name in rates])
        ax.bar_label(bars, [f"{rate:.1f}" for rate in rates.values()], fontsize=8, color="#444444")
        ours = {"color": COLOURS[QUANTISED], "weight": "bold", "ha": "center"}
        ax.annotate(gain_text(data), (places[-1], max(rates.values())), (0, 14), textcoords="offset points", **ours)
    labels = [f"{job_text(data['job'])} tokens\nin {ram_text(data)}".replace(", ", "\n") for data in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=9)
    ax.set_ylabel("generated tokens per second")
    ax.set_title("Two CPU cores. Bold: the best of ours over the best other system", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(y=0.12)
    shown = [name for name in COLOURS if any(name in best(data) for data in rows)]
    patches = [Patch(color=COLOURS[name]) for name in shown]
    fig.legend(patches, shown, loc="outside lower center", ncols=len(shown), fontsize=9, frameon=False)
    fig.savefig(ROOT / "docs" / "throughput.png", dpi=120)


def ram_text(data: dict) -> str:
    """The memory of a row's runs: the cap, or all that the machine has."""
    return f"{data['job']['cap_gib'] or data['machine']['ram_gib']:g} GiB"


def plot_frontier(data: dict) -> None:
    """Our throughput over the seconds of a block."""
    fig, ax = plt.subplots(figsize=(5, 4), layout="constrained")
    for system in dict.fromkeys(p["system"] for p in data["points"]):
        points = [p for p in data["points"] if p["system"] == system]
        ax.plot([p["seconds"]["median"] for p in points], [p["tokens_per_s"] for p in points], "o-", label=system)
        for p in points:
            ax.annotate(p["sequences"], (p["seconds"]["median"], p["tokens_per_s"]), fontsize=7)
    name = f"{job_text(data['job'])}, cap {cap_text(data['job'])}, {machine_text(data['machine'])}"
    ax.set_title(textwrap.fill(name, 60), fontsize=8)
    ax.set(xlabel="seconds of a block (its sequences at the points)", ylabel="generated tokens/s")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8)
    fig.savefig(ROOT / "docs" / "frontier.png", dpi=120)


if __name__ == "__main__":
    plot_throughput([data for data in rows_measured() if data["job"]["device"] == "cpu"])
    plot_frontier(stored("frontier"))
    draw(stored("quality_demo"), ROOT / "docs" / "quality_demo.png")

"""Draw docs/throughput.png and docs/frontier.png from docs/benchmarks. Needs matplotlib (the extra `plot`).

python -m bench.plot
"""

from __future__ import annotations

import textwrap

import matplotlib

from bench.common import ROOT, stored
from bench.tables import cap_text, job_text, machine_text, rows_measured

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def plot_throughput(rows: list[dict]) -> None:
    """Generated tokens/s of every system, a group of bars for each row, batches on them."""
    systems = list(dict.fromkeys(system for data in rows for system in data["systems"]))
    width = 0.8 / len(systems)
    fig, ax = plt.subplots(figsize=(2.5 + 2 * len(rows), 4.5), layout="constrained")
    for n, system in enumerate(systems):
        found = [data["systems"].get(system, {}) for data in rows]
        places = [x + (n - len(systems) / 2 + 0.5) * width for x in range(len(rows))]
        rates = [f.get("tokens_per_s", {"median": 0})["median"] for f in found]
        drawn = ax.bar(places, rates, width, label=system)
        ax.bar_label(drawn, [f.get("batch", "") for f in found], fontsize=7)
    labels = [
        f"{job_text(d['job'])}\ncap: {cap_text(d['job'])}\n{textwrap.fill(machine_text(d['machine']), 24)}"
        for d in rows
    ]
    ax.set_xticks(range(len(rows)), labels, fontsize=8)
    ax.set_ylabel("generated tokens/s (batch on the bar)")
    fig.legend(fontsize=8, ncols=len(systems), loc="outside upper center")
    fig.savefig(ROOT / "docs" / "throughput.png", dpi=120)


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
    plot_throughput(rows_measured())
    plot_frontier(stored("frontier"))

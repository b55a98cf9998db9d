"""Draw docs/throughput.png and docs/frontier.png from docs/benchmarks/throughput_*.json. Needs matplotlib.

throughput: generated tokens/s of every system, a panel for each machine, a group of bars for each row, batches on them
frontier: our throughput over the seconds of a block, full cache and H2O, a panel for each row that has been swept
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from make_tables import by_machine, cap_text, job_text, load  # noqa: E402
from throughput_rows import speed, summarise  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"


def plot_throughput(rows: list[dict]) -> None:
    machines = by_machine(rows)
    counts = [len(of_it) for of_it in machines.values()]
    fig, axes = plt.subplots(
        1, len(machines), figsize=(2.5 + 2 * sum(counts), 4.5), width_ratios=counts, squeeze=False, layout="constrained"
    )
    systems = list(dict.fromkeys(system for data in rows for system in data["row"]["systems"]))
    for ax, (machine, of_it) in zip(axes[0], machines.items()):
        bars(ax, of_it, systems)
        ax.set_title(textwrap.fill(machine, 24 * len(of_it)), fontsize=8)
    axes[0][0].set_ylabel("generated tokens/s (batch on the bar)")
    fig.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, ncols=len(systems), loc="outside upper center")
    write(fig, "throughput.png")


def bars(ax, rows: list[dict], systems: list[str]) -> None:
    summaries, width = [summarise(data) for data in rows], 0.8 / len(systems)
    for n, system in enumerate(systems):
        found = [summary.get(system, {}) for summary in summaries]
        places = [x + (n - len(systems) / 2 + 0.5) * width for x in range(len(rows))]
        drawn = ax.bar(places, [f.get("tokens_per_s", 0) for f in found], width, label=system)
        ax.bar_label(drawn, [f.get("batch", "") for f in found], fontsize=7)
    labels = [f"{job_text(data['row'])}\ncap: {cap_text(data['row'])}" for data in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=8)


def plot_frontier(rows: list[dict]) -> None:
    swept = [
        (f"{job_text(data['row'])}, {data['machine']['processor']}", runs)
        for data in rows
        if (runs := [r for r in data["runs"] if "block" in r["options"]])
    ]
    if not swept:
        return
    fig, axes = plt.subplots(1, len(swept), figsize=(1 + 4 * len(swept), 4), squeeze=False, layout="constrained")
    for ax, (name, runs) in zip(axes[0], swept):
        for system in dict.fromkeys(r["system"] for r in runs):
            mine = sorted((r for r in runs if r["system"] == system and "failed" not in r), key=lambda r: r["batch"])
            seconds = [r["prefill"] + r["decode"] for r in mine]
            ax.plot(seconds, [speed(r) for r in mine], "o-", label=system)
            for r, x in zip(mine, seconds):
                ax.annotate(r["batch"], (x, speed(r)), fontsize=7)
        ax.set_title(name, fontsize=8)
        ax.set_xscale("log")
        ax.set_xlabel("seconds of a block (its sequences at the points)")
        ax.set_ylabel("generated tokens/s")
        ax.legend(fontsize=8)
    write(fig, "frontier.png")


def write(fig, name: str) -> None:
    fig.savefig(DOCS / name, dpi=120)
    print(f"wrote docs/{name}")


def main() -> None:
    found = load("throughput")
    if not found:
        sys.exit("no docs/benchmarks/throughput_*.json yet: run scripts/bench_throughput.py first")
    plot_throughput(found)
    plot_frontier(found)


if __name__ == "__main__":
    main()

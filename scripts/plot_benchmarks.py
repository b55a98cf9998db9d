"""Draw docs/throughput.png and docs/frontier.png from docs/benchmarks/throughput_*.json. Needs matplotlib.

throughput: generated tokens/s of every system, a group of bars for each row; the batch stands on the bar
frontier: our throughput over the seconds of a block, full cache and H2O, one panel for each row that has been swept
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from make_tables import cap_text, job_text, load  # noqa: E402
from throughput_rows import speed, summarise  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"


def plot_throughput(rows: dict[str, dict]) -> None:
    fig, ax = plt.subplots(figsize=(2.5 + 2 * len(rows), 4))
    summaries = [summarise(data) for data in rows.values()]
    systems = list(dict.fromkeys(system for found in summaries for system in found))
    width = 0.8 / len(systems)
    for n, system in enumerate(systems):
        found = [summary.get(system, {}) for summary in summaries]
        places = [x + (n - len(systems) / 2 + 0.5) * width for x in range(len(rows))]
        bars = ax.bar(places, [f.get("tokens_per_s", 0) for f in found], width, label=system)
        ax.bar_label(bars, [f.get("batch", "") for f in found], fontsize=7)
    ax.set_xticks(range(len(rows)), [f"{name}\ncap: {cap_text(data['row'])}" for name, data in rows.items()])
    ax.set_ylabel("generated tokens/s (batch on the bar)")
    ax.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    write(fig, "throughput.png")


def plot_frontier(rows: dict[str, dict]) -> None:
    swept = {
        name: runs for name, data in rows.items() if (runs := [r for r in data["runs"] if "block" in r["options"]])
    }
    if not swept:
        return
    fig, axes = plt.subplots(1, len(swept), figsize=(1 + 4 * len(swept), 4), squeeze=False)
    for ax, (name, runs) in zip(axes[0], swept.items()):
        for system in dict.fromkeys(r["system"] for r in runs):
            mine = sorted((r for r in runs if r["system"] == system and "failed" not in r), key=lambda r: r["batch"])
            seconds = [r["prefill"] + r["decode"] for r in mine]
            ax.plot(seconds, [speed(r) for r in mine], "o-", label=system)
            for r, x in zip(mine, seconds):
                ax.annotate(r["batch"], (x, speed(r)), fontsize=7)
        ax.set_title(name)
        ax.set_xscale("log")
        ax.set_xlabel("seconds of a block (its sequences at the points)")
        ax.set_ylabel("generated tokens/s")
        ax.legend(fontsize=8)
    write(fig, "frontier.png")


def write(fig, name: str) -> None:
    fig.tight_layout()
    fig.savefig(DOCS / name, dpi=120)
    print(f"wrote docs/{name}")


def main() -> None:
    found = load("throughput")
    if not found:
        sys.exit("no docs/benchmarks/throughput_*.json yet: run scripts/bench_throughput.py first")
    rows = {job_text(data["row"]): data for data in found.values()}
    plot_throughput(rows)
    plot_frontier(rows)


if __name__ == "__main__":
    main()

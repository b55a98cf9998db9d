"""Draw docs/throughput.png and docs/frontier.png from docs/benchmarks/throughput_*.json. Needs matplotlib.

throughput: generated tokens/s of every system in the README's table, a group of bars for each row, batches on them
frontier: our throughput over the seconds of a block, full cache and H2O, medians of all sweeps, a panel for
    each row that has been swept
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from make_tables import cap_text, job_text, load, machine_text  # noqa: E402
from throughput_rows import summarise, swept_runs  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"


def plot_throughput(rows: list[dict]) -> None:
    systems = list(dict.fromkeys(system for data in rows for system in data["row"]["systems"]))
    summaries, width = [summarise(data) for data in rows], 0.8 / len(systems)
    fig, ax = plt.subplots(figsize=(2.5 + 2 * len(rows), 4.5), layout="constrained")
    for n, system in enumerate(systems):
        found = [summary.get(system, {}) for summary in summaries]
        places = [x + (n - len(systems) / 2 + 0.5) * width for x in range(len(rows))]
        drawn = ax.bar(places, [f.get("tokens_per_s", 0) for f in found], width, label=system)
        ax.bar_label(drawn, [f.get("batch", "") for f in found], fontsize=7)
    labels = [f"{job_text(data['row'])}\ncap: {cap_text(data['row'])}" for data in rows]
    machines = [machine_text(data["machine"]) for data in rows]
    if len(set(machines)) == 1:
        ax.set_title(textwrap.fill(machines[0], 24 * len(rows)), fontsize=8)
    else:
        labels = [f"{label}\n{textwrap.fill(machine, 24)}" for label, machine in zip(labels, machines)]
    ax.set_xticks(range(len(rows)), labels, fontsize=8)
    ax.set_ylabel("generated tokens/s (batch on the bar)")
    fig.legend(fontsize=8, ncols=len(systems), loc="outside upper center")
    write(fig, "throughput.png")


def plot_frontier(rows: list[dict]) -> None:
    swept = [(data, runs) for data in rows if (runs := swept_runs(data))]
    if not swept:
        return
    fig, axes = plt.subplots(1, len(swept), figsize=(1 + 4 * len(swept), 4), squeeze=False, layout="constrained")
    for ax, (data, runs) in zip(axes[0], swept):
        for system in dict.fromkeys(r["system"] for r in runs):
            times: dict[int, list[float]] = {}
            for r in runs:
                if r["system"] == system and "failed" not in r:
                    times.setdefault(r["batch"], []).append(r["prefill"] + r["decode"])
            points = [(median(seconds), batch) for batch, seconds in sorted(times.items())]
            speeds = [batch * data["row"]["gen_len"] / seconds for seconds, batch in points]
            ax.plot([seconds for seconds, _ in points], speeds, "o-", label=system)
            for (seconds, batch), y in zip(points, speeds):
                ax.annotate(batch, (seconds, y), fontsize=7)
        name = f"{job_text(data['row'])}, cap {cap_text(data['row'])}, {machine_text(data['machine'])}"
        ax.set_title(textwrap.fill(name, 60), fontsize=8)
        ax.set_xlabel("seconds of a block (its sequences at the points)")
        ax.set_ylabel("generated tokens/s")
        ax.margins(x=0.1)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
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
    plot_frontier([*found, *load("throughput_elsewhere")])


if __name__ == "__main__":
    main()

"""All results as one PNG. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from h2o_flexgen.evaluation.extras import save

#: colours of the result, of what it is compared with, and the colour map of the layers from first to last
OURS = "#d9480f"
OTHER = "#868e96"
DEPTH = "Blues"


def draw(result: dict, path: str | Path) -> None:
    """Plot the result of `study`, as `h2o-flexgen analyse --output` writes it. Raises UserError if the file cannot be
    written."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(12, 6.6), layout="constrained")
    axes = fig.subplots(2, 3).flat
    for ax, panel in zip(axes, (_sparsity, _ranks, _words, _overlap, _loss, _neurons)):
        panel(ax, result)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        ax.xaxis.label.set_size(9)
        ax.yaxis.label.set_size(9)
        ax.title.set_size(10)
    fig.suptitle(title(result), fontsize=11)
    save(fig, path, dpi=100)


def title(result: dict) -> str:
    """What was analysed."""
    length = f"{result['windows']} windows of {result['prompt_len']} + {result['gen_len']} tokens"
    budget = "{heavy} heavy + {recent} recent slots".format(**result["kv_budget"])
    return f"{result['model']}, {length} of {result['text']}; {budget}"


def _percent(axis) -> None:
    axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def _sparsity(ax, result: dict) -> None:
    found = result["sparsity"]
    ax.bar(range(len(found["by_layer"])), found["by_layer"], color=OURS)
    ax.set_ylim(0, 1)
    _percent(ax.yaxis)
    ax.set_title("Sparsity of attention")
    ax.set(xlabel="layer", ylabel=f"entries below {found['threshold']:.0%} of their row's maximum")


def _layers(ax, x: list, lines: list[list[float]]) -> None:
    """A thin line for each layer, the deeper the darker."""
    from matplotlib import colormaps

    for layer, y in enumerate(lines):
        ax.plot(x, y, color=colormaps[DEPTH](0.25 + 0.75 * layer / len(lines)), linewidth=0.6)


def _ranks(ax, result: dict) -> None:
    found = result["ranks"]
    _layers(ax, found["rank"], found["share_by_layer"])
    ax.plot(found["rank"], found["share"], color=OURS, linewidth=2, label="all layers")
    exponent = found["fit"]["exponent"]
    ends = found["fit"]["ranks"]
    shares = [found["fit"]["share_at_1"] * rank**-exponent for rank in ends]
    ax.plot(ends, shares, "--", color="black", linewidth=1, label=f"rank ^ -{exponent:.2f}")
    ax.set(xscale="log", yscale="log", xlabel="rank of the token", ylabel="share of the attention that it receives")
    ax.set_ylim(bottom=min(found["share"]) / 3)
    ax.set_title("Attention over rank")
    ax.legend(fontsize=8, frameon=False)


def _words(ax, result: dict) -> None:
    found = result["words"]
    ax.scatter(found["co_occurrences"], found["score"], s=5, color=OURS, alpha=0.4, linewidths=0)
    ax.set(xscale="log", yscale="log", xlabel=f"co-occurrences within {found['reach']} tokens")
    ax.set_ylabel("attention of all occurrences")
    each = {name: correlation["spearman"] for name, correlation in found["correlation"].items()}
    text = f"rank correlation {each['summed']:.2f};\nof an occurrence {each['per_occurrence']:.2f}"
    ax.text(0.03, 0.97, text, transform=ax.transAxes, va="top", fontsize=8)
    ax.set_title("Attention to a word, and its co-occurrences")


def _overlap(ax, result: dict) -> None:
    found = result["overlap"]
    ax.bar(range(len(found["heavy_by_layer"])), found["heavy_by_layer"], color=OURS)
    ax.axhline(found["heavy_by_chance"], color="black", linestyle="--", linewidth=1, label="by chance")
    ax.set_ylim(0, 1)
    _percent(ax.yaxis)
    ax.set_title(f"Overlap of {result['kv_budget']['rule']} with a rule that knows the future")
    ax.set(xlabel="layer", ylabel="heavy hitters that both keep")
    ax.legend(fontsize=8, frameon=True, loc="lower right")


def _loss(ax, result: dict) -> None:
    rows = result["loss"][::-1]
    colours = [OTHER if row["cache"] == "full cache" else OURS for row in rows]
    names = [fill(row["cache"], 24) for row in rows]
    bars = ax.barh(names, [row["perplexity"] for row in rows], color=colours)
    ax.bar_label(bars, [f"{row['perplexity']:.2f} ({row['rise']:+.0%})" for row in rows], fontsize=8, padding=3)
    ax.set_xlim(right=1.35 * max(row["perplexity"] for row in rows))
    ax.set_title("Loss")
    ax.set_xlabel("perplexity behind the prompt")


def _neurons(ax, result: dict) -> None:
    found = result["neurons"]
    _layers(ax, found["rank"], found["frequency_by_layer"])
    ax.plot(found["rank"], found["frequency"], color=OURS, linewidth=2, label="all layers")
    ax.set_ylim(0, 1.02)
    _percent(ax.yaxis)
    ax.set_title("MLP neurons")
    ax.set(xlabel="rank of the neuron", ylabel=f"tokens for which it is active:\n{found['is_active']}")
    ax.legend(fontsize=8, frameon=False, loc="lower left")

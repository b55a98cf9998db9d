"""Write the tables of README.md and docs/ from docs/benchmarks/*.json.

    python -m bench.tables [--check]

Tables are between `<!-- table NAME -->` and `<!-- end -->`. `--check` only reports whether they are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp

from bench.common import RESULTS, ROOT, load_result
from bench.rows import QUANTISED, ROWS, column, file_name, setting_text
from h2o_flexgen.kv_cache.layers import HeadLosses

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MIB = 1 << 20


@dataclass(frozen=True)
class Table:
    """A table as data.

    Attributes:
        columns: header -> format string of a cell, filled from a row; it stays empty if the row lacks a value.
        rows: the key of the rows in the result, or a function that makes them from it.
        file: the name of the result, if it is not the table's.
        above: a line above the table, a format string filled from the result.
        below: makes the text below the table from the result.
        has_source: whether the machine, the date and the command follow.
    """

    columns: dict[str, str]
    rows: str | Callable[[dict], list[dict]] = "rows"
    file: str | None = None
    above: str = ""
    below: Callable[[dict], str] | None = None
    has_source: bool = True

    def text(self, data: dict) -> str:
        rows = data[self.rows] if isinstance(self.rows, str) else self.rows(data)
        parts = [
            self.above.format(**data, texts=", ".join(data.get("workload", {}).get("texts", ()))),
            columns(rows, self.columns),
            self.below(data) if self.below else "",
            provenance(data) if self.has_source else "",
        ]
        return "\n\n".join(filter(None, parts))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def columns(rows: list[dict], templates: dict[str, str]) -> str:
    lines = []
    for row in rows:
        lines.append([cell(template, row) for template in templates.values()])
    return markdown(list(templates), lines)


def cell(template: str, row: dict) -> str:
    try:
        return template.format(**row)
    except KeyError:
        return ""


def machine_text(m: dict) -> str:
    model = f" ({m['cpu_model']})" if m.get("cpu_model") else ""
    return f"{m['cpu']}{model}, {m['cores']} cores, {m['ram_gib']:g} GiB RAM, {m['gpu'] or 'no GPU'}"


def version_text(data: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in data["versions"].items())


def command_text(data: dict) -> str:
    """The command of a result, with the last commit that had it if it is gone."""
    commit = re.match(r"git show (\w+):", data.get("raw", ""))
    return f"`{data['command']}`" + (f" (at commit {commit[1]})" if commit else "")


def provenance(data: dict) -> str:
    """The machine, versions, date and command of a result."""
    return f"{machine_text(data['machine'])}; {version_text(data)}; {data['date']}; {command_text(data)}"


def job_text(job: dict) -> str:
    name = job["model"].rpartition("/")[2]
    name = name.upper() if name.startswith("opt-") else name
    device = "on a GPU, " if job["device"] == "cuda" else ""
    return f"{device}{name}, {job['prompt_len']} + {job['gen_len']}"


def cap_text(job: dict) -> str:
    return "none" if job["cap_gib"] is None else f"{job['cap_gib']:g} GiB"


def is_ours(system: str) -> bool:
    return system.startswith("ours")


# the comparison with other systems: tables of all its results

#: columns of the table of all rows; those that no row has are left out
SYSTEMS = ["transformers", "Accelerate", "ZeRO-Inference", "FlexGen", "llama.cpp", "ours, full cache", "ours, H2O"]
SYSTEMS += [QUANTISED]
DETAILS = {
    "job": "{job}",
    "system": "{name}",
    "batch": "{batch}",
    "lowest tier": "{lowest_tier}",
    "prefill, s": "{prefill_seconds:.1f}",
    "decode, s": "{decode_seconds:.1f}",
    "tokens/s": "{rate}",
    "decoded tokens/s": "{decoded:.1f}",
    "runs": "{runs}",
    "output tokens run": "{run}",
    "died": "{died}",
}
POLICIES = {
    "job": "{job}",
    "system": "{name}",
    "policy of the first run": "{policy}",
    "computes in": "{computes_in}",
    "time, predicted / measured": "{predicted_over_measured:.2f}",
    "peak / plan": "{peak_over_plan:.2f}",
    "read a step, GB": "{read_gb_per_step:.2f}",
    "decode is bound by": "{bound_by}",
    "of that bound": "{share_of_bound:.0%}",
}
#: columns of the README's table
RESULTS_COLUMNS = {
    "job": "{job}",
    "memory": "{memory}",
    "best other system": "{peer}",
    "ours": "{exact}",
    "ours, int8 matmuls or 4 bits": "{quantised}",
    "gain": "{gain}",
}
#: rows that it leaves out: the same model in another file
LEFT_OUT = ("llama-8b 64+64", "llama-1b 128+128 Q8_0")
#: target factors: row, system, the system it is compared with, factor
AIMS = [
    ("opt-1.3b 64+256", "ours, H2O + int8", "ours, H2O", 2),
    ("opt-6.7b 64+64", "ours, H2O + int8", "ours, H2O", 2),
    ("opt-1.3b 64+256", "ours, H2O + int8", "Accelerate", 15),
    ("opt-1.3b 64+256", "ours, H2O + int4, int8 matmuls", "Accelerate", 15),
    ("opt-1.3b 64+256", "ours, H2O + int8", "ZeRO-Inference", 15),
    ("llama-8b 64+64", "ours, H2O, int8 matmuls Q4_0", "llama.cpp Q4_0", 5),
    ("llama-8b 64+64 Q4_K_M", "ours, H2O, int8 matmuls Q4_K_M", "llama.cpp Q4_K_M", 5),
    ("llama-1b 128+128", "ours, H2O, int8 matmuls Q8_0", "llama.cpp Q8_0", 5),
    ("llama-1b 128+128 Q8_0", "ours, H2O, int8 matmuls Q8_0", "llama.cpp Q8_0", 2.5),
    ("llama-1b 128+128", "ours, H2O, int8 matmuls Q4_0", "llama.cpp Q4_0", 3),
    ("llama-1b 128+128 uncapped", "ours, H2O + int8 Q4_0", "llama.cpp Q4_0", 2.4),
    ("qwen3-30b 32+32 Q4_0", "ours, H2O + int8 Q4_0", "llama.cpp Q4_0", 4),
    ("qwen3-30b 32+32 Q4_0", "ours, H2O + int8 Q4_0", "llama.cpp, 32 sequences Q4_0", 20),
    ("gpt-oss-20b 32+32 MXFP4", "ours, H2O + int8 MXFP4", "llama.cpp, 32 sequences MXFP4", 20),
    ("smollm2 512+64", "ours, H2O, int8 matmuls Q4_1", "transformers Q4_1", 3),
]


def rows_measured() -> list[dict]:
    """The results of all rows except those that test the benchmark itself."""
    found = [load_result(file_name(name)) for name in ROWS if not name.startswith("tiny ")]
    return [data for data in found if data]


def systems_of(rows: list[dict]) -> list[dict]:
    """The figures of each system of each row, with its name and the job."""
    found = []
    for data in rows:
        job = f"{job_text(data['job'])}, cap {cap_text(data['job'])}"
        for name, s in data["systems"].items():
            found.append({"job": job, "name": name, "steps": data["job"]["gen_len"] - 1} | s)
    return found


def best(data: dict) -> dict[str, tuple[float, str]]:
    """Column -> tokens/s and name of its fastest system that ran to the end."""
    found: dict[str, tuple[float, str]] = {}
    for name, s in data["systems"].items():
        if s["runs"]:
            found[column(name)] = max(found.get(column(name), (0, "")), (s["tokens_per_s"]["median"], name))
    return found


def gain(data: dict) -> float | None:
    """The rate of our fastest system over the fastest peer's."""
    ours = [rate for name, (rate, _) in best(data).items() if is_ours(name)]
    peers = [rate for name, (rate, _) in best(data).items() if not is_ours(name)]
    return max(ours) / max(peers) if ours and peers else None


def gain_text(data: dict) -> str:
    return "-" if gain(data) is None else f"{gain(data):.1f}x"


def throughput(rows: list[dict]) -> str:
    """A line for each row: every system's median tokens/s, with its batch, GGUF type and quantisation in brackets. Rows
    on a GPU are left out, since no other batches of their peers were tried."""
    rows = [data for data in rows if data["job"]["device"] == "cpu"]
    measured = set().union(*(map(column, data["systems"]) for data in rows))
    shown = [name for name in SYSTEMS if name in measured]
    lines = []
    for data in rows:
        found = best(data)
        cells = []
        for name in shown:
            rate, system = found.get(name, (0, ""))
            variant = system.removeprefix("ours, " if name == QUANTISED else name).strip()
            about = [str(data["systems"][system]["batch"])] + [variant] * bool(variant) if system else []
            cells.append(f"{rate:.1f} ({', '.join(about)})" if system else "-")
        lines.append([job_text(data["job"]), cap_text(data["job"]), *cells, gain_text(data)])
    return markdown(["model, prompt + output", "memory cap", *shown, "best of ours over the best peer"], lines)


def throughput_details(rows: list[dict]) -> str:
    found = systems_of(rows)
    for s in found:
        t = s.get("tokens_per_s", {})
        spread = " ({min:.2f} to {max:.2f})".format(**t) if s["runs"] > 1 else ""
        s["rate"] = f"{t['median']:.2f}{spread}" if t else "died"
        s |= {"decoded": s["steps"] * s["batch"] / s["decode_seconds"]} if t else {}
        s |= {"run": s.get("gen_len", "all"), "died": "; ".join(s.get("died", []))}
    return columns(found, DETAILS)


def throughput_ours(rows: list[dict]) -> str:
    """Our policies, and how close they come to the prediction and to their lower bound."""
    return columns([s for s in systems_of(rows) if "policy" in s], POLICIES)


def row_provenance(data: dict) -> str:
    """The machine, versions, days and command of a row's results."""
    days = sorted({day for s in data["systems"].values() for day in s["dates"]})
    known = version_text(data)
    others = dict.fromkeys(s["version"] for s in data["systems"].values() if s.get("version", known) not in known)
    versions = ", ".join([known, *others])
    span = " to ".join(days[:1] + days[1:][-1:])
    return f"{machine_text(data['machine'])}; {versions}; {span}; {command_text(data)}"


def throughput_machines(rows: list[dict]) -> str:
    header = ["job", "machine; versions; days; command"]
    return markdown(header, [[job_text(data["job"]), row_provenance(data)] for data in rows])


def aims(rows: list[dict]) -> str:
    """Targets and the factors reached, where both systems ran to the end."""
    by_name = {data["row"]: data for data in rows}
    lines = []
    for row, ours, other, aim in AIMS:
        data = by_name.get(row, {"systems": {}})
        reached = [data["systems"].get(name, {}).get("tokens_per_s", {}).get("median") for name in (ours, other)]
        if None in reached:
            continue
        cap = f"{cap_text(data['job'])} cap".replace("none", "no")
        lines.append([f"{job_text(data['job'])}, {cap}", ours, other, f"{aim}x", f"{reached[0] / reached[1]:.1f}x"])
    return markdown(["job", "system", "over", "aim", "reached"], lines)


def results(rows: list[dict]) -> str:
    """The README's table: two real jobs in rows/s, and models larger than memory in tokens/s."""
    found = []
    data = load_result("real_jobs")
    ram = f"{data['machine']['ram_gib']:g} GiB, all fits"
    for job, about in data["jobs"].items():
        runs = {run["system"]: (run["rows_per_s"], "") for run in fastest(data, job)}
        found.append(result_line(f"SmolLM2-135M: {about}", ram, "rows/s", runs))
    for row in rows:
        is_shown = row["row"] not in LEFT_OUT and gain(row)  # it has peers
        if row["job"]["device"] == "cpu" and row["job"]["cap_gib"] and is_shown:
            kind = ", Q4_K_M" if "Q4_K_M" in row["row"] else ""
            job = f"{job_text(row['job'])} tokens{kind}"
            found.append(result_line(job, cap_text(row["job"]), "tokens/s", best(row)))
    return columns(found, RESULTS_COLUMNS)


def result_line(job: str, memory: str, unit: str, rates: dict[str, tuple[float, str]]) -> dict:
    """A line with the best peer, our best in floats, and our best quantised; `rates`: column -> (rate, system)."""
    floats = ("ours", "ours, full cache", "ours, H2O")
    peer = max((rate, name) for name, (rate, _) in rates.items() if not is_ours(name))
    exact = max((rates[name][0] for name in floats if name in rates), default=0.0)
    quantised = max(rate for name, (rate, _) in rates.items() if is_ours(name) and name not in floats)
    words = {"job": job, "memory": memory, "peer": f"{peer[0]:.2f} {unit} ({peer[1]})", "quantised": f"{quantised:.2f}"}
    return words | {"exact": f"{exact:.2f}" if exact else "-", "gain": f"{max(exact, quantised) / peer[0]:.1f}x"}


OF_ALL_ROWS = {
    function.__name__: function
    for function in (throughput, throughput_details, throughput_ours, throughput_machines, aims, results)
}


# the rows of a table of one result


def headline(data: dict) -> str:
    """The result of the README's command, and how long it took altogether."""
    minutes = f"{data['about']}: {data['seconds'] / 60:.1f} minutes."
    return "\n\n".join([throughput_details([data]), minutes, provenance(data)])


def settings_of_peers(data: dict) -> list[dict]:
    """The settings of peers, and the others that were tried."""
    found = []
    for name, systems in data["rows"].items():
        for system, s in systems.items():
            tried = "; ".join(f"{what}: {rate}" for what, rate in s.get("tried", {}).items())
            found.append({"row": name, "system": system, "setting": setting_text(s), "tried": tried})
    return found


def readable(data: dict) -> list[dict]:
    """Rows with the model and the cache in words."""
    found = []
    for row in data["rows"]:
        ratio = row.get("hh_ratio")
        model = row["model"].removeprefix("facebook/").upper()
        found.append(row | {"model": model, "cache": f"H2O {ratio:g}" if ratio else "full"})
    return found


def stream_windows(data: dict) -> list[dict]:
    return [
        window | {"ms": 1000 * window["seconds_per_token"], "mib": window["resident_bytes"] / MIB}
        for window in data["windows"]
    ]


def stream_ends(fresh: dict) -> list[dict]:
    """The last two windows of a long stream, and of one that began shortly before them."""
    found = []
    for name, data in (("from the beginning", load_result("stream_long")), ("begun 4,096 tokens before them", fresh)):
        last = data["windows"][-2:]
        perplexity = exp(-sum(w["logprob"] for w in last) / sum(w["scored"] for w in last))
        found.append({"stream": name, "tokens": last[-1]["tokens"], "perplexity": perplexity})
    return found


def layer_slots(data: dict) -> list[dict]:
    """The slots of each layer according to a calibration."""
    known = HeadLosses.from_dict(data)
    found = []
    for slots in (102, 204):
        each = known.slots(slots, known.text_len, [None] * len(known.losses))
        found.append({"slots": slots, "each": " ".join("+".join(map(str, layer)) for layer in each)})
    return found


def structured_rows(data: dict) -> list[dict]:
    return [{"tier": tier} | data[tier] for tier in ("RAM", "disk")]


def losses_by_bits(data: dict) -> list[dict]:
    found = []
    for row in data["rows"]:
        words = {"weights": row["compress_weight"] or "as stored", "cache": row["compress_cache"] or "floats"}
        found.append(row | words | {"slots": row["slots"] or "all", "mib": row["kv_bytes"] / MIB})
    return found


def losses_by_text(data: dict) -> list[dict]:
    ranges = [{"least": min(row["texts"].values()), "most": max(row["texts"].values())} for row in data["rows"]]
    return [row | own for row, own in zip(losses_by_budget(data), ranges)]


def losses_by_budget(data: dict) -> list[dict]:
    found = []
    for row in data["rows"]:
        slots = "all" if row["slots"] is None else "{heavy} + {recent}".format(**row)
        rule = re.sub("layers=(?!none).*", "layers", row["rule"])  # without the name of a file
        found.append(row | {"rule": rule, "slots": slots, "mib": row["kv_bytes"] / MIB})
    return found


def scores_by_budget(data: dict) -> list[dict]:
    """Rows of a task by trials: shares with standard errors, or lengths with their ratios to the full cache's."""
    found = []
    for row in losses_by_budget(data):
        texts = {}
        for name, score in row["scores"].items():
            texts[name] = f"{score['mean']:.1%} ± {score['error']:.1%}"
            if data["workload"]["task"] == "lengths":
                texts[name] = f"{score['mean']:.1f}, {score['ratio']:.2f} ± {score['ratio_error']:.2f}"
        found.append(row | texts | ({"ended": f"{row['ended']:.0%}"} if "ended" in row else {}))
    return found


def rises_of_kvpress(data: dict) -> list[dict]:
    return [row | {"budget": row["budget"] or "all", "held": row["held"] or "all"} for row in data["rows"]]


def rouge_of_summaries(data: dict) -> list[dict]:
    """How close summaries under KV budgets come to the full cache's."""
    found = []
    for row in data["rows"]:
        scores = {f"rouge_{n}": x for n, x in row["rouge"]["full_cache"]["rouge-score"].items()}
        found.append(scores | {"rule": row["rule"], "slots": row["slots"] or "all"})
    return found


def command_line(data: dict) -> str:
    """One run of the command line."""
    sizes = "{peak_ram_gib:.1f} GiB, {planned_ram_gib:.1f} GiB, {disk_gib:.1f} GiB".format(**data)
    lines = [["policy", data["policy"]]]
    for phase in ("prefill", "decode"):
        guess = f" (predicted {data['predicted'][f'{phase}_seconds']:.1f} s)" if "predicted" in data else ""
        rate = f"{data[phase]['tokens_per_s']:.3g} tokens/s"
        lines.append([phase, f"{data[phase]['seconds']:.1f} s{guess}, {rate}"])
    lines.append(["peak RAM, planned, on disk", sizes])
    return markdown(["command", f"`{data['flex_opt']}`"], lines) + f"\n\n{provenance(data)}"


def figures_of_analysis(data: dict) -> list[dict]:
    """The figures of `h2o-flexgen analyse`: overall, and the range over layers."""
    ranks = data["ranks"]
    fit = ranks["fit"]
    words = {name: each["spearman"] for name, each in data["words"]["correlation"].items()}
    overlap = data["overlap"]
    neurons = data["neurons"]
    figures = [
        ("attention below 1 % of its row's maximum", data["sparsity"]["mean"], data["sparsity"]["by_layer"]),
        ("attention that the top tenth of the tokens receives", ranks["top_tenth"], None),
        ("exponent of the power law", fit["exponent"], fit["exponent_by_layer"]),
        ("its R2, ranks {} to {}".format(*fit["ranks"]), fit["r2"], None),
        ("rank correlation of a word's attention and co-occurrences", words["summed"], None),
        ("the same of the attention of one occurrence", words["per_occurrence"], None),
        ("heavy hitters that are those of the future", overlap["heavy_mean"], overlap["heavy_by_layer"]),
        ("the same by chance", overlap["heavy_by_chance"], None),
        ("all slots that are those of the future", overlap["mean"], overlap["by_layer"]),
        ("tokens for which a neuron is active", neurons["mean"], neurons["mean_by_layer"]),
        *((f"activations by the top {float(part):.0%} of neurons", x, None) for part, x in neurons["carried"].items()),
    ]
    found = []
    for name, mean, layers in figures:
        span = f"{min(layers):.2f} to {max(layers):.2f}" if layers else ""
        found.append({"figure": name, "mean": mean, "layers": span})
    return found


def losses_of_analysis(data: dict) -> str:
    templates = {"tokens behind the prompt see": "{cache}", "perplexity": "{perplexity:.2f}", "rise": "{rise:+.1%}"}
    return columns(data["loss"], templates)


# real jobs


def fastest(data: dict, job: str) -> list[dict]:
    """Each system's fastest run of a job that ran to the end."""
    found: dict[str, dict] = {}
    for run in data["runs"]:
        if run["job"] == job and "failed" not in run and run["seconds"] <= found.get(run["system"], run)["seconds"]:
            found[run["system"]] = run
    return list(found.values())


def places_text(run: dict) -> str:
    """The places of llama-server, or our policy."""
    if "policy" in run:
        return run["policy"]
    return f"{run['options']['np']} places" + (", one cache" if "kvu" in run["options"] else "")


def fastest_runs(data: dict) -> list[dict]:
    """Each system at its best number of places."""
    found = []
    for job, about in data["jobs"].items():
        for run in fastest(data, job):
            words = {"about": about, "setting": places_text(run)}
            if run.get("row_steps"):
                words["ran"] = f"{(run['tokens'] - run['rows']) / run['row_steps']:.0%}"
            found.append(run | words)
    return found


def gains_of_real_jobs(data: dict) -> str:
    """The gains of our fastest system, and the version of llama-server."""
    gains = []
    for job in data["jobs"]:
        ours = [run["rows_per_s"] for run in fastest(data, job) if is_ours(run["system"])]
        peers = [run["rows_per_s"] for run in fastest(data, job) if not is_ours(run["system"])]
        if ours and peers:
            gains.append(f"{job} {max(ours) / max(peers):.2f}x")
    lines = [f"Rows/s of the fastest of ours over llama-server's: {', '.join(gains)}."] if gains else []
    lines += sorted({f"llama-server is that of {run['version']}." for run in data["runs"] if "version" in run})
    return "\n\n".join(lines)


def settings_tried(data: dict) -> list[dict]:
    """Seconds of each setting of llama-server."""
    found = []
    for run in data["runs"]:
        if is_ours(run["system"]):
            continue
        words = {"setting": places_text(run), "took": run.get("failed") or f"{run['seconds']:.1f}"}
        if "seconds" in run:
            words["computed"] = run["prompt_tokens_computed"] / run["prompt_tokens"]
        found.append(run | words)
    return found


def against_older(data: dict) -> list[dict]:
    """The medians of two versions, and the median and range of the pairs' ratios."""
    forms = {"tokens_per_s": "{:.1f}", "running_share": "{:.0%}", "moved_gb": "{:.1f}"}
    found = []
    for row in data["rows"]:
        both = {figure: old_and_new(row, figure, form) for figure, form in forms.items()}
        seconds = old_and_new(row, row["measure"], "{:.1f}")
        found.append(row | both | {"seconds": seconds, "least": min(row["ratios"]), "most": max(row["ratios"])})
    return found


def old_and_new(row: dict, figure: str, form: str) -> str:
    return " -> ".join(form.format(row[side][figure]) for side in ("old", "new"))


KILLS = Table(
    {
        "model": "{model}",
        "block": "{block}",
        "rows of a job": "{rows}",
        "kills": "{kills}",
        "of them after a run's first block": "{behind_the_first_block}",
        "jobs to their end": "{jobs}",
    },
    readable,
)
QUALITY = Table(
    {
        "rule": "{rule}",
        "slots, heavy + recent": "{slots}",
        "KV cache of a sequence, MiB": "{mib:.2f}",
        "perplexity": "{perplexity:.2f}",
        "rise": "{rise:+.1%}",
        "agreement": "{agreement:.1%}",
    },
    losses_by_budget,
    above="{workload[model]} in {workload[dtype]}, {workload[passages]} passages of {texts}, "
    "{workload[prompt_len]} tokens of prompt and {workload[gen_len]} teacher-forced.",
)


STEPS = Table({"rule": "{rule}", "decode step, ms": "{ms:.1f}", "over the first": "{over_h2o:.2f}"})
TEXTS_MEASURED = Table(
    {
        "rule": "{rule}",
        "slots, heavy + recent": "{slots}",
        "KV cache of a sequence, MiB": "{mib:.2f}",
        "perplexity": "{perplexity:.2f}",
        "rise": "{rise:+.1%} ± {error:.1%}",
        "rise of single texts": "{least:+.1%} to {most:+.1%}",
        "agreement": "{agreement:.1%}",
    },
    losses_by_text,
    above="{workload[model]} in {workload[dtype]}, {workload[passages]} passages of eight texts, "
    "{workload[prompt_len]} tokens of prompt and {workload[gen_len]} teacher-forced.",
)


def trials_table(*scores: str) -> Table:
    """The scores of a task, by rule and budget."""
    columns = {"rule": "{rule}", "slots, heavy + recent": "{slots}"} | {name: f"{{{name}}}" for name in scores}
    above = "{workload[model]} in {workload[dtype]}, {workload[passages]} passages of {texts}, prompts of up "
    return Table(columns, scores_by_budget, above=above + "to {workload[prompt_len]} tokens.")


KVPRESS = Table(
    {
        "system": "{system}",
        "rule or press": "{method}",
        "slots": "{budget}",
        "most in memory": "{held}",
        "perplexity": "{perplexity:.2f}",
        "rise": "{rise:+.1%} ± {error:.1%}",
    },
    rises_of_kvpress,
    above="{workload[model]} in float32, {workload[passages]} passages of {workload[text]}, {workload[prompt_len]} "
    "tokens of prompt and {workload[gen_len]} teacher-forced; kvpress {kvpress}.",
)
SUMMARIES = Table(
    {
        "rule": "{rule}",
        "slots": "{slots}",
        "ROUGE-1": "{rouge_1:.3f}",
        "ROUGE-2": "{rouge_2:.3f}",
        "ROUGE-L": "{rouge_l:.3f}",
    },
    rouge_of_summaries,
)
VERSIONS = Table(
    {
        "job": "{about}",
        "weights and cache": "{where}",
        "seconds": "{seconds}",
        "gain": "{ratio:.2f}x ({least:.2f} to {most:.2f})",
        "tokens/s": "{tokens_per_s}",
        "row-steps of running rows": "{running_share}",
        "GB moved": "{moved_gb}",
        "policy": "{policy}, {computes_in}, {compute} matmuls",
    },
    against_older,
)
#: matmuls of blocks as stored
BLOCK_RATES = Table(
    {
        "weights as stored": "{format}",
        "8 rows": "{rows_8:.2f}",
        "32": "{rows_32:.2f}",
        "128": "{rows_128:.2f}",
        "512": "{rows_512:.2f}",
        "128 rows / Q4_0's": "{of_q4_0:.2f}",
    },
    "blocks",
    file="format_rates",
    above="A matrix of 4,096 x 4,096, {threads} threads, TOP/s.",
)
TABLES = {
    "labels": Table(
        {"labels are": "{way}", "seconds": "{seconds:.1f}", "speed": "{speed:.1f}x"},
        above="{conversations} conversations, up to {tokens} tokens generated.",
    ),
    "structured": Table(
        {
            "weights and cache in": "{tier}",
            "tokens/s": "{plain:.1f}",
            "with a schema": "{structured:.1f}",
            "ratio, median of pairs": "{ratio:.2f}",
        },
        structured_rows,
        above="Random schemas: {validity[schemas]}; texts that ended: {validity[ended]}, of these valid: "
        "{validity[valid]}.",
    ),
    "workers_simulated": Table(
        {
            "workers busy": "{busy:.1%}",
            "their places taken": "{places:.1%}",
            "until": "{seconds:.0f} s",
            "all rows done": "{all_seconds:.0f} s",
            "deaths": "{deaths}",
            "rows that failed": "{failed}",
        },
        above="{settings[workers]} workers, {settings[rows]} rows, {settings[places]} places each; busy until "
        "{settings[ending]:.0%} of the rows were done.",
    ),
    "workers_kills": Table(
        {
            "kills of workers": "{workers}",
            "of the driver": "{driver}",
            "of the whole cluster": "{cluster}",
            "rows": "{rows}",
            "the same as one LLM's": "{same}",
            "minutes": "{minutes:.0f}",
        },
    ),
    "workers_million": Table(
        {
            "rows": "{rows:,}",
            "ms a row, all told": "{ms_a_row:.3f}",
            "peak RAM of the driver, MiB": "{mib:.0f}",
            "seconds from a kill at nine tenths to the next row": "{seconds_to_go_on:.1f}",
        },
    ),
    "workers_speed": Table(
        {
            "one worker, tokens/s": "{workers_1:.1f}",
            "two workers": "{workers_2:.1f}",
            "ratio, median of pairs": "{ratio:.2f}",
        },
    ),
    "jobs_kills": KILLS,
    "jobs_kills_demo_model": KILLS,
    "peer_settings": Table(
        {
            "row": "{row}",
            "system": "{system}",
            "runs with": "{setting}",
            "tokens/s by batch and options, from 8 tokens": "{tried}",
        },
        settings_of_peers,
        has_source=False,
    ),
    "stream_long": Table(
        {
            "tokens": "{tokens}",
            "perplexity": "{perplexity:.2f}",
            "ms a token": "{ms:.2f}",
            "resident, MiB": "{mib:.0f}",
        },
        stream_windows,
    ),
    "stream_fresh": Table(
        {"stream": "{stream}", "tokens at its end": "{tokens}", "perplexity of the last 8,192": "{perplexity:.2f}"},
        stream_ends,
    ),
    "format_rates": Table(
        {
            "out x in": "{shape}",
            "rows": "{rows}",
            "`_int_mm` alone": "{tops[_int_mm]:.2f}",
            "int8, native": "{tops[native]:.2f}",
            "transposed": "{tops[transposed]:.2f}",
            "packed": "{tops[packed]:.2f}",
            "the best of these / `_int_mm`": "{of_int_mm:.2f}",
            "bf16": "{tops[bf16]:.2f}",
        },
        above="{threads} threads, TOP/s.",
    ),
    "format_rates_avx2": Table(
        {
            "out x in": "{shape}",
            "rows": "{rows}",
            "`_int_mm` alone": "{tops[_int_mm]:.3f}",
            "int8, tiled": "{tops[tiled]:.3f}",
            "int4, as stored": "{tops[int4]:.3f}",
            "as floats": "{tops[floats]:.3f}",
            "fp32": "{tops[fp32]:.3f}",
            "bf16": "{tops[bf16]:.3f}",
        },
        above="{threads} threads, TOP/s.",
    ),
    "decoding": Table(
        {
            "from": "{format}",
            "to fp32": "{float32:.1f}",
            "bf16": "{bfloat16:.1f}",
            "int8 codes, a scale a row": "{int8:.1f}",
        },
        "decoding",
        file="format_rates",
    ),
    "block_rates": BLOCK_RATES,
    "block_rates_no_avx512": replace(BLOCK_RATES, file="format_rates_no_avx512"),
    "file_formats": Table(
        {
            "file": "{file}",
            "types of its matrices": "{types}",
            "MiB": "{mib:.0f}",
            "ours, exact": "{exact:.4f}",
            "transformers": "{transformers:.4f}",
            "ours, int8 matmuls": "{int8:.3f}",
            "llama.cpp": "{llama_cpp:.3f}",
        }
    ),
    "cache_attention": Table(
        {
            "sequences, KV heads x queries of each, head size, slots": "{cache}",
            "fp32": "{float32:.1f}",
            "bf16": "{bfloat16:.1f}",
            "int8": "{int8:.1f}",
            "int4": "{int4:.1f}",
        },
        "attention",
        file="format_rates_avx2",
    ),
    "format_losses": Table(
        {
            "weights": "{weights}",
            "matmuls": "{compute}",
            "cache": "{cache}",
            "slots": "{slots}",
            "KV cache of a sequence, MiB": "{mib:.2f}",
            "perplexity": "{perplexity:.2f}",
            "rise": "{rise:+.1%}",
        },
        losses_by_bits,
    ),
    "layers_smollm2": Table({"slots on average": "{slots}", "of each layer": "{each}"}, layer_slots),
    "rule_steps": STEPS,
    "neurons_smollm2": Table(
        {
            "left out of the output": "{error:.0%}",
            "sequences": "{sequences}",
            "neurons needed": "{share:.1%}",
            "in the layer that needs least": "{least:.1%}",
        }
    ),
    "rule_ideas": Table({"idea": "{idea}", "prose": "{handbook:+.1%}", "code": "{stdlib:+.1%}"}),
    "budget_ideas": Table(
        {
            "idea": "{idea}",
            "204 slots": "{slots_204[rise]:+.1%} ± {slots_204[error]:.1%}",
            "102 slots": "{slots_102[rise]:+.1%} ± {slots_102[error]:.1%}",
        },
        above="{workload[model]} in {workload[dtype]}, {workload[passages]} passages. The engine's own loss "
        "under `voted`: {engine[slots_204][rise]:+.1%} and {engine[slots_102][rise]:+.1%}.",
    ),
    "engine_stop": Table(
        {"stops": "{stops}", "seconds, median": "{median:.1f}", "longest": "{max:.1f}"},
        above="{workload[model]}, block {workload[block]}, weights, cache and hidden states on disk.",
    ),
    "engine_gemm": Table(
        {
            "shapes": "{model}",
            "batch": "{batch}",
            "F.linear, TFLOP/s": "{tflops[F.linear]:.2f}",
            "ours": "{tflops[ours]:.2f}",
            "ours, packed": "{tflops[ours, packed]:.2f}",
        },
        readable,
    ),
    "jobs_faults": Table({"call": "{call}", "went on": "{went_on}", "clear error": "{clear_error}"}),
    "disk": Table(
        {
            "reads": "{reads}",
            "threads": "{threads}",
            "request": "{request_mib} MiB",
            "alone, GB/s": "{alone_gb_per_s:.2f}",
            "CPU s per GB": "{alone_cpu_seconds_per_gb:.2f}",
            "beside compute, GB/s": "{beside_compute_gb_per_s:.2f}",
            "compute rate left": "{compute_rate_beside_reads:.0%}",
        }
    ),
    "search_papers": Table(
        {
            "figures of": "{source}",
            "job": "{model} {prompt_len}+{gen_len}",
            "policy": "{policy}",
            "cache": "{cache}",
            "published, tokens/s": "{published_tokens_per_s:g}",
            "predicted": "{predicted_tokens_per_s:.2f}",
            "ratio": "{ratio:.2f}",
        },
        readable,
    ),
    "analysis_smollm2": Table(
        {"figure": "{figure}", "mean": "{mean:.2f}", "layers": "{layers}"},
        figures_of_analysis,
        below=losses_of_analysis,
    ),
    "real_jobs": Table(
        {
            "job": "{job}: {about}",
            "system": "{system}",
            "setting": "{setting}",
            "rows/s": "{rows_per_s:.2f}",
            "tokens/s": "{tokens_per_s:.1f}",
            "seconds": "{seconds:.1f}",
            "whole command, s": "{command_seconds:.1f}",
            "tokens": "{tokens}",
            "row-steps that ran": "{ran}",
            "predicted / measured": "{predicted_over_measured:.2f}",
        },
        fastest_runs,
        below=gains_of_real_jobs,
    ),
    "real_jobs_tried": Table(
        {
            "job": "{job}",
            "llama-server with": "{setting}",
            "seconds": "{took}",
            "prompt tokens computed": "{computed:.0%}",
            "cores that others took": "{cores_of_others:.1f}",
        },
        settings_tried,
        file="real_jobs",
    ),
}
#: tables of several results, by the first word of their name
FAMILIES = {
    "quality": QUALITY,
    "steps": STEPS,
    "texts": TEXTS_MEASURED,
    "summaries": SUMMARIES,
    "versions": VERSIONS,
    "needle": trials_table("asked behind", "asked in front", "of 5, the first", "of 5, the others"),
    "copy": trials_table("copied", "tokens right"),
    "choice": trials_table("right"),
    "lengths": trials_table("tokens, asked behind", "tokens, asked in front", "ended"),
    "kvpress": KVPRESS,
}
#: texts that are not plain tables: name -> file, function
TEXTS = {"headline": ("headline", headline), "opt-30b-searched": ("opt-30b-searched", command_line)}


def table(name: str) -> str:
    """Raises KeyError for an unknown name."""
    if name in OF_ALL_ROWS:
        return OF_ALL_ROWS[name](rows_measured())
    if name in TEXTS:
        file, render = TEXTS[name]
    else:
        shape = FAMILIES.get(name.partition("_")[0]) or TABLES[name]
        file = shape.file or name
        render = shape.text
    data = load_result(file)
    return render(data) if data else f"(not measured yet: docs/benchmarks/{file}.json)"


def fill(text: str) -> str:
    """A document with its tables rewritten."""
    new_table = lambda match: f"<!-- table {match[1]} -->\n{table(match[1])}\n<!-- end -->"
    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", new_table, text, flags=re.S)


def unused_results() -> set[str]:
    """Results that no document shows."""
    shown = {name for path in DOCUMENTS for name in re.findall(r"<!-- table (\S+) -->", path.read_text())}
    shown |= {TABLES[name].file for name in shown & TABLES.keys()}
    files = {path.stem for path in RESULTS.glob("*.json") if not path.stem.startswith("quick_")}
    return {"throughput" if name.startswith("throughput") else name for name in files} - shown


def main() -> int:
    stale = [path for path in DOCUMENTS if path.read_text() != fill(path.read_text())]
    if "--check" in sys.argv:
        problems = [f"{path.name}: tables are stale" for path in stale]
        problems += [f"no document shows docs/benchmarks/{name}.json" for name in sorted(unused_results())]
        print("\n".join(problems) or "up to date")
        return bool(problems)
    for path in stale:
        path.write_text(fill(path.read_text()))
        print(f"{path.name}: rewrote its tables from {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

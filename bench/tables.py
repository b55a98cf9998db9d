"""Write the tables of README.md and docs/ from docs/benchmarks/*.json.

    python -m bench.tables [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`. `--check` only says whether they are up to date.
"""

from __future__ import annotations

import re
import sys
from math import exp

from bench.common import RESULTS, ROOT, stored
from bench.rows import QUANTISED, ROWS, column, file_name, setting_text
from h2o_flexgen.kv_cache.layers import LayerLosses

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: of the table of all rows; a column that no row has is left out
COLUMNS = ["transformers", "Accelerate", "ZeRO-Inference", "FlexGen", "llama.cpp", "ours, full cache", "ours, H2O"]
COLUMNS += [QUANTISED]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def columns(rows: list[dict], header: str, template: str) -> str:
    """A line for each row, by a format string for each column; what a row lacks stays empty."""

    def cell(template: str, row: dict) -> str:
        try:
            return template.format(**row)
        except KeyError:
            return ""

    return markdown(header.split(" | "), [[cell(t, row) for t in template.split(" | ")] for row in rows])


def machine_text(m: dict) -> str:
    model = f" ({m['cpu_model']})" if m.get("cpu_model") else ""
    return f"{m['cpu']}{model}, {m['cores']} cores, {m['ram_gib']:g} GiB RAM, {m['gpu'] or 'no GPU'}"


def version_text(data: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in data["versions"].items())


def command_text(data: dict) -> str:
    """The command of a result, and the commit that has it if it is gone since."""
    commit = re.match(r"git show (\w+):", data.get("raw", ""))
    return f"`{data['command']}`" + (f" (at commit {commit[1]})" if commit else "")


def provenance(data: dict) -> str:
    """The machine, versions, date and command of a result."""
    cap = f", capped at {data['cap_gib']:g} GiB with page cache" if data.get("cap_gib") else ""
    return f"{machine_text(data['machine'])}{cap}; {version_text(data)}; {data['date']}; {command_text(data)}"


def job_text(job: dict) -> str:
    name = job["model"].rpartition("/")[2]
    name = name.upper() if name.startswith("opt-") else name
    device = "on a GPU, " if job["device"] == "cuda" else ""
    return f"{device}{name}, {job['prompt_len']} + {job['gen_len']}"


def cap_text(job: dict) -> str:
    return "none" if job["cap_gib"] is None else f"{job['cap_gib']:g} GiB"


# the comparison


def rows_measured() -> list[dict]:
    """The results of all rows but those that try the benchmark."""
    found = [stored(file_name(name)) for name in ROWS if not name.startswith("tiny ")]
    return [data for data in found if data]


def systems_of(rows: list[dict]) -> list[dict]:
    """What is known of each system of each row, with its name and the job."""
    found = []
    for data in rows:
        job = f"{job_text(data['job'])}, cap {cap_text(data['job'])}"
        found += [{"job": job, "name": name} | s for name, s in data["systems"].items()]
    return found


def best(data: dict) -> dict[str, tuple[float, str]]:
    """Tokens/s of every column of a row that came to its end, of the fastest of its files, and that system."""
    found: dict[str, tuple[float, str]] = {}
    for name, s in data["systems"].items():
        if s["runs"]:
            found[column(name)] = max(found.get(column(name), (0, "")), (s["tokens_per_s"]["median"], name))
    return found


def gain(data: dict) -> float | None:
    """The fastest of ours over the fastest other system."""
    found = best(data)
    ours, peers = ([rate for name, (rate, _) in found.items() if is_ours(name) == x] for x in (True, False))
    return max(ours) / max(peers) if ours and peers else None


def is_ours(system: str) -> bool:
    return system.startswith("ours")


def gain_text(data: dict) -> str:
    return "-" if gain(data) is None else f"{gain(data):.1f}x"


def throughput(rows: list[dict]) -> str:
    """A line for each row: median tokens/s of every system, in brackets its batch, the type of its file, and what
    is quantised. Rows on a GPU are left out: no batch of their peers was ever tried against another."""
    rows = [data for data in rows if data["job"]["device"] == "cpu"]
    shown = [name for name in COLUMNS if any(name in map(column, data["systems"]) for data in rows)]
    lines = []
    for data in rows:
        found, cells = best(data), []
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
        s |= {"run": s.get("gen_len", "all"), "died": "; ".join(s.get("died", []))}
    header = "job | system | batch | lowest tier | prefill, s | decode, s | tokens/s | runs | output tokens run | died"
    times = "{prefill_seconds:.1f} | {decode_seconds:.1f} | {rate} | {runs} | {run} | {died}"
    return columns(found, header, f"{{job}} | {{name}} | {{batch}} | {{lowest_tier}} | {times}")


def headline(data: dict) -> str:
    """What the command of README's headline gave, and how long it took as a whole."""
    return f"{throughput_details([data])}\n\n{data['about']}: {data['seconds'] / 60:.1f} minutes."


def throughput_ours(rows: list[dict]) -> str:
    """Our policies, and how near they come to what was predicted and to what bounds them."""
    header = "job | system | policy of the first run | computes in | time, predicted / measured | peak / plan | "
    header += "read a step, GB | decode is bound by | of that bound"
    template = "{job} | {name} | {policy} | {computes_in} | {predicted_over_measured:.2f} | {peak_over_plan:.2f} | "
    template += "{read_gb_per_step:.2f} | {bound_by} | {share_of_bound:.0%}"
    return columns([s for s in systems_of(rows) if "policy" in s], header, template)


def where(data: dict) -> str:
    """The machine of a row's results, versions, days and command."""
    days = sorted({day for s in data["systems"].values() for day in s["dates"]})
    known = version_text(data)
    told = dict.fromkeys(s["version"] for s in data["systems"].values() if s.get("version", known) not in known)
    versions = [known, *told]
    days = " to ".join(days[:1] + days[1:][-1:])
    return f"{machine_text(data['machine'])}; {', '.join(versions)}; {days}; {command_text(data)}"


#: factors that were aimed at: (row, system, over which other one, factor)
AIMS = [
    ("opt-1.3b 64+256", "ours, H2O + int8", "ours, H2O", 2),
    ("opt-6.7b 64+64", "ours, H2O + int8", "ours, H2O", 2),
    ("opt-1.3b 64+256", "ours, H2O + int8", "Accelerate", 15),
    ("opt-1.3b 64+256", "ours, H2O + int4, int8 matmuls", "Accelerate", 15),
    ("opt-1.3b 64+256", "ours, H2O + int8", "ZeRO-Inference", 15),
    ("llama-8b 64+64", "ours, H2O, int8 matmuls Q4_0", "llama.cpp Q4_0", 5),
    ("llama-1b 128+128", "ours, H2O, int8 matmuls Q8_0", "llama.cpp Q8_0", 5),
    ("llama-1b 128+128", "ours, H2O, int8 matmuls Q4_0", "llama.cpp Q4_0", 3),
    ("llama-1b 128+128 uncapped", "ours, H2O, int8 matmuls Q4_0", "llama.cpp Q4_0", 3),
    ("llama-1b 128+128 uncapped", "ours, H2O, int8 matmuls Q8_0", "llama.cpp Q8_0", 3),
    ("smollm2 512+64", "ours, H2O, int8 matmuls Q4_1", "transformers Q4_1", 3),
]


def aims(rows: list[dict]) -> str:
    """How far the factors that were aimed at were reached, where both systems came to their end."""
    by_name, lines = {data["row"]: data for data in rows}, []
    for row, ours, other, aim in AIMS:
        data = by_name.get(row, {"systems": {}})
        reached = [data["systems"].get(name, {}).get("tokens_per_s", {}).get("median") for name in (ours, other)]
        if None in reached:
            continue
        cap = f"{cap_text(data['job'])} cap".replace("none", "no")
        lines.append([f"{job_text(data['job'])}, {cap}", ours, other, f"{aim}x", f"{reached[0] / reached[1]:.1f}x"])
    return markdown(["job", "system", "over", "aim", "reached"], lines)


def throughput_machines(rows: list[dict]) -> str:
    header = ["job", "machine; versions; days; command"]
    return markdown(header, [[job_text(data["job"]), where(data)] for data in rows])


def peer_settings(data: dict) -> str:
    """What peers ran with, and what else was tried."""
    lines = []
    for name, systems in data["rows"].items():
        for system, s in systems.items():
            tried = "; ".join(f"{what}: {rate}" for what, rate in s.get("tried", {}).items())
            lines.append([name, system, setting_text(s), tried])
    return markdown(["row", "system", "runs with", "tokens/s by batch and options, from 8 tokens"], lines)


#: as those of TABLES
KILLS = (
    "",
    "rows",
    "model | block | rows of a job | kills | of them after a run's first block | jobs to their end",
    "{model} | {block} | {rows} | {kills} | {behind_the_first_block} | {jobs}",
)
#: of one result: a line above the table, where its rows are, the header, and the columns
TABLES = {
    "stream_long": (
        "",
        "windows",
        "tokens | perplexity | ms a token | resident, MiB",
        "{tokens} | {perplexity:.2f} | {ms:.2f} | {mib:.0f}",
    ),
    "format_rates": (
        "{threads} threads, TOP/s.\n\n",
        "rows",
        "out x in | rows | `_int_mm` alone | int8, native | transposed | packed | the best of these / `_int_mm` | bf16",
        "{shape} | {rows} | {tops[_int_mm]:.2f} | {tops[native]:.2f} | {tops[transposed]:.2f} | {tops[packed]:.2f} | "
        "{of_int_mm:.2f} | {tops[bf16]:.2f}",
    ),
    "format_rates_avx2": (
        "{threads} threads, TOP/s.\n\n",
        "rows",
        "out x in | rows | `_int_mm` alone | int8, tiled | int4, as stored | as floats | fp32 | bf16",
        "{shape} | {rows} | {tops[_int_mm]:.3f} | {tops[tiled]:.3f} | {tops[int4]:.3f} | {tops[floats]:.3f} | "
        "{tops[fp32]:.3f} | {tops[bf16]:.3f}",
    ),
    "rule_steps": ("", "rows", "rule | decode step, ms | over h2o's", "{rule} | {ms:.1f} | {over_h2o:.2f}"),
    "rule_ideas": ("", "rows", "idea | prose | code", "{idea} | {handbook:+.1%} | {stdlib:+.1%}"),
    "frontier": (
        "",
        "points",
        "system | sequences | seconds | tokens/s | runs",
        "{system} | {sequences} | {seconds[median]:.1f} | {tokens_per_s:.1f} | {runs}",
    ),
    "engine_ram": (
        "{workload[model]}, batch {workload[batch]}, {workload[gen_len]} tokens out.\n\n",
        "rows",
        "prompt | system | prefill, s | decode step, s | rounds",
        "{prompt_len} | {system} | {prefill_seconds[median]:.1f} | {decode_step_seconds[median]:.3f} | {rounds}",
    ),
    "engine_disk": (
        "{workload[model]}, weights on disk.\n\n",
        "blocks",
        "block | reading alone, s | computing alone, s | step, s | step / floor | peak / plan",
        "{block} ({policy}) | {seconds[read]:.2f} | {seconds[compute]:.2f} | {seconds[step]:.2f} | "
        "{step_over_floor:.2f} | {peak_over_plan:.2f}",
    ),
    "engine_families": (
        "",
        "rows",
        "model | block | reading alone, s | computing alone, s | step, s | step / floor",
        "{model} | {block} ({policy}) | {seconds[read]:.2f} | {seconds[compute]:.2f} | {seconds[step]:.2f} | "
        "{step_over_floor:.2f}",
    ),
    "engine_stop": (
        "{workload[model]}, block {workload[block]}, weights, cache and hidden states on disk.\n\n",
        "rows",
        "stops | seconds, median | longest",
        "{stops} | {median:.1f} | {max:.1f}",
    ),
    "jobs_kills": KILLS,
    "jobs_kills_demo_model": KILLS,
    "jobs_faults": ("", "rows", "call | went on | clear error", "{call} | {went_on} | {clear_error}"),
    "engine_gemm": (
        "",
        "rows",
        "shapes | batch | F.linear, TFLOP/s | ours | ours, packed",
        "{model} | {batch} | {tflops[F.linear]:.2f} | {tflops[ours]:.2f} | {tflops[ours, packed]:.2f}",
    ),
    "disk": (
        "",
        "rows",
        "reads | threads | request | alone, GB/s | CPU s per GB | beside compute, GB/s | compute rate left",
        "{reads} | {threads} | {request_mib} MiB | {alone_gb_per_s:.2f} | {alone_cpu_seconds_per_gb:.2f} | "
        "{beside_compute_gb_per_s:.2f} | {compute_rate_beside_reads:.0%}",
    ),
    "search_papers": (
        "",
        "rows",
        "figures of | job | policy | cache | published, tokens/s | predicted | ratio",
        "{source} | {model} {prompt_len}+{gen_len} | {policy} | {cache} | {published_tokens_per_s:g} | "
        "{predicted_tokens_per_s:.2f} | {ratio:.2f}",
    ),
    "search_machine": (
        "",
        "rows",
        "model, cap | policy | job | prefill, s | predicted / it | decode, s | predicted / it | bound by",
        "{model}, {cap_gib:g} GiB | {policy} | {prompt_len}+{gen_len}, {cache} | {prefill[measured]:.2f} | "
        "{prefill[predicted_over_measured]:.2f} | {decode[measured]:.2f} | {decode[predicted_over_measured]:.2f} | "
        "{bound_by}",
    ),
    "search_top": (
        "",
        "cases",
        "model, cap | job | picked | tokens/s | best of the grid | tokens/s | picked / best | block picked: full, H2O",
        "{model}, {cap_gib:g} GiB | {num_prompts} x {prompt_len}+{gen_len}, {cache} | {picked[policy]} | "
        "{picked[tokens_per_s]:.1f} | {best_of_grid[policy]} (of {policies_of_grid}) | "
        "{best_of_grid[tokens_per_s]:.1f} | {ratio:.2f} | {picked_block[full]}, {picked_block[h2o]}",
    ),
}


def prediction(data: dict) -> str:
    """How near the predictions of `search_machine` came."""
    told = "{phase}: median {median:.2f}, from {lowest:.2f} to {highest:.2f}"
    told = "; ".join(told.format(phase=phase, **s) for phase, s in data["summary"].items())
    return f"Predicted over measured seconds, {told}. Rounds: {data['rows'][0]['rounds']}."


def quality(data: dict) -> str:
    """What KV budgets cost, by `h2o-flexgen quality`."""
    w, rows = data["workload"], []
    for row in data["rows"]:
        slots = "all" if row["slots"] is None else "{heavy} + {recent}".format(**row)
        rule = row["rule"].split("layers=")
        rule = row["rule"] if len(rule) == 1 else f"{rule[0]}layers"
        rows.append(row | {"rule": rule, "slots": slots, "mib": row["kv_bytes"] / (1 << 20)})
    header = "rule | slots, heavy + recent | KV cache of a sequence, MiB | perplexity | rise | agreement"
    template = "{rule} | {slots} | {mib:.2f} | {perplexity:.2f} | {rise:+.1%} | {agreement:.1%}"
    job = f"{w['passages']} passages of {', '.join(w['texts'])}, {w['prompt_len']} tokens of prompt and {w['gen_len']}"
    return f"{w['model']} in {w['dtype']}, {job} teacher-forced.\n\n{columns(rows, header, template)}"


def summaries(data: dict) -> str:
    """How near the summaries under KV budgets come to the full cache's own."""
    rows = []
    for row in data["rows"]:
        found = {f"rouge_{n}": x for n, x in row["rouge"]["full_cache"]["rouge-score"].items()}
        rows.append(found | {"rule": row["rule"], "slots": row["slots"] or "all"})
    template = "{rule} | {slots} | {rouge_1:.3f} | {rouge_2:.3f} | {rouge_l:.3f}"
    return columns(rows, "rule | slots | ROUGE-1 | ROUGE-2 | ROUGE-L", template)


def stream_fresh(fresh: dict) -> str:
    """The last two windows of a long stream beside those of one that began later."""
    found = []
    for name, data in (("from the beginning", stored("stream_long")), ("begun 4,096 tokens before them", fresh)):
        last = data["windows"][-2:]
        perplexity = exp(-sum(w["logprob"] for w in last) / sum(w["scored"] for w in last))
        found.append({"stream": name, "tokens": last[-1]["tokens"], "perplexity": perplexity})
    header, template = (
        "stream | tokens at its end | perplexity of the last 8,192",
        "{stream} | {tokens} | {perplexity:.2f}",
    )
    return columns(found, header, template)


def layers_smollm2(data: dict) -> str:
    """The slots of each layer that a calibration comes to."""
    known, found = LayerLosses(data["budgets"], data["losses"]), []
    for slots in (102, 204):
        each = known.slots(slots // 2, slots // 2, data["window"])
        found.append({"slots": slots, "each": " ".join(str(heavy + recent) for heavy, recent in each)})
    return columns(found, "slots on average | of each layer", "{slots} | {each}")


def decoding(data: dict) -> str:
    """Of quantised weights."""
    header = "from | to fp32 | bf16 | int8 codes, a scale a row"
    return columns(data["decoding"], header, "{format} | {float32:.1f} | {bfloat16:.1f} | {int8:.1f}")


def cache_attention(data: dict) -> str:
    """Of a step over a cache in RAM."""
    header = "sequences, KV heads x queries of each, head size, slots | fp32 | bf16 | int8 | int4"
    template = "{cache} | {float32:.1f} | {bfloat16:.1f} | {int8:.1f} | {int4:.1f}"
    return columns(data["attention"], header, template)


def format_losses(data: dict) -> str:
    """What fewer bits cost."""
    rows = [
        row
        | {
            "weights": row["compress_weight"] or "as stored",
            "cache": row["compress_cache"] or "floats",
            "slots": row["slots"] or "all",
            "mib": row["kv_bytes"] / (1 << 20),
        }
        for row in data["rows"]
    ]
    header = "weights | matmuls | cache | slots | KV cache of a sequence, MiB | perplexity | rise"
    template = "{weights} | {compute} | {cache} | {slots} | {mib:.2f} | {perplexity:.2f} | {rise:+.1%}"
    return columns(rows, header, template)


def command_line(data: dict) -> str:
    """One run of the command line."""

    def time(phase: str) -> str:
        guess = f" (predicted {data['predicted'][f'{phase}_seconds']:.1f} s)" if "predicted" in data else ""
        return f"{data[phase]['seconds']:.1f} s{guess}, {data[phase]['tokens_per_s']:.3g} tokens/s"

    sizes = "{peak_ram_gib:.1f} GiB, {planned_ram_gib:.1f} GiB, {disk_gib:.1f} GiB".format(**data)
    lines = [["policy", data["policy"]], ["prefill", time("prefill")], ["decode", time("decode")]]
    return markdown(["command", f"`{data['flex_opt']}`"], [*lines, ["peak RAM, planned, on disk", sizes]])


def analysis(data: dict) -> str:
    """The figures of `h2o-flexgen analyse`: in all, by layer, and the loss."""
    ranks, overlap, n = data["ranks"], data["overlap"], data["neurons"]
    words = {name: each["spearman"] for name, each in data["words"]["correlation"].items()}
    fit, by_layer = ranks["fit"], lambda values: f"{min(values):.2f} to {max(values):.2f}"
    lines = [
        ["attention below 1 % of its row's maximum", data["sparsity"]["mean"], by_layer(data["sparsity"]["by_layer"])],
        ["attention that the top tenth of the tokens receives", ranks["top_tenth"], ""],
        ["exponent of the power law", fit["exponent"], by_layer(fit["exponent_by_layer"])],
        ["its R2, ranks {} to {}".format(*fit["ranks"]), fit["r2"], ""],
        ["rank correlation of a word's attention and co-occurrences", words["summed"], ""],
        ["the same of the attention of one occurrence", words["per_occurrence"], ""],
        ["heavy hitters that are those of the future", overlap["heavy_mean"], by_layer(overlap["heavy_by_layer"])],
        ["the same by chance", overlap["heavy_by_chance"], ""],
        ["all slots that are those of the future", overlap["mean"], by_layer(overlap["by_layer"])],
        ["tokens for which a neuron is active", n["mean"], by_layer(n["mean_by_layer"])],
        *([f"activations by the top {float(part):.0%} of neurons", x, ""] for part, x in n["carried"].items()),
    ]
    found = markdown(["figure", "mean", "layers"], [[name, f"{mean:.2f}", layers] for name, mean, layers in lines])
    loss = columns(
        data["loss"], "tokens behind the prompt see | perplexity | rise", "{cache} | {perplexity:.2f} | {rise:+.1%}"
    )
    return f"{found}\n\n{loss}"


# real jobs


def fastest(runs: list[dict]) -> list[dict]:
    """Of the runs of one job that came to their end, the fastest of each system."""
    found: dict[str, dict] = {}
    for run in runs:
        if "failed" not in run and run["seconds"] <= found.get(run["system"], run)["seconds"]:
            found[run["system"]] = run
    return list(found.values())


def runs_of(data: dict, job: str) -> list[dict]:
    return [run for run in data["runs"] if run["job"] == job]


def places_text(run: dict) -> str:
    """Of llama-server's options, or the policy of ours."""
    if "policy" in run:
        return run["policy"]
    return f"{run['options']['np']} places" + (", one cache" if "kvu" in run["options"] else "")


def real_jobs(data: dict) -> str:
    """Each system at its best number of places, and how the fastest of ours compares."""
    lines = []
    gains = []
    for job, about in data["jobs"].items():
        rates = {True: 0.0, False: 0.0}
        for run in fastest(runs_of(data, job)):
            ran = f"{(run['tokens'] - run['rows']) / run['row_steps']:.0%}" if run.get("row_steps") else ""
            guess = f"{run['predicted_over_measured']:.2f}" if "predicted_over_measured" in run else ""
            lines.append(run | {"about": about, "setting": places_text(run), "ran": ran, "guess": guess})
            rates[is_ours(run["system"])] = max(rates[is_ours(run["system"])], run["rows_per_s"])
        if all(rates.values()):
            gains.append(f"{job} {rates[True] / rates[False]:.2f}x")
    header = "job | system | setting | rows/s | tokens/s | seconds | whole command, s | tokens | row-steps that ran"
    header += " | predicted / measured"
    template = "{job}: {about} | {system} | {setting} | {rows_per_s:.2f} | {tokens_per_s:.1f} | {seconds:.1f} | "
    template += "{command_seconds:.1f} | {tokens} | {ran} | {guess}"
    told = [f"Rows/s of the fastest of ours over llama-server's: {', '.join(gains)}."] if gains else []
    told += sorted({f"llama-server is that of {run['version']}." for run in data["runs"] if "version" in run})
    return "\n\n".join([columns(lines, header, template), *told])


def real_jobs_rates(data: dict) -> str:
    """Rows/s of llama-server and of ours, each at its best setting."""
    lines = []
    for job, about in data["jobs"].items():
        rates = {run["system"]: run["rows_per_s"] for run in fastest(runs_of(data, job))}
        peer = rates.pop("llama-server")
        lines.append([about, f"{peer:.2f}", *(f"{rate:.2f} ({rate / peer:.1f}x)" for rate in rates.values())])
    return markdown(["job", "llama-server", *rates], lines)


def real_jobs_tried(data: dict) -> str:
    """Seconds of each setting of llama-server."""
    lines = []
    for run in data["runs"]:
        if is_ours(run["system"]):
            continue
        seconds = run.get("failed") or f"{run['seconds']:.1f}"
        computed = f"{run['prompt_tokens_computed'] / run['prompt_tokens']:.0%}" if "seconds" in run else ""
        lines.append([run["job"], places_text(run), seconds, computed, f"{run['cores_of_others']:.1f}"])
    header = ["job", "llama-server with", "seconds", "prompt tokens computed", "cores that others took"]
    return markdown(header, lines)


def versions(data: dict) -> str:
    """An older version beside this one: medians, and the median of the pairs' ratios."""
    lines = []
    for row in data["rows"]:
        gain = "{ratio:.2f}x ({0:.2f} to {1:.2f})".format(min(row["ratios"]), max(row["ratios"]), **row)
        seconds = old_and_new(row, row["measure"], "{:.1f}")
        rate = old_and_new(row, "tokens_per_s", "{:.1f}")
        ran = old_and_new(row, "running_share", "{:.0%}")
        moved = old_and_new(row, "moved_gb", "{:.1f}")
        setting = f"{row['policy']}, {row['computes_in']}, {row['compute']} matmuls"
        lines.append([row["about"], row["where"], seconds, gain, rate, ran, moved, setting])
    header = "job | weights and cache | seconds | gain | tokens/s | row-steps of running rows | GB moved | policy"
    return markdown(header.split(" | "), lines)


def old_and_new(row: dict, figure: str, form: str) -> str:
    return " -> ".join(form.format(row[side][figure]) for side in ("old", "new"))


OF_ROWS = (throughput, throughput_details, throughput_ours, throughput_machines, aims)
OF_ROWS = {function.__name__: function for function in OF_ROWS}
RUNS = ("opt-30b-searched", "opt-6.7b-8gib", "llama-3.1-8b-8gib")
OTHERS = dict.fromkeys(RUNS, command_line) | {"prediction": prediction, "analysis_smollm2": analysis}
OTHERS |= {
    "format_losses": format_losses,
    "headline": headline,
    "stream_fresh": stream_fresh,
    "decoding": decoding,
    "cache_attention": cache_attention,
    "layers_smollm2": layers_smollm2,
    "real_jobs": real_jobs,
    "real_jobs_tried": real_jobs_tried,
    "versions": versions,
}


#: of tables that have a name of their own
FILES = {"prediction": "search_machine", "decoding": "format_rates_avx2", "cache_attention": "format_rates_avx2"}
FILES |= {"real_jobs_rates": "real_jobs", "real_jobs_tried": "real_jobs"}


def table(name: str) -> str:
    """Raises KeyError for a name that is no table's."""
    if name in OF_ROWS:
        return OF_ROWS[name](rows_measured())
    file = FILES.get(name, name)
    data = stored(file)
    if not data:
        return f"(not measured yet: docs/benchmarks/{file}.json)"
    if name == "peer_settings":
        return peer_settings(data)
    for kind in (quality, summaries):
        if name.startswith(f"{kind.__name__}_"):
            return f"{kind(data)}\n\n{provenance(data)}"
    if name == "real_jobs_rates":  # beside it a link says where the rest stands
        return real_jobs_rates(data)
    if name in OTHERS:
        return f"{OTHERS[name](data)}\n\n{provenance(data)}"
    above, key, header, template = TABLES[name]
    rows = [row | readable(row) for row in data[key]]
    return f"{above.format(**data)}{columns(rows, header, template)}\n\n{provenance(data)}"


def readable(row: dict) -> dict:
    """The model and the cache of a row in words, if it has them."""
    found = {"model": row["model"].removeprefix("facebook/").upper()} if "model" in row else {}
    if "seconds_per_token" in row:
        found |= {"ms": 1000 * row["seconds_per_token"], "mib": row["resident_bytes"] / (1 << 20)}
    ratio = row.get("hh_ratio")
    return found | {"cache": f"H2O {ratio:g}" if ratio else "full"}


def fill(text: str) -> str:
    """A document with its tables made anew."""
    made = lambda match: f"<!-- table {match[1]} -->\n{table(match[1])}\n<!-- end -->"
    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", made, text, flags=re.S)


def main() -> int:
    stale = [path for path in DOCUMENTS if path.read_text() != fill(path.read_text())]
    if "--check" not in sys.argv:
        for path in stale:
            path.write_text(fill(path.read_text()))
    what = "stale" if "--check" in sys.argv else f"written from {RESULTS.relative_to(ROOT)}"
    print("\n".join(f"{path.name}: tables are {what}" for path in stale) or "up to date")
    return bool(stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())

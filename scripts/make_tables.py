"""Write the tables of README.md and docs/ from docs/benchmarks/*.json. `--check` only says whether they are up to date.

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from statistics import median

from bench_common import RESULTS, ROOT, stored
from throughput_rows import rounds, summarise, table_runs

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def load(name: str) -> dict | list[dict]:
    """What a table is made of; nothing if it has not been measured."""
    if name.startswith("throughput"):
        # a file for each row of the matrix and machine; that of OPT-125m only tries the script
        names = [path.stem for path in sorted(RESULTS.glob("throughput_*.json")) if "125m" not in path.stem]
        found = [data for data in map(stored, names) if table_runs(data)]  # there may be blocks of the frontier alone
        rows = sorted(found, key=lambda data: (size(data["row"]), data["machine"]["processor"]))
        readme = for_readme(rows)
        return readme if name == "throughput" else [data for data in rows if data not in readme]
    return stored(name)


def for_readme(rows: list[dict]) -> list[dict]:
    """Every row once: of the machine that has measured all its systems oftenest, among equals the latest."""

    def rank(data: dict) -> tuple[int, str, str]:
        days = [run["date"] for run in table_runs(data)]
        return rounds(data), max(days, default=""), min(days, default="")  # ended on one day: the one begun later

    chosen: dict[tuple, dict] = {}
    for data in sorted(rows, key=rank, reverse=True):
        row = data["row"]
        chosen.setdefault((row["device"], job_text(row), cap_text(row)), data)
    return [data for data in rows if data in chosen.values()]


def size(row: dict) -> tuple[float, int]:
    """Of a job, to sort by: parameters, and tokens of a sequence."""
    return float(re.search(r"opt-([\d.]+)b", row["model"])[1]), row["prompt_len"] + row["gen_len"]


def markdown(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine_text(m: dict) -> str:
    slow = ", no bf16 instructions" if m.get("bf16_instructions") is False else ""
    model = f" ({m['processor_model']})" if m.get("processor_model") else ""
    return f"{m['processor']}{model}, {m['cores']} cores, {m['ram_gib']:g} GiB RAM{slow}, {m['gpu'] or 'no GPU'}"


def where(data: dict) -> str:
    return f"{setting(data)}; {data['date']}; `{data['command']}`"


def setting(data: dict) -> str:
    """The machine, its cap, and versions."""
    m, v = data["machine"], data["versions"]
    cap = f", capped at {m['ram_cap_gib']:g} GiB with page cache" if m["ram_cap_gib"] else ""
    with_these = ", ".join(f"{name} {v[name]}" for name in v if name not in ("python", "numpy", "h2o_flexgen"))
    return f"{machine_text(m)}{cap}; {with_these}"


def policy_text(p: dict, between: str = ", ") -> str:
    return f"{p['gpu_batch_size']} x {p['num_gpu_batches']}{between}" + " ".join(f"{x:g}" for x in p["percent"])


def cache_text(ratio: float | None) -> str:
    return "full" if ratio is None else f"H2O {ratio:g}"


def ram(data: dict) -> str:
    w = data["workload"]
    rows = [
        [
            r["prompt_len"],
            r["system"],
            f"{r['prefill_seconds']:.1f}",
            f"{r['decode_step_seconds']:.3f}",
            f"{w['batch'] / r['decode_step_seconds']:.0f}",
            r["rounds"],
        ]
        for r in data["rows"]
    ]
    table = markdown(["prompt", "system", "prefill, s", "decode step, s", "decode, tokens/s", "rounds"], rows)
    ratios = markdown(["ratio of medians", ""], [[k, f"{v:.2f}x"] for k, v in data["ratios"].items()])
    return f"{w['model']}, batch {w['batch']}, {w['gen_len']} tokens out.\n\n{table}\n\n{ratios}\n\n{where(data)}"


def disk(data: dict) -> str:
    rows = []
    for result in data["results"]:
        for b in result["blocks"]:
            s = b["seconds"]
            rows.append(
                [
                    result["reads"],
                    f"{b['block']} ({b['gpu_batch_size']} x {b['num_gpu_batches']})",
                    f"{s['read']:.2f}",
                    f"{s['compute']:.2f}",
                    f"{s['step']:.2f}",
                    f"{b['step_over_floor']:.2f}",
                    f"{b['peak_over_plan']:.2f}",
                ]
            )
    header = ["reads", "block", "reading alone, s", "computing alone, s", "step, s", "step / floor", "peak / plan"]
    return f"{data['workload']['model']}, weights on disk.\n\n{markdown(header, rows)}\n\n{where(data)}"


def gemm(data: dict) -> str:
    systems = list(data["rows"][0]["tflops"])
    rows = [
        [r["model"], r["batch"], f"{r['tflops']['F.linear']:.2f}"]
        + [f"{r['tflops'][name]:.2f} ({100 * r['ratio'][name]:.0f} %)" for name in systems[1:]]
        for r in data["rows"]
    ]
    header = ["shapes", "batch", "F.linear, TFLOP/s", *systems[1:]]
    return markdown(header, rows) + f"\n\n{where(data)}"


def big(data: dict) -> str:
    r = data["report"]

    def time(phase: str, digits: int) -> str:
        guess = f" (predicted {r['predicted'][f'{phase}_seconds']:.1f} s)" if "predicted" in r else ""
        return f"{r[phase]['seconds']:.1f} s{guess}, {r[phase]['tokens_per_s']:.{digits}f} tokens/s"

    rows = [
        ["policy", policy_text(r["policy"], ", percent ")],
        ["prompts", f"{r['workload']['num_prompts']} of {r['workload']['prompt_len']} tokens"],
        ["prefill", time("prefill", 1)],
        ["decode", time("decode", 2)],
        ["peak RAM", f"{(r['peak_memory_bytes']['gpu'] + r['peak_memory_bytes']['cpu']) / 2**30:.1f} GiB"],
        ["planned RAM", f"{(r['planned_memory_bytes']['gpu'] + r['planned_memory_bytes']['cpu']) / 2**30:.1f} GiB"],
        ["on disk", f"{r['peak_memory_bytes']['disk'] / 2**30:.1f} GiB"],
    ]
    return markdown([f"`{data['flex_opt']}`", ""], rows) + f"\n\n{where(data)}"


def reads(data: dict) -> str:
    rows = [
        [
            r["reads"],
            r["threads"],
            f"{r['request_mib']} MiB",
            f"{r['alone_gb_per_s']:.2f}",
            f"{r['alone_cpu_seconds_per_gb']:.2f}",
            f"{r['beside_compute_gb_per_s']:.2f}",
            f"{100 * r['compute_rate_beside_reads']:.0f} %",
        ]
        for r in data["rows"]
    ]
    header = ["reads", "threads", "request", "alone, GB/s", "CPU s per GB", "beside compute, GB/s", "compute rate left"]
    return markdown(header, rows) + f"\n\n{where(data)}"


def search_papers(data: dict) -> str:
    rows = [
        [
            r["source"],
            f"{r['model'].upper()} {r['prompt_len']}+{r['gen_len']}",
            r["policy"],
            cache_text(r["hh_ratio"]),
            f"{r['published_tokens_per_s']:g}",
            f"{r['predicted_tokens_per_s']:.2f}",
            f"{r['ratio']:.2f}",
        ]
        for r in data["rows"]
    ]
    header = ["figures of", "job", "policy", "cache", "published, tokens/s", "predicted", "ratio"]
    return markdown(header, rows) + f"\n\nProfile `{data['profile']}`; {data['date']}; `{data['command']}`"


def search_machine(data: dict) -> str:
    rows = [
        [
            f"{r['model'].removeprefix('facebook/')}, {r['cap_gib']:g} GiB",
            policy_text(r["policy"]),
            f"{r['prompt_len']}+{r['gen_len']}, {cache_text(r['hh_ratio'])}",
            f"{median(r['prefill']['measured']):.2f}",
            f"{r['prefill']['ratio']:.2f}",
            f"{median(r['decode']['measured']):.2f}",
            f"{r['decode']['ratio']:.2f}",
            r["bound_by"],
        ]
        for r in data["rows"]
    ]
    header = ["model, cap", "policy", "job", "prefill, s", "predicted / it", "decode, s", "predicted / it", "bound by"]
    summary = "; ".join(
        f"{phase}: median {s['median']:.2f}, from {s['lowest']:.2f} to {s['highest']:.2f}"
        for phase, s in data["summary"].items()
    )
    measured = len(data["rows"][0]["prefill"]["measured"])
    return f"{markdown(header, rows)}\n\nPredicted over measured, {summary}. Rounds: {measured}.\n\n{where(data)}"


def search_top(data: dict) -> str:
    rows = [
        [
            f"{c['model'].removeprefix('facebook/')}, {c['cap_gib']:g} GiB",
            f"{c['num_prompts']} x {c['prompt_len']}+{c['gen_len']}, {cache_text(c['hh_ratio'])}",
            policy_text(c["picked"]),
            f"{c['picked_tokens_per_s']:.1f}",
            f"{policy_text(c['best_of_grid'])} (of {len(c['grid'])})",
            f"{c['best_of_grid_tokens_per_s']:.1f}",
            f"{c['ratio']:.2f}",
            f"{c['picked_block']['full']}, {c['picked_block']['h2o']}",
        ]
        for c in data["cases"]
    ]
    header = ["model, cap", "job", "picked", "tokens/s", "best of the grid", "tokens/s", "picked / best"]
    header.append("block picked: full, H2O")
    return f"{markdown(header, rows)}\n\n{where(data)}"


def job_text(row: dict) -> str:
    return f"{row['model'].removeprefix('facebook/')} {row['prompt_len']}+{row['gen_len']}"


def throughput(rows: list[dict]) -> str:
    """For every machine: rates of all systems; what died; our policies, and how near they come to what bounds them."""
    parts = (part for machine, of_it in by_machine(rows).items() for part in (f"**{machine}**", *on_a_machine(of_it)))
    return "\n\n".join(parts)


def by_machine(rows: list[dict]) -> dict[str, list[dict]]:
    machines: dict[str, list[dict]] = {}
    for data in rows:
        machines.setdefault(machine_text(data["machine"]), []).append(data)
    return machines


def on_a_machine(rows: list[dict]) -> list[str]:
    summaries = [(data, summarise(data)) for data in rows]
    found = [(data, name, s) for data, systems in summaries for name, s in systems.items()]
    died = [f"{name}, {job_text(data['row'])}: {'; '.join(s['failed'])}" for data, name, s in found if s["failed"]]
    parts = [rates(summaries)]
    if died:
        parts.append("Runs that died: " + ". ".join(died) + ".")
    if bounds := [bound(data, name, s) for data, name, s in found if "bound_by" in s]:
        header = ["job", "cap", "ours", "policy of the first run", "time, predicted / measured", "read a step, GB"]
        header += ["decode is bound by", "of that bound"]
        parts.append(markdown(header, bounds))
    alike: dict[str, list[dict]] = {}
    for data in rows:
        alike.setdefault(setting(data), []).append(data)
    for text, of_it in alike.items():
        commands = ", ".join(f"`{data['command']}`" for data in of_it)
        parts.append(f"{text}; {dates([run for data in of_it for run in table_runs(data)])}; {commands}")
    return parts


def rates(summaries: list[tuple[dict, dict[str, dict]]]) -> str:
    lines = []
    for data, systems in summaries:
        best = systems.get("ours, H2O", {}).get("tokens_per_s")
        for name, s in systems.items():
            start = [job_text(data["row"]), cap_text(data["row"]), name]
            if "tokens_per_s" not in s:
                if s["dies"]:
                    lines.append([*start, "", "", "", "", "died", "", ""])
                continue
            speed, (low, high) = s["tokens_per_s"], s["range"]
            spread = f" ({low:.2f} to {high:.2f})" if s["runs"] > 1 else ""
            times = [f"{s['prefill_seconds']:.1f}", f"{s['decode_seconds']:.1f}", f"{speed:.2f}{spread}"]
            factor = f"{best / speed:.{1 if best >= speed else 2}f}x" if best else ""
            lines.append([*start, s["batch"], s["lowest_tier"], *times, factor, s["runs"]])
    header = [
        "job",
        "cap",
        "system",
        "batch",
        "lowest tier",
        "prefill, s",
        "decode, s",
        "tokens/s",
        "H2O is faster by",
        "runs",
    ]
    return markdown(header, lines)


def bound(data: dict, name: str, s: dict) -> list:
    guess, part = f"{s['predicted_over_measured']:.2f}", f"{1 / s['decode_over_floor']:.1%}"
    read = f"{s['decode_read_bytes'] / (data['row']['gen_len'] - 1) / 1e9:.2f}"
    job = [job_text(data["row"]), cap_text(data["row"]), name]
    return [*job, policy_text(s["policy"]), guess, read, s["bound_by"], part]


def cap_text(row: dict) -> str:
    return "none" if row["cap"] is None else f"{row['cap']:g} GiB"


def dates(runs: list[dict]) -> str:
    """The first and the last day of runs."""
    days = sorted({run["date"] for run in runs})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


TABLES = {
    "throughput": throughput,
    "throughput_elsewhere": throughput,
    "search_papers": search_papers,
    "search_machine": search_machine,
    "search_top": search_top,
    "engine_ram": ram,
    "engine_disk": disk,
    "engine_gemm": gemm,
    "opt-30b-searched": big,
    "opt-6.7b-8gib": big,
    "disk": reads,
}


def fill(text: str) -> str:
    def table(match: re.Match) -> str:
        name = match[1]
        data = load(name)
        body = TABLES[name](data) if data else "(not measured yet)"
        return f"<!-- table {name} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, text, flags=re.S)


def main() -> int:
    stale = []
    for path in DOCUMENTS:
        if (text := path.read_text()) != (filled := fill(text)):
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(filled)
    print(
        "\n".join(f"{name}: tables {'are stale' if '--check' in sys.argv else 'written'}" for name in stale)
        or "up to date"
    )
    return bool(stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())

"""Write the tables of README.md and docs/ from docs/benchmarks/*.json.

    python -m bench.tables [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`. `--check` only says whether they are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from bench.common import RESULTS, ROOT, stored
from bench.rows import ROWS, file_name

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: columns of the README's table
OF_OURS, H2O = ("ours, full cache", "ours, H2O"), "ours, H2O"


def markdown(header: list[str], rows: Iterable[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine_text(m: dict) -> str:
    model = f" ({m['processor_model']})" if m.get("processor_model") else ""
    return f"{m['processor']}{model}, {m['cores']} cores, {m['ram_gib']:g} GiB RAM, {m['gpu'] or 'no GPU'}"


def where(data: dict) -> str:
    """The machine, versions, date and command of a result."""
    cap = f", capped at {data['cap_gib']:g} GiB with page cache" if data.get("cap_gib") else ""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"{machine_text(data['machine'])}{cap}; {versions}; {data['date']}; `{data['command']}`"


def job_text(job: dict) -> str:
    name = job["model"].removeprefix("facebook/").replace("opt-", "OPT-").replace("b", "B").replace("m", "M")
    return f"{name}, {job['prompt_len']} + {job['gen_len']}"


def cap_text(job: dict) -> str:
    return "none" if job["cap_gib"] is None else f"{job['cap_gib']:g} GiB"


def cache_text(ratio: float | None) -> str:
    return "full" if ratio is None else f"H2O {ratio:g}"


def rows_measured() -> list[dict]:
    """The results of all rows but the one that tries the benchmark."""
    return [found for name in ROWS if not name.startswith("125m") and (found := stored(file_name(name)))]


# the comparison


def throughput(rows: list[dict]) -> str:
    """A line for each row: median tokens/s of every system, in brackets its batch."""
    peers = list(dict.fromkeys(s for data in rows for s in data["systems"] if s not in OF_OURS))
    lines = []
    for data in rows:
        systems = {name: s for name, s in data["systems"].items() if s["runs"]}
        cells = [
            f"{systems[name]['tokens_per_s']['median']:.1f} ({systems[name]['batch']})" if name in systems else "-"
            for name in (*peers, *OF_OURS)
        ]
        best = max((systems[name]["tokens_per_s"]["median"] for name in peers if name in systems), default=None)
        gain = systems[H2O]["tokens_per_s"]["median"] / best if best and H2O in systems else None
        lines.append([job_text(data["job"]), cap_text(data["job"]), *cells, f"{gain:.1f}x" if gain else "-"])
    return markdown(["model, prompt + output", "memory cap", *peers, *OF_OURS, "H2O over the best peer"], lines)


def throughput_details(rows: list[dict]) -> str:
    """A line for each system of each row."""
    lines = []
    for data in rows:
        for name, s in data["systems"].items():
            start = [job_text(data["job"]), name, s["batch"]]
            if not s["runs"]:
                lines.append([*start, "", "", "", "died", 0])
                continue
            t = s["tokens_per_s"]
            spread = f" ({t['min']:.2f} to {t['max']:.2f})" if s["runs"] > 1 else ""
            times = [f"{s['prefill_seconds']:.1f}", f"{s['decode_seconds']:.1f}"]
            lines.append([*start, s["lowest_tier"], *times, f"{t['median']:.2f}{spread}", s["runs"]])
    return markdown(["job", "system", "batch", "lowest tier", "prefill, s", "decode, s", "tokens/s", "runs"], lines)


def throughput_deaths(rows: list[dict]) -> str:
    dead = [(data, name, s["died"]) for data in rows for name, s in data["systems"].items() if "died" in s]
    return markdown(["job", "system", "died"], [[job_text(d["job"]), name, "; ".join(died)] for d, name, died in dead])


def throughput_ours(rows: list[dict]) -> str:
    """Our policies, and how near they come to what was predicted and to what bounds them."""
    lines = []
    for data in rows:
        for name, s in data["systems"].items():
            if "policy" in s:
                guess, peak = (
                    f"{s[key]:.2f}" if key in s else "" for key in ("predicted_over_measured", "peak_over_plan")
                )
                read = f"{s['read_gb_per_step']:.2f}" if "read_gb_per_step" in s else ""
                share = f"{s['share_of_bound']:.0%}" if "share_of_bound" in s else ""
                bound = s.get("bound_by", "")
                lines.append([job_text(data["job"]), name, s["policy"], guess, peak, read, bound, share])
    header = ["job", "system", "policy of the first run", "time, predicted / measured", "peak / plan"]
    return markdown([*header, "read a step, GB", "decode is bound by", "of that bound"], lines)


def throughput_machines(rows: list[dict]) -> str:
    lines = []
    for data in rows:
        days = sorted(day for s in data["systems"].values() for day in s["dates"])
        span = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        lines.append([job_text(data["job"]), machine_text(data["machine"]), versions, span, f"`{data['command']}`"])
    return markdown(["job", "machine", "versions", "days", "command"], lines)


def peer_settings(data: dict) -> str:
    """What peers ran with, and what else was tried."""
    lines = []
    for name, systems in data["rows"].items():
        for system, s in systems.items():
            if s.get("tried"):
                options = " ".join(f"{key} {value}" for key, value in s["options"].items())
                tried = "; ".join(f"{what}: {rate}" for what, rate in s["tried"].items())
                lines.append([name, system, f"{s['batch']} {options}".strip(), tried])
    return markdown(["row", "system", "runs with batch", "tokens/s by batch and options, from 8 tokens"], lines)


def frontier(data: dict) -> str:
    lines = [
        [p["system"], p["sequences"], f"{p['seconds']['median']:.1f}", f"{p['tokens_per_s']:.1f}", p["runs"]]
        for p in data["points"]
    ]
    return f"{markdown(['system', 'sequences', 'seconds', 'tokens/s', 'runs'], lines)}\n\n{where(data)}"


# the engine


def ram(data: dict) -> str:
    w = data["workload"]
    lines = []
    for r in data["rows"]:
        prefill, step = r["prefill_seconds"]["median"], r["decode_step_seconds"]["median"]
        rates = [f"{prefill:.1f}", f"{step:.3f}", f"{w['batch'] / step:.0f}", r["rounds"]]
        lines.append([r["prompt_len"], r["system"], *rates])
    table = markdown(["prompt", "system", "prefill, s", "decode step, s", "decode, tokens/s", "rounds"], lines)
    return f"{w['model']}, batch {w['batch']}, {w['gen_len']} tokens out.\n\n{table}\n\n{where(data)}"


def disk(data: dict) -> str:
    lines = []
    for b in data["blocks"]:
        s = b["seconds"]
        times = [f"{s[what]:.2f}" for what in ("read", "compute", "step")]
        ratios = [f"{b['step_over_floor']:.2f}", f"{b['peak_over_plan']:.2f}"]
        lines.append([f"{b['block']} ({b['policy']})", *times, *ratios])
    header = ["block", "reading alone, s", "computing alone, s", "step, s", "step / floor", "peak / plan"]
    return f"{data['workload']['model']}, weights on disk.\n\n{markdown(header, lines)}\n\n{where(data)}"


def gemm(data: dict) -> str:
    lines = []
    for r in data["rows"]:
        base, *ours = r["tflops"].values()
        lines.append([r["model"], r["batch"], f"{base:.2f}", *(f"{x:.2f} ({x / base:.0%})" for x in ours)])
    header = ["shapes", "batch", "F.linear, TFLOP/s", *list(data["rows"][0]["tflops"])[1:]]
    return f"{markdown(header, lines)}\n\n{where(data)}"


def reads(data: dict) -> str:
    lines = [
        [
            r["reads"],
            r["threads"],
            f"{r['request_mib']} MiB",
            f"{r['alone_gb_per_s']:.2f}",
            f"{r['alone_cpu_seconds_per_gb']:.2f}",
            f"{r['beside_compute_gb_per_s']:.2f}",
            f"{r['compute_rate_beside_reads']:.0%}",
        ]
        for r in data["rows"]
    ]
    header = ["reads", "threads", "request", "alone, GB/s", "CPU s per GB", "beside compute, GB/s", "compute rate left"]
    return f"{markdown(header, lines)}\n\n{where(data)}"


def big(data: dict) -> str:
    """One run of the command line."""

    def time(phase: str) -> str:
        guess = f" (predicted {data['predicted'][f'{phase}_seconds']:.1f} s)" if "predicted" in data else ""
        return f"{data[phase]['seconds']:.1f} s{guess}, {data[phase]['tokens_per_s']:.3g} tokens/s"

    sizes = [f"{data[key]:.1f} GiB" for key in ("peak_ram_gib", "planned_ram_gib", "disk_gib")]
    lines = [["policy", data["policy"]], ["prefill", time("prefill")], ["decode", time("decode")]]
    lines.append(["peak RAM, planned, on disk", ", ".join(sizes)])
    return f"{markdown(['command', '`' + data['flex_opt'] + '`'], lines)}\n\n{where(data)}"


# the search


def search_papers(data: dict) -> str:
    lines = [
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
    return f"{markdown(header, lines)}\n\nProfile `{data['profile']}`; {data['date']}; `{data['command']}`"


def search_machine(data: dict) -> str:
    lines = []
    for r in data["rows"]:
        of = (r["prefill"], r["decode"])
        phases = [f"{x:.2f}" for phase in of for x in (phase["measured"], phase["predicted_over_measured"])]
        job = f"{r['prompt_len']}+{r['gen_len']}, {cache_text(r['hh_ratio'])}"
        model = f"{r['model'].removeprefix('facebook/')}, {r['cap_gib']:g} GiB"
        lines.append([model, r["policy"], job, *phases, r["bound_by"]])
    header = ["model, cap", "policy", "job", "prefill, s", "predicted / it", "decode, s", "predicted / it", "bound by"]
    return f"{markdown(header, lines)}\n\n{prediction(data)} Rounds: {data['rows'][0]['rounds']}.\n\n{where(data)}"


def prediction(data: dict) -> str:
    """How near the predictions of `search_machine` came."""
    found = data["summary"].items()
    told = (f"{phase}: median {s['median']:.2f}, from {s['lowest']:.2f} to {s['highest']:.2f}" for phase, s in found)
    return f"Predicted over measured seconds, {'; '.join(told)}."


def search_top(data: dict) -> str:
    lines = []
    for c in data["cases"]:
        picked, best, block = c["picked"], c["best_of_grid"], c["picked_block"]
        lines.append(
            [
                f"{c['model'].removeprefix('facebook/')}, {c['cap_gib']:g} GiB",
                f"{c['num_prompts']} x {c['prompt_len']}+{c['gen_len']}, {cache_text(c['hh_ratio'])}",
                picked["policy"],
                f"{picked['tokens_per_s']:.1f}",
                f"{best['policy']} (of {c['policies_of_grid']})",
                f"{best['tokens_per_s']:.1f}",
                f"{c['ratio']:.2f}",
                f"{block['full']}, {block['h2o']}",
            ]
        )
    header = ["model, cap", "job", "picked", "tokens/s", "best of the grid", "tokens/s", "picked / best"]
    return f"{markdown([*header, 'block picked: full, H2O'], lines)}\n\n{where(data)}"


OF_ROWS = {
    f.__name__: f for f in (throughput, throughput_details, throughput_deaths, throughput_ours, throughput_machines)
}
TABLES = {
    "peer_settings": peer_settings,
    "frontier": frontier,
    "engine_ram": ram,
    "engine_disk": disk,
    "engine_gemm": gemm,
    "disk": reads,
    "opt-30b-searched": big,
    "opt-6.7b-8gib": big,
    "search_papers": search_papers,
    "search_machine": search_machine,
    "prediction": lambda data: f"{prediction(data)}\n\n{where(data)}",
    "search_top": search_top,
}


def table(name: str) -> str:
    if name in OF_ROWS:
        return OF_ROWS[name](rows_measured())
    data = stored("search_machine" if name == "prediction" else name)
    return TABLES[name](data) if data else f"(not measured yet: docs/benchmarks/{name}.json)"


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

"""Train the demo model: a small OPT on the source text of the Python standard library.

    python scripts/train_demo_model.py --minutes 90 --out h2o_flexgen/demo_model

The learning rate follows the wall clock, so the run ends on time on a shared machine. SIGTERM or
Ctrl-C ends the training and exports what there is; `--resume` goes on from the last checkpoint.
"""

import argparse
import json
import lzma
import math
import os
import platform
import signal
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

EOS = 2
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
MAX_FILE_BYTES = 400_000
WARM_UP_STEPS, DECAY_FROM = 50, 0.6
MUON_LR, ADAM_LR = 0.02, 3e-3
ROWS_A_STEP, REPEAT_SHARE = 8, 0.1


def read_corpus() -> tuple[list[str], list[str]]:
    """The texts of the running interpreter's standard library: (training, held out).

    Sorted by path, every 20th file is held out. Left out: `site-packages`, `encodings`, files
    over 400 kB and files that are not UTF-8.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if "site-packages" in parts or parts[0] == "encodings":
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            texts.append(path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            continue
    return [t for i, t in enumerate(texts) if i % 20], texts[::20]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE like OPT's: `</s>` (id 2) is put before every text, any text round-trips."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", EOS)]
    )
    return tokenizer


def encode_stream(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one int64 stream, each ended by `</s>`; a literal "</s>" in a text stays text."""
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    tokenizer.encode_special_tokens = False
    return torch.cat([torch.tensor([*e.ids, EOS]) for e in encodings])


def draw_rows(stream: torch.Tensor, rows: int, context: int, generator: torch.Generator):
    """Random training rows: (inputs, targets), each [rows, context].

    A row is `</s>` and then consecutive tokens from a random offset. In one row of ten a passage
    of 64 to 256 tokens comes again later in the row, so that copying from the context pays.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    batch = torch.full((rows, context + 1), EOS)
    for row in batch:
        start = draw(0, len(stream) - context)
        row[1:] = stream[start : start + context]
        if torch.rand((), generator=generator) < REPEAT_SHARE:
            length = draw(context // 16, context // 4)
            source = draw(1, context + 1 - 2 * length)
            target = draw(source + length, context + 1 - length)
            row[target : target + length] = row[source : source + length].clone()
    return batch[:, :-1], batch[:, 1:]


def windows(stream: torch.Tensor, context: int) -> list[torch.Tensor]:
    """Non-overlapping pieces of context - 1 tokens (the last may be shorter), `</s>` before each."""
    return [F.pad(piece, (1, 0), value=EOS) for piece in stream.split(context - 1)]


class Layer(nn.Module):
    """One pre-norm OPT decoder layer, its parameters named as in transformers."""

    def __init__(self, config: OPTConfig):
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(size, size) for name in names})
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, size)
        self.final_layer_norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, length, hidden] -> the same shape."""
        h = self.self_attn_layer_norm(x)
        q, k, v = (
            self.self_attn[name](h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.self_attn["out_proj"](attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class Decoder(nn.Module):
    """An OPT decoder with tied embeddings, its parameters named as in transformers."""

    def __init__(self, config: OPTConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings + 2, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or "out_proj" in name or "fc2" in name:
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [rows, length] -> logits [rows, length, vocab]; OPT's positions start at 2."""
        positions = torch.arange(2, 2 + tokens.shape[1])
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.final_layer_norm(x), self.embed_tokens.weight)


def make_optimizers(model: Decoder) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for all else; `base_lr` is the rate at its highest."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95),
        torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def rate(step: int, progress: float) -> float:
    """The learning rate's share of its highest; progress = elapsed wall time / budget."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm_up * min(1.0, max(0.0, 1 - progress) / (1 - DECAY_FROM))


def train_step(model, optimizers, inputs, targets, share: float) -> float:
    """One step at `share` of the highest learning rate; the mean loss in nats per token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * share
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def window_losses(logits_of, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """The loss of every token after the first of each window, in nats: one [length - 1] each."""
    losses = []
    for piece in pieces:
        logits = logits_of(piece[None])[0, :-1].float()
        losses.append(F.cross_entropy(logits, piece[1:], reduction="none"))
    return losses


def loss_by_eighth(losses: list[torch.Tensor], context: int) -> list[float]:
    """Mean loss (nats per token) in each eighth of the context, over the full windows."""
    full = torch.stack([x for x in losses if len(x) == context - 1] or losses)
    return [part.mean().item() for part in full.tensor_split(8, dim=1)]


def export(model: Decoder, config: OPTConfig, tokenizer: Tokenizer, out: Path) -> None:
    """Write the fp16 model and the tokenizer as transformers reads them."""
    weights = {f"model.decoder.{k}": v.half() for k, v in model.state_dict().items()}
    assert all(w.isfinite().all() for w in weights.values()), "a weight does not fit fp16"
    shipped = OPTForCausalLM(config).half()
    shipped.load_state_dict(weights | {"lm_head.weight": weights["model.decoder.embed_tokens.weight"]})
    shipped.save_pretrained(out)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    path = out / "tokenizer_config.json"
    path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    (out / "model.safetensors").chmod(0o644)


def evaluate_export(out: Path, held_out: list[str], stream: torch.Tensor, most: int) -> dict:
    """Measure the files as shipped (fp16 weights, computed in fp32) through transformers.

    The held-out files, each ended by `</s>`, are one stream cut in windows; bits per byte is the
    loss of all its tokens over the bytes of the text. `most` > 0 takes that many windows only.
    """
    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in held_out:
        if "</s>" not in text:
            ids = tokenizer(text, truncation=False)["input_ids"]
            assert ids[0] == EOS and tokenizer.decode(ids, skip_special_tokens=True) == text
    model = OPTForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    context = model.config.max_position_embeddings
    pieces = windows(stream, context)
    taken = pieces[:most] if most else pieces
    losses = window_losses(lambda ids: model(ids).logits, taken)
    text = "".join(held_out).encode()
    share = sum(map(len, losses)) / len(stream)
    eighths = loss_by_eighth(losses, context)
    nats = sum(x.sum().item() for x in losses)
    return {
        "files": len(held_out),
        "bytes": len(text),
        "tokens": len(stream),
        "share_evaluated": round(share, 4),
        "bits_per_byte": round(nats / math.log(2) / (len(text) * share), 4),
        "xz_9_bits_per_byte": round(8 * len(lzma.compress(text, preset=9)) / len(text), 4),
        "nats_per_token": round(nats / sum(map(len, losses)), 4),
        "nats_by_eighth_of_context": [round(x, 4) for x in eighths],
        "first_eighth": round(eighths[0], 4),
        "second_half": round(sum(eighths[4:]) / 4, 4),
    }


CARD = """# The demo model

An OPT of {layers} layers, {hidden} wide, {heads} heads, {parameters:,} parameters (fp16), with a
byte-level BPE of {vocab:,} entries and a context of {context:,} tokens. It is there to try and to
judge the engine on without a download. It writes Python-like text and is of no other use.

**Attribution.** Trained on nothing but the source text of the standard library of CPython
{python} (with its tests; without `encodings/` and files over 400 kB), copyright Python Software
Foundation and contributors, under the PSF licence, https://docs.python.org/3/license.html.

**Training.** {train_tokens:,} tokens ({steps:,} steps of {step_tokens:,}) drawn from
{corpus_tokens:,}, in {minutes:.0f} minutes of wall time and {cpu_minutes:.0f} CPU minutes on
{machine}; seed {seed}. In one row of ten a passage comes again later in the row. The learning
rate follows the wall clock, so a second run gives a similar model, not the same one.

**Held out:** every 20th file, {files} files, {bytes:,} bytes, {tokens:,} tokens, in windows of
{context:,} tokens; these weights computed in fp32 through transformers' OPTForCausalLM
({share_evaluated:.0%} of the held-out text).

| figure | value |
| --- | --- |
| bits per byte | {bits_per_byte:.3f} |
| bits per byte, `xz -9` on the same text | {xz_9_bits_per_byte:.3f} |
| loss, nats per token | {nats_per_token:.3f} |
| loss in the first eighth of the context | {first_eighth:.3f} |
| loss in the second half of the context | {second_half:.3f} |
| loss by eighth of the context | {by_eighth} |

Made by `scripts/train_demo_model.py`; the figures are also in `training.json`.
"""


def machine_in_words() -> str:
    """Cores and memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} {platform.machine()} cores with {memory:.0f} GiB of memory"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=90, help="wall time for training")
    parser.add_argument("--out", type=Path, default=Path("h2o_flexgen/demo_model"))
    scratch = Path(tempfile.gettempdir()) / "h2o_flexgen_demo_model"
    parser.add_argument("--scratch", type=Path, default=scratch, help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--eval-windows", type=int, default=0, help="at the end; 0 means all")
    return parser.parse_args()


def train(args, model: Decoder, stream: torch.Tensor, probe: list[torch.Tensor]) -> dict:
    """Train until the wall-clock budget is spent or a signal comes; what it took, as a dict."""
    optimizers = make_optimizers(model)
    checkpoint = args.scratch / "checkpoint.pt"
    args.scratch.mkdir(parents=True, exist_ok=True)
    spent = {"steps": 0, "seconds": 0.0, "cpu_seconds": 0.0, "stopped_early": False}
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        spent = saved["spent"] | {"stopped_early": False}
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def stop(*_):
        spent["stopped_early"] = True

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, stop)
    budget = args.minutes * 60
    start, cpu_start = (
        time.monotonic() - spent["seconds"],
        time.process_time() - spent["cpu_seconds"],
    )
    logged = probed = kept = spent["seconds"]
    logged_step, mean = spent["steps"], 0.0
    while spent["seconds"] < budget and not spent["stopped_early"]:
        step = spent["steps"]
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        inputs, targets = draw_rows(stream, ROWS_A_STEP, args.context, generator)
        loss = train_step(model, optimizers, inputs, targets, rate(step, spent["seconds"] / budget))
        assert math.isfinite(loss), f"the loss is {loss} at step {step}"
        mean = loss if step == logged_step else mean + (loss - mean) / (step + 1 - logged_step)
        now = time.monotonic() - start
        cpu = time.process_time() - cpu_start
        spent.update(steps=step + 1, seconds=now, cpu_seconds=cpu)
        if now - logged >= 15:
            speed = (step + 1 - logged_step) * inputs.numel() / (now - logged)
            tokens = (step + 1) * inputs.numel()
            print(
                f"{now / 60:6.1f} min  step {step + 1:5d}  {tokens / 1e6:6.2f} M tokens  "
                f"{speed:6.0f} tokens/s  loss {mean:.3f}",
                flush=True,
            )
            logged, logged_step = now, step + 1
        if now - kept >= 180:
            states = [o.state_dict() for o in optimizers]
            part = checkpoint.with_suffix(".part")
            torch.save({"spent": spent, "model": model.state_dict(), "optimizers": states}, part)
            part.replace(checkpoint)
            kept = now
        if now - probed >= min(300, budget / 4):
            with torch.autocast("cpu", torch.bfloat16):
                eighths = loss_by_eighth(window_losses(model, probe), args.context)
            print(
                f"held out: {sum(eighths) / 8:.3f}, first eighth {eighths[0]:.3f}, "
                f"second half {sum(eighths[4:]) / 4:.3f} nats",
                flush=True,
            )
            probed = time.monotonic() - start
    return spent


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    training, held_out = read_corpus()
    tokenizer = train_tokenizer(training, args.vocab)
    stream, held_stream = (encode_stream(tokenizer, texts) for texts in (training, held_out))
    config = OPTConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        word_embed_proj_dim=args.hidden,
        ffn_dim=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.context,
        dropout=0.0,
        attention_dropout=0.0,
    )
    model = Decoder(config)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(training)} files, {len(stream):,} tokens; held out {len(held_out)} files, "
        f"{len(held_stream):,} tokens; {parameters:,} parameters",
        flush=True,
    )
    pieces = windows(held_stream, args.context)[:-1]
    spent = train(args, model, stream, pieces[:: max(1, len(pieces) // 24)])
    args.out.mkdir(parents=True, exist_ok=True)
    export(model, config, tokenizer, args.out)
    step_tokens = ROWS_A_STEP * args.context
    trained = {
        "layers": args.layers,
        "hidden": args.hidden,
        "heads": args.heads,
        "vocab": args.vocab,
        "context": args.context,
        "parameters": parameters,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": args.seed,
        "machine": machine_in_words(),
        "corpus_tokens": len(stream),
        "steps": spent["steps"],
        "step_tokens": step_tokens,
        "train_tokens": spent["steps"] * step_tokens,
        "minutes": round(spent["seconds"] / 60, 2),
        "cpu_minutes": round(spent["cpu_seconds"] / 60, 2),
        "stopped_early": spent["stopped_early"],
    }
    measured = evaluate_export(args.out, held_out, held_stream, args.eval_windows)
    by_eighth = ", ".join(f"{x:.2f}" for x in measured["nats_by_eighth_of_context"])
    card = CARD.format(**trained, **measured, by_eighth=by_eighth)
    (args.out / "MODEL_CARD.md").write_text(card)
    report = json.dumps({"training": trained, "held_out": measured}, indent=2)
    (args.out / "training.json").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()

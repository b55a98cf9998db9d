"""What the command-line, bad-input, interrupt and storage tests share: a tiny model, and ways to run the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h2o_flexgen.commands import main as commands
from h2o_flexgen.models.registry import family, spec_of

TINY = {
    "model_type": "opt",
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "eos_token_id": 2,
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ON_GPU = ("100", "0", "100", "0", "100", "0")
ON_CPU = ("0", "100", "0", "100", "0", "100")
ON_DISK = ("0", "0", "0", "0", "0", "0")
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20, 30, 40, 50, 60, 70, 80], [9], [3, 4, 5, 6]]
#: a job that takes no time
SHORT = ("--prompt-len", "6", "--gen-len", "3", "--num-prompts", "2")
#: where things lie must not change a token in fp32, so that tests that compare tokens ask for it
FP32 = ("--device", "cpu", "--dtype", "float32")


def wide(hidden_size: int, **changes) -> dict:
    """TINY with such a hidden size, in the proportions of OPT, and with other changes."""
    sizes = {"hidden_size": hidden_size, "word_embed_proj_dim": hidden_size, "ffn_dim": 4 * hidden_size}
    return TINY | sizes | changes


def tiny_state(config: dict = TINY, dtype: torch.dtype = torch.float32, prefix: str = "model.") -> dict:
    """Weights for a configuration, large enough that outputs vary."""
    shapes = {}
    for layer in family(config["model_type"]).tensors(spec_of(config)):
        shapes |= layer.shapes
    rng = torch.Generator().manual_seed(1)
    state = {}
    for name, shape in sorted(shapes.items()):
        tensor = torch.randn(shape, generator=rng) * (0.3 if len(shape) > 1 else 0.1)
        if len(shape) == 1 and name.endswith("weight"):
            tensor = tensor + 1
        state[prefix + name.removeprefix("model.")] = tensor.to(dtype)
    return state


def write_model(folder: Path, state: dict | None = None, config: dict = TINY) -> Path:
    """A model folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_state(config) if state is None else state, folder / "model.safetensors")
    return folder


def write_rows(path: Path, rows: list) -> Path:
    """An input file; what is no str already is written as a JSON line."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def write_prompts(path: Path, prompts: list = PROMPTS) -> Path:
    return write_rows(path, [{"prompt_token_ids": ids} for ids in prompts])


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def percent(six: tuple) -> tuple:
    return ("--percent", *six)


def environment(**changes: str) -> dict[str, str]:
    """For a process of its own: this repository's package, one thread, no network, no CUDA."""
    root = str(Path(commands.__file__).resolve().parent.parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return env | {"CUDA_VISIBLE_DEVICES": ""} | changes


def command(*argv) -> list[str]:
    return [sys.executable, "-m", "h2o_flexgen.flex_opt", *map(str, argv)]


#: the command, with a line of progress for every step
TALKING = """
import sys
from h2o_flexgen.commands.main import run_command
from h2o_flexgen.utils import progress
progress.LINE_SECONDS = 0
sys.exit(run_command("generate", None, "h2o-flexgen generate"))
"""


def start(*argv, **changes: str) -> subprocess.Popen:
    """The command as a process; its stderr, with every step, can be read as it comes."""
    words = [sys.executable, "-c", TALKING, *map(str, argv)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    return subprocess.Popen(words, env=environment(**changes), **pipes)


def end(process: subprocess.Popen, timeout: float = 60) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr, when it has ended."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out.decode(), err.decode(errors="replace")


def read_until(process: subprocess.Popen, text: str) -> str:
    """stderr up to and with `text`; fails if the process ends before it shows."""
    seen = b""
    while text.encode() not in seen:
        piece = os.read(process.stderr.fileno(), 4096)
        if not piece:
            raise AssertionError(f"{text!r} never came; exit code {process.wait()}, stderr {seen.decode()!r}")
        seen += piece
    return seen.decode(errors="replace")


def last_line(stderr: str) -> str:
    """The last line of stderr; progress bars end theirs with a carriage return."""
    return [line for line in stderr.replace("\r", "\n").split("\n") if line.strip()][-1]


def write_sharded(folder: Path) -> tuple[Path, list[Path]]:
    state = tiny_state()
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    write_model(folder)
    (folder / "model.safetensors").unlink()
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder, [folder / file for file in parts]


def to_bin(folder: Path) -> Path:
    torch.save(tiny_state(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def cut(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny OPT with random weights and no tokenizer; tests must not change it."""
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def cli(capfd, tmp_path, monkeypatch):
    """Run the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "home"))

    def run(*argv) -> tuple[int, str, str]:
        capfd.readouterr()
        code = commands.main(["generate", *map(str, argv)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def generate(cli, tmp_path):
    """Run the command for PROMPTS, or `prompts`, and return the rows of its output file."""

    def run(*argv, prompts: list = PROMPTS, gen_len: int = 6) -> list[dict]:
        source = write_prompts(tmp_path / "generate.in.jsonl", prompts)
        target = tmp_path / "generate.out.jsonl"
        offload = tmp_path / "generate.offload"
        files = ("--input-file", source, "--output-file", target, "--offload-dir", offload)
        code, _, err = cli(*FP32, *files, "--gen-len", gen_len, *argv)
        assert code == 0, err
        assert not offload.exists() or list(offload.iterdir()) == []
        rows = read_rows(target)
        target.unlink()
        return rows

    return run


@pytest.fixture
def refused(cli, tmp_path):
    """Run the command, which must refuse: exit code 2, one line that starts with `error: `, no traceback, an output
    file that was there before untouched, one that was not there not created, the offload folder left as it was.
    Returns the message."""
    kept, fresh, begun = tmp_path / "kept.jsonl", tmp_path / "fresh.json", tmp_path / "begun.jsonl"
    offload = tmp_path / "offload"

    def run(*argv, files: bool = True, early: bool = True) -> str:
        """`early`: it refuses before it runs, so that no progress bar stands on stderr before the line. If not, its own
        output file may be there, without a row."""
        kept.write_text("kept as it was\n")
        before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.is_file()}
        output = ("--output-file", kept, "--restart") if early else ("--output-file", begun)
        options = (*output, "--report", fresh) if files else ()
        where = () if "--offload-dir" in argv else ("--offload-dir", offload)
        code, out, err = cli(*where, *options, *argv)
        assert code == 2, f"exit code {code}, stderr {err!r}"
        assert out == ""
        assert "Traceback" not in err
        assert err.endswith("\n")
        line = last_line(err)
        assert line.startswith("error: "), err
        if early:
            assert err == line + "\n", f"more than one line: {err!r}"
        if not early and begun.exists():
            assert begun.read_bytes() == b""
            begun.unlink()
            Path(f"{begun}.manifest.json").unlink()
        after = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.is_file()}
        assert after == before, "a file was touched, made or removed"
        assert kept.read_text() == "kept as it was\n"
        assert not offload.exists() or list(offload.iterdir()) == [], "something is left in the offload folder"
        return line.removeprefix("error: ")

    return run


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A tiny model with a byte-level BPE tokenizer that puts </s> in front, as OPT's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    folder = write_model(tmp_path_factory.mktemp("texts") / "model", config=TINY | {"vocab_size": 300})
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def talker(texts, tmp_path_factory) -> Path:
    """The tiny model with room for long texts and a chat template."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(texts, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return write_model(folder, config=TINY | {"vocab_size": 300, "max_position_embeddings": 1280})


@pytest.fixture
def broken(tmp_path):
    """A model folder of one's own, to break."""
    return write_model(tmp_path / "broken")


@pytest.fixture
def sharded(tmp_path):
    """The same in two shards with an index: (folder, shard files)."""
    return write_sharded(tmp_path / "sharded")


@pytest.fixture
def mount(tmp_path):
    """Mount something on tmp_path/mounted; skips where that is not allowed."""
    target = tmp_path / "mounted"
    target.mkdir()
    mounted = []

    def do(*argv: str) -> Path:
        done = subprocess.run(["mount", *argv, str(target)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no mount: {done.stderr.strip()}")
        mounted.append(target)
        return target

    yield do
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def read_only(mount):
    return mount("-t", "tmpfs", "-o", "ro,size=1m", "tmpfs")


@pytest.fixture
def small_disk(mount):
    return mount("-t", "tmpfs", "-o", "size=2m", "tmpfs")

"""The tokens do not depend on how a checkpoint is stored."""

from __future__ import annotations

import json
import struct
from itertools import cycle
from pathlib import Path

import pytest
import torch
from command_tools import ON_CPU, ON_DISK, ON_GPU, TINY, percent, tiny_state, write_model
from safetensors.torch import load_file, save_file

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Dense
from h2o_flexgen.storage import convert, stored
from h2o_flexgen.storage.checkpoint import Checkpoint
from h2o_flexgen.storage.disk import DiskIO

pytest_plugins = ["command_tools"]

TIERS = {"gpu": ON_GPU, "cpu": ON_CPU, "disk": ON_DISK, "mixed": ("40", "30", "100", "0", "100", "0")}


def causal_lm():
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    lm = OPTForCausalLM(OPTConfig(**TINY, dropout=0.0))
    state = tiny_state()
    missing, unexpected = lm.load_state_dict(state, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    return lm.eval()


def with_config(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def split(state: dict) -> tuple[dict, dict]:
    names = sorted(state)
    return {n: state[n] for n in names[::2]}, {n: state[n] for n in names[1::2]}


def write_bins(folder: Path, state: dict) -> Path:
    """A `.bin` checkpoint in two shards."""
    with_config(folder)
    weight_map = {}
    for n, part in enumerate(split(state)):
        file = f"pytorch_model-{n + 1:05}-of-00002.bin"
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def single(folder):
    write_model(folder)


def saved_by_transformers(folder):
    causal_lm().save_pretrained(folder)


def sharded_by_transformers(folder):
    causal_lm().save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def saved_from_the_bare_model(folder):
    causal_lm().model.save_pretrained(folder)
    assert not any(name.startswith("model.") for name in load_file(folder / "model.safetensors"))


def names_of_the_decoder_alone(folder):
    write_model(folder, {name.removeprefix("model.decoder."): t for name, t in tiny_state().items()})


def with_a_tied_head(folder):
    state = tiny_state()
    write_model(folder, state | {"lm_head.weight": state["model.decoder.embed_tokens.weight"].clone()})


def bin_single(folder):
    torch.save(tiny_state(), with_config(folder) / "pytorch_model.bin")


def bin_with_a_tied_head(folder):
    state = tiny_state()
    state["lm_head.weight"] = state["model.decoder.embed_tokens.weight"]
    torch.save(state, with_config(folder) / "pytorch_model.bin")


def bin_of_before_torch_1_6(folder):
    torch.save(tiny_state(), with_config(folder) / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def bin_sharded(folder):
    write_bins(folder, tiny_state())


def bin_of_the_decoder(folder):
    torch.save(tiny_state(prefix=""), with_config(folder) / "pytorch_model.bin")


def transposed_bin(folder):
    """Tensors that are not contiguous."""
    state = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in tiny_state().items()}
    torch.save(state, with_config(folder) / "pytorch_model.bin")


def safetensors_beside_a_garbage_bin(folder):
    write_model(folder)
    (folder / "pytorch_model.bin").write_text("never read")


def with_unused_tensors(folder):
    write_model(folder, tiny_state() | {"model.extra": torch.ones(3, dtype=torch.int64), "other": torch.ones(2)})


FORMS = (
    single,
    saved_by_transformers,
    sharded_by_transformers,
    saved_from_the_bare_model,
    names_of_the_decoder_alone,
    with_a_tied_head,
    bin_single,
    bin_with_a_tied_head,
    bin_of_before_torch_1_6,
    bin_sharded,
    bin_of_the_decoder,
    transposed_bin,
    safetensors_beside_a_garbage_bin,
    with_unused_tensors,
)


@pytest.fixture(scope="session")
def reference() -> list[list[int]]:
    """The tokens of transformers."""
    from command_tools import PROMPTS

    lm = causal_lm()
    with torch.inference_mode():
        out = []
        for prompt in PROMPTS:
            ids = list(prompt)
            while len(ids) < len(prompt) + 6 and (len(ids) == len(prompt) or ids[-1] != TINY["eos_token_id"]):
                ids.append(int(lm(torch.tensor([ids])).logits[0, -1].argmax()))
            out.append(ids[len(prompt) :])
    return out


def tokens(rows: list[dict]) -> list[list[int]]:
    return [row["token_ids"] for row in rows]


@pytest.mark.parametrize(
    "stored, asked",
    [
        ("model.decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.0.attention.dense.bias", "gpt_neox.layers.0.attention.dense.bias"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_is_found_whatever_module_was_saved(tmp_path, stored, asked):
    save_file({stored: torch.ones(2, 3), "weight": torch.ones(1)}, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path)
    found.check({asked: (2, 3)})
    assert found.find(asked) == found.tensors[stored] and found.format(asked) == Dense(torch.float32)


def test_a_missing_tensor_is_reported_by_its_full_name(tmp_path):
    """Only leading parts of a name may be missing."""
    save_file({"weight": torch.ones(1), "layers.1.fc1.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    for name in ("lm_head.weight", "model.norm.weight", "model.decoder.layers.0.fc1.weight"):
        with pytest.raises(UserError, match=f"no tensor '{name}'"):
            Checkpoint(tmp_path).check({name: (1,)})


@pytest.mark.parametrize("form, tier", list(zip(FORMS, cycle(TIERS))), ids=lambda each: getattr(each, "__name__", each))
def test_every_form_gives_the_tokens_of_transformers(generate, reference, tmp_path, form, tier):
    form(tmp_path / "model")
    assert tokens(generate("--model", tmp_path / "model", *percent(TIERS[tier]))) == reference


def test_path_may_name_weights_apart_from_the_model(generate, reference, model, tmp_path):
    assert tokens(generate("--model", "someone/not-there", "--path", model)) == reference


# dtypes other than that of the computation


@pytest.mark.parametrize(
    "dtype, overlap",
    [(torch.float16, "--overlap"), (torch.bfloat16, "--no-overlap"), (torch.float64, "--overlap")],
)
def test_a_checkpoint_in_another_dtype_is_converted_as_it_moves(generate, tmp_path, dtype, overlap):
    state = tiny_state(dtype=dtype)
    stored = write_model(tmp_path / "stored", state)
    same = write_model(tmp_path / "fp32", {name: t.float() for name, t in state.items()})
    expected = generate("--model", same)
    for tier in TIERS.values():
        batches = ("--gpu-batch-size", 2, "--num-gpu-batches", 2)
        assert generate("--model", stored, *percent(tier), overlap, *batches) == expected


def test_a_checkpoint_may_mix_dtypes(generate, tmp_path):
    types = (torch.float16, torch.float32, torch.bfloat16)
    state = {name: t.to(types[n % 3]) for n, (name, t) in enumerate(tiny_state().items())}
    stored = write_model(tmp_path / "stored", state)
    same = write_model(tmp_path / "fp32", {name: t.float() for name, t in state.items()})
    expected = generate("--model", same)
    for tier in TIERS.values():
        assert generate("--model", stored, *percent(tier)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_computes_from_disk(cli, tmp_path, dtype):
    """`--dtype auto` may differ from the checkpoint's, as for every OPT checkpoint (fp16) on a CPU."""
    stored = write_model(tmp_path / "stored", tiny_state(dtype=torch.float16))
    job = ("--model", stored, "--dtype", dtype, "--device", "cpu", "--prompt-len", 6, "--gen-len", 4)
    code, _, err = cli(*job, *percent(ON_DISK), "--offload-dir", tmp_path / "offload")
    assert code == 0, err


# any offset in the file


def shift(path: Path, padding: int) -> None:
    """Pad the header with spaces, so that the data begin at another byte."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length].rstrip() + b" " * padding
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_data_at_any_byte(generate, tmp_path, dtype):
    """safetensors does not require alignment, and older writers did not align."""
    state = tiny_state(dtype=dtype)
    expected = generate("--model", write_model(tmp_path / "fp32", {n: t.float() for n, t in state.items()}))
    folder = write_model(tmp_path / "stored", state)
    starts = set()
    for padding in range(8):
        save_file(state, folder / "model.safetensors")
        shift(folder / "model.safetensors", padding)
        starts.add(next(iter(Checkpoint(folder).tensors.values())).offset % 8)
        assert generate("--model", folder, *percent(ON_DISK)) == expected
    assert len(starts) == 8


def test_the_pages_of_the_last_tensor_reach_beyond_the_end_of_the_file(tmp_path):
    folder = write_model(tmp_path / "m")
    tensors = Checkpoint(folder).tensors.values()
    last = max(tensors, key=lambda t: t.offset)
    assert last.offset + last.nbytes == (folder / "model.safetensors").stat().st_size
    assert (last.offset + last.nbytes) % 4096


# conversion of .bin


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "converted"


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Names of the shards that were unpickled."""
    seen = []
    real = convert.load_bin
    monkeypatch.setattr(convert, "load_bin", lambda shard: seen.append(shard.name) or real(shard))
    return seen


def folders(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.is_dir())


def test_a_bin_is_converted_once(tmp_path, cache, loads):
    folder = write_bins(tmp_path / "model", tiny_state())
    first = Checkpoint(folder)
    assert len(loads) == 2
    made = folders(cache)
    assert len(made) == 1 and made != ["partial"]
    assert Checkpoint(folder).tensors.keys() == first.tensors.keys()
    assert len(loads) == 2 and folders(cache) == made


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, UserError("garbage")])
def test_a_conversion_that_is_interrupted_leaves_nothing(tmp_path, cache, monkeypatch, error):
    folder = write_bins(tmp_path / "model", tiny_state())
    real = convert.load_bin
    calls = iter(range(10))

    def interrupted(shard):
        if next(calls) == 1:
            assert folders(cache) == ["partial"]
            raise error
        return real(shard)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "load_bin", interrupted)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            Checkpoint(folder)
    assert folders(cache) == []
    Checkpoint(folder)
    assert len(folders(cache)) == 1


def test_two_conversions_at_the_same_time_are_one(tmp_path, cache, loads):
    import threading

    folder = write_bins(tmp_path / "model", tiny_state())
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(Checkpoint(folder).tensors))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [len(tiny_state())] * 3
    assert len(loads) == 2 and len(folders(cache)) == 1


def test_a_bin_is_converted_a_part_at_a_time(tmp_path, cache, monkeypatch, generate, reference):
    """A shard need not fit into RAM: no file takes more than a part and one tensor."""
    state = tiny_state()
    folder = write_bins(tmp_path / "model", state)
    monkeypatch.setattr(convert, "CONVERTED_BYTES", 5000)
    found = Checkpoint(folder)
    (made,) = folders(cache)
    sizes = [path.stat().st_size for path in (cache / made).iterdir()]
    assert len(sizes) > 4
    assert max(sizes) < 4096 + 5000 + max(t.nbytes for t in state.values())
    assert len(found.tensors) == len(state)
    assert tokens(generate("--model", folder)) == reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_is_converted_a_part_at_a_time(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(stored, "PART", 100)
    folder = write_model(tmp_path / "m")
    found = Checkpoint(folder)
    io = DiskIO()
    for name, tensor in tiny_state().items():
        out = torch.empty(tensor.shape, dtype=dtype)
        found.read(name, out, io)
        assert torch.equal(out, tensor.to(dtype)), name
    io.close()

"""The command `convert`: write a model with its matrices in fewer bits, once, as a checkpoint of its own."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.commands import options
from h2o_flexgen.commands.output import print_text
from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.policy import gib
from h2o_flexgen.utils.files import sync

if TYPE_CHECKING:
    from h2o_flexgen.formats import Format
    from h2o_flexgen.storage.checkpoint import Checkpoint

#: files beside the weights that belong to a model
KEPT = (".json", ".model", ".txt", ".jinja", ".tiktoken")
#: bytes of the largest of them
MOST_KEPT = 1 << 26
#: end of a message about lack of space
OTHER_DISK = "name a folder on another disk"


def make_parser(prog: str) -> options.Parser:
    what = "Write a model with its matrices in 8 or 4 bits: a smaller checkpoint, which streams as it is stored."
    parser = options.Parser(prog, what, "MODEL")
    parser.add_argument("model", metavar="MODEL", help="a local folder or GGUF file, or a Hugging Face repository")
    parser.add_argument(
        "--to",
        required=True,
        choices=("int8", "int4", "q4_0"),
        help="the format; embedding and head become int8 in any case",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new folder for the checkpoint")
    return parser


def run(args: argparse.Namespace) -> None:
    from safetensors import SafetensorError

    target = Path(os.path.abspath(args.output))
    if os.path.lexists(target):
        raise UserError(f"{target} exists: name a new folder")
    try:
        with new_folder(target) as partial:
            before = convert(args.model, args.to, partial)
    except (OSError, SafetensorError) as e:
        cause = (isinstance(e, OSError) and e.strerror) or reason(e)
        raise UserError(f"cannot write {args.output}: {cause}") from None
    after = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print_text(f"wrote {args.output}: {gib(after)} of weights instead of {gib(before)}")


def convert(model: str, kind: str, target: Path) -> int:
    """Write a model into a folder, which must have room for it before anything is downloaded or read. Returns the bytes
    of its weights until now. Raises UserError; OSError or SafetensorError for a folder that cannot be written."""
    import torch

    from h2o_flexgen.engine.model import open_source
    from h2o_flexgen.formats.forms import CONVERTED, compressed
    from h2o_flexgen.models.registry import family, read_spec, stored_dtype
    from h2o_flexgen.models.source import find_model
    from h2o_flexgen.models.spec import shapes_of
    from h2o_flexgen.storage.convert import check_room

    spec = read_spec(find_model(model, weights=False)[1])
    layers = family(spec.model_type).tensors(spec)
    shapes = shapes_of(layers)
    formats = compressed(kind, [layer.compressible for layer in layers], CONVERTED)
    check_room(target, model, sum(form.nbytes(shapes[name]) for name, form in formats.items()), OTHER_DISK)
    weights, folder = find_model(model)
    dtype = getattr(torch, stored_dtype(folder) or "bfloat16")
    source = open_source(weights, folder, spec, layers, dtype, None, True)
    write(target, source, shapes, formats)
    copy_others(folder, target, kind)
    return sum(source.find(name).nbytes for name in shapes)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that becomes it at the end of the block, whole or not at all. Raises UserError while
    another process makes it; OSError."""
    partial = target.with_name(f".{target.name}.partial")
    missing = [folder for folder in target.parents if not os.path.exists(folder)]
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial, target):
            for path in partial.iterdir():  # left by a process that was killed
                path.unlink()
            try:
                yield partial
                for path in (*partial.iterdir(), partial):  # else a power failure could leave a name without bytes
                    sync(path)
                partial.rename(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # it is not there, or another process uses it
                folder.rmdir()
        raise


@contextmanager
def locked(partial: Path, target: Path) -> Iterator[None]:
    """Hold the folder in which `target` is made. Raises UserError while another process does; OSError."""
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {target}: wait for it, or name another folder") from None
        yield
    finally:
        os.close(fd)


def write(folder: Path, source: Checkpoint, shapes: dict[str, tuple[int, ...]], formats: dict[str, Format]) -> None:
    """Write the weights as safetensors with an index."""
    from h2o_flexgen.storage.checkpoint import tensors_of
    from h2o_flexgen.storage.convert import write_tensors
    from h2o_flexgen.storage.disk import DiskIO
    from h2o_flexgen.storage.stored import whole

    vectors = {name: source.find(name) for name in shapes if name not in formats}
    needed = sum(form.nbytes(shapes[name]) for name, form in formats.items()) + sum(s.nbytes for s in vectors.values())

    def tensors():
        io = DiskIO()
        try:
            for name, stored in vectors.items():
                yield name, whole(stored, io)
        finally:
            io.close()
        yield from source.encoded(formats)

    write_tensors(folder, source.path.name, tensors(), len(shapes), needed, True, OTHER_DISK)
    files = sorted(folder.glob("*.safetensors"))
    index = {}
    for n, file in enumerate(files, 1):
        name = f"model-{n:05}-of-{len(files):05}.safetensors"
        index |= dict.fromkeys(tensors_of(file), name)
        file.rename(folder / name)
    text = json.dumps({"metadata": {"total_size": needed}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def copy_others(source: Path, target: Path, kind: str) -> None:
    """Copy the tokenizer and all else that belongs to a model; its config says how it is converted."""
    from h2o_flexgen.models.quantised.own import NAME

    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json") or path.name == "copy.json"
        if path.suffix in KEPT and path.is_file() and path.stat().st_size <= MOST_KEPT and not is_index:
            shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": NAME, "kind": kind}
    (target / "config.json").write_text(json.dumps(config, indent=1))

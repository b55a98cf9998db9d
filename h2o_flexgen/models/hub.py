"""Models of the Hugging Face hub: from the local cache if they are there, downloaded otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.folder import is_whole
from h2o_flexgen.models.registry import hub_name, read_spec
from h2o_flexgen.models.tokenizer import has_tokenizer

_SMALL_FILES = ["*.json", "*.txt", "*.model"]


def is_downloaded(name: str) -> bool:
    """Whether the weights of a repository, or of a built-in name, are in the local cache."""
    return _cached(hub_name(name), is_whole) is not None


def _cached(name: str, has_all: Callable[[Path], bool]) -> Path | None:
    """The folder of a repository in the local cache, if what is asked of it is there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) and has_all(Path(config).parent) else None


def snapshot(name: str, weights: bool) -> Path:
    """The folder of a repository's config and tokenizer, and of its `weights` if they are wanted: what is not in the
    local cache is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if cached := _cached(name, is_whole if weights else has_tokenizer):
            return cached
        folder = Path(snapshot_download(name, allow_patterns=_SMALL_FILES))
        if not (folder / "config.json").exists():
            advice = f"if it has GGUF files, download one (hf download {name} FILE) and give its path"
            raise UserError(f"the repository {name} has no config.json: {advice}")
        read_spec(folder)  # before gigabytes of a model that cannot be run
        for kind in ("model*.safetensors", "pytorch_model*.bin"):
            if weights and not is_whole(folder):
                folder = Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES, kind]))
        return folder
    except UserError:
        raise
    except LocalEntryNotFoundError:  # its message is a paragraph
        cause = "neither a local folder nor in the local cache, and the Hugging Face hub cannot be reached"
        raise UserError(f"cannot get the model {name!r}: {cause}; check the network, or give a folder") from None
    except Exception as e:
        cause = f"neither a local folder nor to be had from the Hugging Face hub ({reason(e)})"
        advice = "check the name and the network, or give a folder"
        raise UserError(f"cannot get the model {name!r}: {cause}; {advice}") from None

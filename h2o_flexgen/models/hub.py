"""Models of the Hugging Face hub, from the local cache or downloaded."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.folder import is_whole, weight_files
from h2o_flexgen.models.hub_errors import why
from h2o_flexgen.models.hub_files import are_all_parts, chosen, gguf_files, join_names, what_it_is
from h2o_flexgen.models.registry import read_spec
from h2o_flexgen.models.repository import Repository
from h2o_flexgen.models.tokenizer import has_tokenizer

_SMALL = ["*.json", "*.txt", "*.model", "*.jinja"]
#: files of weights, in order of preference
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
#: files that decide how texts are tokenized and where they end
_OF_TEXTS = (
    "tokenizer* chat_template* additional_chat_templates/*.jinja vocab.* merges.txt generation_config.json".split()
)
_TEMPLATE = "chat_template.jinja"
#: timeout, in seconds, of the question whether a file exists
_PATIENCE = 3

log = logging.getLogger(__name__)


def downloaded(repo: Repository) -> Path | None:
    """The folder of a repository in the local cache, if that has its weights."""
    folder = _cached(repo)
    return folder if folder is not None and is_whole(folder) else None


def commit(path: Path) -> str | None:
    """The commit that a file or folder in the hub's cache belongs to; None for any other path."""
    names = path.absolute().parts
    for parent, name, below in zip(names, names[1:], names[2:]):
        if parent.startswith("models--") and name == "snapshots":
            return below
    return None


def snapshot(repo: Repository, weights: bool) -> Path:
    """The folder of a repository's config and tokenizer, and of its weights if `weights`; or, if `repo` names one, its
    GGUF file, which holds all three. Downloads what is not in the local cache. Raises UserError if the files cannot be
    obtained, or are not of a supported model."""
    try:
        return _gguf_file(repo) if repo.gguf else _folder(repo, weights)
    except UserError:
        raise
    except Exception as e:
        folder = None
        with suppress(Exception):  # an impossible name has none
            folder = None if repo.gguf else _cached(repo)
        lacks = "" if folder is None else f"the local cache lacks {join_names(_lacking(folder, weights))}; "
        cause = why(e, repo, is_here=folder is not None)
    raise UserError(f"cannot get the model {repo.name!r}: {lacks}{cause}")


def _folder(repo: Repository, weights: bool) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.utils import OfflineModeIsEnabled

    folder = _cached(repo)
    if folder is not None and (folder / "config.json").exists():
        is_known = has_tokenizer(folder) or _listing(folder) is not None
        is_enough = is_whole(folder) if weights else is_known
        if is_enough:
            _complete(repo, folder)
            return folder
    folder = _download(repo, _SMALL)
    if not (folder / "config.json").exists():
        if constants.HF_HUB_OFFLINE:  # some versions of the client return an incomplete folder
            raise OfflineModeIsEnabled
        raise _not_a_model(repo, folder, "config.json")
    read_spec(folder)  # before downloading gigabytes of an unsupported model
    at_commit = repo._replace(revision=commit(folder) or repo.revision)  # a branch may move meanwhile
    for kind in _WEIGHTS:
        if weights and not is_whole(folder):
            folder = _download(at_commit, [*_SMALL, kind])
    if weights and not is_whole(folder):
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled
        if weight_files(folder):
            raise UserError(f"the repository {repo.name} lacks {join_names(_lacking(folder, weights))}: take another")
        raise _not_a_model(repo, folder, "weights in safetensors or .bin files")
    return folder


def _download(repo: Repository, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo.name, revision=repo.revision, allow_patterns=patterns))


# the local cache


def _cached(repo: Repository) -> Path | None:
    """The folder of a repository's revision in the local cache, complete or not."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    root = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo.name, repo_type="model"))
    revision = repo.revision or "main"
    with suppress(OSError, ValueError):  # an unreadable or damaged cache, or a name that is too long
        if (root / "refs" / revision).is_file():
            revision = (root / "refs" / revision).read_text().strip()
        folder = root / "snapshots" / revision
        return folder if folder.is_dir() else None
    return None


def _listing(folder: Path) -> list[str] | None:
    """The names of all files of a cached repository, if the hub's client has kept them."""
    try:
        return list(json.loads((folder.parents[1] / "trees" / f"{folder.name}.json").read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _complete(repo: Repository, folder: Path) -> None:
    """Download missing files of the tokenizer and chat templates, if the hub is reachable: other programs, and earlier
    versions of this one, do not fetch all of them."""
    listing = _listing(folder)
    if listing is not None:
        missing = [name for name in listing if _is_of_texts(name) and not (folder / name).exists()]
    else:
        missing = _OF_TEXTS if _has_more_templates(repo, folder) else []
    if missing:
        try:
            _download(repo._replace(revision=folder.name), missing)
        except Exception as e:
            names = "a tokenizer or chat template" if missing is _OF_TEXTS else join_names(missing)
            log.warning("%s: the local cache lacks %s; %s", repo.name, names, why(e, repo, is_here=True))


def _has_more_templates(repo: Repository, folder: Path) -> bool:
    """Whether the repository may have a tokenizer or chat template that its cached folder lacks. If it has no template
    this is recorded as by the hub's client, and not asked again."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import EntryNotFoundError

    config = folder / "tokenizer_config.json"
    absent = folder.parents[1] / ".no_exist" / folder.name / _TEMPLATE
    inside = config.exists() and '"chat_template"' in config.read_text(errors="replace")
    if not has_tokenizer(folder):
        return True
    if inside or (folder / _TEMPLATE).exists() or absent.exists():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(repo.name, _TEMPLATE, revision=folder.name), timeout=_PATIENCE)
        return True
    except EntryNotFoundError:
        with suppress(OSError):
            absent.parent.mkdir(parents=True, exist_ok=True)
            absent.touch()
    except Exception as e:
        log.info("%s: cannot ask for a %s (%s)", repo.name, _TEMPLATE, reason(e))
    return False


def _is_of_texts(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _OF_TEXTS)


def _lacking(folder: Path, weights: bool) -> list[str]:
    """The known missing files of a cached folder."""
    listing = _listing(folder) or []
    missing = ["config.json"] * (not (folder / "config.json").exists())
    missing += [name for name in listing if _is_of_texts(name) and not (folder / name).exists()]
    if not weights:
        return missing or ["its tokenizer"]
    files = [file.name for file in weight_files(folder)]
    for kind in _WEIGHTS:
        files = files or [name for name in listing if fnmatch(name, kind)]
    return [name for name in files if not (folder / name).exists()] + missing or ["the weights"]


# GGUF files, and repositories without a model


def _gguf_file(repo: Repository) -> Path:
    """The GGUF file that `repo` names, or the first of its parts."""
    from huggingface_hub import HfApi

    folder = _cached(repo)
    if folder is not None:
        files = chosen(repo, [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")])
        if are_all_parts(files):
            return folder / files[0]
    names = HfApi().list_repo_files(repo.name, revision=repo.revision)
    files = chosen(repo, names)
    if not files:
        raise UserError(f"the repository {repo.name} has no GGUF file {repo.gguf}; {gguf_files(repo, names)}")
    return _download(repo, files) / files[0]


def _not_a_model(repo: Repository, folder: Path, lacks: str) -> UserError:
    from huggingface_hub import HfApi

    names = _listing(folder)
    if names is None:
        try:
            names = HfApi().list_repo_files(repo.name, revision=repo.revision)
        except Exception:
            names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    return UserError(what_it_is(repo, names, folder, lacks))

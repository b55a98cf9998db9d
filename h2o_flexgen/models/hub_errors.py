"""Why a model could not be downloaded from the Hugging Face hub, and the remedy, in one line."""

from __future__ import annotations

import errno

from h2o_flexgen.errors import reason
from h2o_flexgen.models.repository import Repository

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_NOT_HERE = "neither a local folder nor in the local cache, and "
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def why(error: Exception, repo: Repository, is_here: bool = False) -> str:
    """The cause and the remedy.

    Args:
        error: from the hub's client. Its classes are recognised by name, since versions of the client move them.
        is_here: whether a part of the repository is in the local cache.
    """
    chain = _causes(error)
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    answers = [each.response.status_code for each in chain if getattr(each, "response", None) is not None]
    found = _of_the_disk({each.errno for each in chain if isinstance(each, OSError)})
    found = found or _of_the_answer(names, answers[0] if answers else None, repo)
    return found or _of_the_network(names, chain, "" if is_here else _NOT_HERE)


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _of_the_disk(numbers: set[int | None]) -> str | None:
    from huggingface_hub import constants

    folder = constants.HF_HUB_CACHE
    if numbers & set(_FULL):
        return f"no space is left for it in {folder}: free some, or set HF_HOME to a folder on another disk"
    if numbers & set(_READ_ONLY):
        return f"the hub's cache {folder} cannot be written: set HF_HOME to a folder that can"
    return None


def _of_the_answer(names: set[str], status: int | None, repo: Repository) -> str | None:
    if "GatedRepoError" in names:
        page = f"https://huggingface.co/{repo.name}"
        return f"the repository is gated: accept its licence on {page}, then {_LOG_IN}"
    if "RevisionNotFoundError" in names:
        return (
            f"the repository has no branch, tag or commit {repo.revision or 'main'}: see its page, Files and versions"
        )
    if "RepositoryNotFoundError" in names:
        if _is_dataset(repo.name):
            return "this is a data set, not a model"
        return (
            "it is neither a local folder nor a repository on the Hugging Face hub that you can see: check the name; "
            f"for a private one {_LOG_IN}"
        )
    if "EntryNotFoundError" in names and "LocalEntryNotFoundError" not in names:
        return "the repository lacks a file that it lists: try again, or use another revision"
    if status == 401:
        return f"the hub does not accept your token: {_LOG_IN}"
    if status == 403:
        return f"your token has no access: {_LOG_IN} of an account that does"
    if status == 429:
        return f"the hub has had too many requests from here (HTTP 429): wait some minutes, or {_LOG_IN}"
    if status is not None and status >= 500:
        return f"the Hugging Face hub is down (HTTP {status}): try again later"
    return None


def _is_dataset(name: str) -> bool:
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name)
        return True
    except Exception:
        return False


def _of_the_network(names: set[str], chain: list[BaseException], prefix: str) -> str:
    from huggingface_hub import constants

    said = " ".join(map(str, chain))
    is_local = "LocalEntryNotFoundError" in names
    if "OfflineModeIsEnabled" in names or (is_local and constants.HF_HUB_OFFLINE):
        return f"{prefix}HF_HUB_OFFLINE is set: unset it, or give a folder"
    if "HFValidationError" in names:
        return "this is neither a local folder nor a possible name of a repository (OWNER/NAME)"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return "the hub's certificate is not trusted: behind a proxy set SSL_CERT_FILE to the proxy's certificate"
    if "ProxyError" in names:
        return f"the proxy cannot be used ({reason(chain[-1])}): check HTTPS_PROXY"
    if any("Timeout" in name for name in names):
        return f"the Hugging Face hub does not answer ({reason(chain[-1])}): check the network, or give a folder"
    if is_local:  # its message is a paragraph
        cause = f" ({reason(chain[-1])})" if len(chain) > 1 else ""
        return f"{prefix}the Hugging Face hub cannot be reached{cause}: check the network, or give a folder"
    cause = f"neither a local folder nor available from the Hugging Face hub ({reason(chain[0])})"
    return f"{cause}: check the name and the network, or give a folder"

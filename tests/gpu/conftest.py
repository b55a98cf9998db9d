"""Fixtures of the tests on CUDA, which need no conftest of the folder above, so that they run without hypothesis."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD", str(tmp_path / "offload"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def clean_device():
    """Start each test with an empty device, exact fp32 matmuls and no memory cap."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """models(name) -> the tiny model of that name of zoo.py, made once."""
    import zoo

    made = {}

    def get(name: str = "opt"):
        if name not in made:
            made[name] = zoo.build(name, tmp_path_factory.mktemp(f"gpu_model_{name}"))
        return made[name]

    return get

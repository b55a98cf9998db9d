from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # each process that a test starts would compile torch's sources
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
# before torch is imported: on tensors this small a second thread only waits for the first
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from tqdm import tqdm  # noqa: E402

from h2o_flexgen.utils.interrupts import STOPPING  # noqa: E402

tqdm.monitor_interval = 0  # its thread comes with the first bar of a process: tests count threads
settings.register_profile("exact", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("exact")
pytest.register_assert_rewrite("command_tools")


@pytest.fixture(autouse=True)
def private_folders(tmp_path, monkeypatch):
    """Nothing that a test offloads or converts goes outside its own folder, and nothing is downloaded."""
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD", str(tmp_path / "offload"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def signals():
    """The commands take over the signals that end a job; give them back."""
    before = {s: signal.getsignal(s) for s in STOPPING}
    yield
    for s, handler in before.items():
        signal.signal(s, handler)


@pytest.fixture(autouse=True)
def without_cuda(request, monkeypatch):
    """Tests that do not ask for CUDA give the same where there is some."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def shared_answers(tmp_path_factory):
    """The workers of pytest-xdist share the oracle's answers; their folders have the same parent."""
    import zoo

    if "PYTEST_XDIST_WORKER" in os.environ:
        zoo.SHARED = tmp_path_factory.getbasetemp().parent / "answers"
        zoo.SHARED.mkdir(exist_ok=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(name) -> the tiny model of that name, made once."""
    import zoo

    made = {}

    def get(name: str = "opt") -> zoo.Tiny:
        if name not in made:
            made[name] = zoo.build(name, tmp_path_factory.mktemp(f"model_{name}"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory):
    """The cache folder of all tests with the demo model, which is converted once; they skip where there is none."""
    from h2o_flexgen import UserError
    from h2o_flexgen.models import source

    folder = tmp_path_factory.mktemp("demo_home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H2O_FLEXGEN_HOME", str(folder))
        try:
            source.find_model(None, weights=False)
        except UserError as e:
            pytest.skip(str(e))
    return folder


@pytest.fixture
def run():
    """run(tiny, prompts, max_tokens, ...) -> the outputs of a fresh LLM in fp32, one CompletionOutput a prompt."""
    from zoo import sized

    from h2o_flexgen import LLM, Policy, SamplingParams

    def generate(model, prompts, max_tokens, budget=None, *, ignore_eos=True, sampling=None, **policy):
        kv_budget = sized(*budget) if isinstance(budget, tuple) else budget
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **(sampling or {}))
        with LLM(str(model.folder), Policy(**policy), kv_budget, device="cpu", dtype="float32", progress=False) as llm:
            outputs = llm.generate(prompts, params)
        assert [o.index for o in outputs] == list(range(len(prompts)))
        return [o.outputs[0] for o in outputs]

    return generate


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    """Policy "auto" searches on a machine that was never measured: measuring takes a minute."""
    import machines

    for module in ("engine_args", "profiling.measure"):
        monkeypatch.setattr(f"h2o_flexgen.{module}.load_or_measure", lambda *a: machines.laptop())


@pytest.fixture(autouse=True)
def fixed_kernels():
    """Matmuls by the same kernels on every CPU, and type "auto" is bfloat16; which are faster is for benchmarks."""
    import machines

    from h2o_flexgen.kernels import linear

    linear.use(machines.KERNELS)
    yield
    linear.use(machines.KERNELS)


@pytest.fixture
def fast_blocks():
    """Matmuls in int8 take weights in blocks of 4 bits as they are stored; tests skip on CPUs that cannot."""
    import machines

    from h2o_flexgen.kernels import int8, linear

    if not int8.takes_blocks():
        pytest.skip("this CPU has no instructions for it")
    linear.use(machines.kernels(blocks=True))

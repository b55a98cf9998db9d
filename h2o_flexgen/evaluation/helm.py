"""The engine under HELM (crfm-helm, arXiv 2211.09110): all requests of a run are one job, and its rows the results.

    helm-run --runner-class-name h2o_flexgen.evaluation.helm.JobRunner ...

docs/helm.md shows the two YAML files that name the model. HELM itself sends one request at a time, which would leave
a block of many places empty.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor
from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.runner import Runner
from helm.clients.client import Client
from helm.common.object_spec import create_object, get_class_by_name
from helm.common.request import GeneratedOutput, Request, RequestResult, Token
from helm.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer, WrappedPreTrainedTokenizer

from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.evaluation.arguments import LLM_ARGUMENTS, llm_arguments
from h2o_flexgen.jobs.input import read_rows
from h2o_flexgen.jobs.job import Job
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.source import find_model
from h2o_flexgen.models.tokenizer import load_tokenizer

#: beside HELM's own files (--local-path): the jobs, so that a run that was interrupted resumes
FOLDER = "h2o_flexgen"
#: what a request may ask for that a job cannot give, with the value that asks for nothing
REFUSED = {"embedding": False, "echo_prompt": False, "multimodal_prompt": None, "response_format": None}


class JobRunner(Runner):
    """HELM's runner, whose requests to a `JobClient` are executed as a job; those to other clients as ever."""

    def __init__(self, execution_spec, *args, **kwargs):
        super().__init__(execution_spec, *args, **kwargs)
        self.executor = JobExecutor(execution_spec)


class JobExecutor(Executor):
    """Executes the requests of a run together. A model stays loaded until a run of another one."""

    def __init__(self, execution_spec):
        super().__init__(execution_spec)
        self._clients: dict[str, JobClient] = {}

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        client = self._client(scenario_state.adapter_spec.model_deployment)
        if client is None or self.execution_spec.dry_run:
            return super().execute(scenario_state)
        states = scenario_state.request_states
        folder = Path(self.execution_spec.local_path) / FOLDER
        results = client.results([state.request for state in states], folder)
        answered = [replace(state, result=result) for state, result in zip(states, results, strict=True)]
        return replace(scenario_state, request_states=answered)

    def _client(self, name: str) -> JobClient | None:
        """The client of a model deployment, if it is ours."""
        spec = get_model_deployment(name).client_spec
        if not issubclass(get_class_by_name(spec.class_name), JobClient):
            return None
        if name not in self._clients:
            self._clients[name] = create_object(spec)
        for other in self._clients.keys() - {name}:
            self._clients[other].close()
        return self._clients[name]


class JobClient(Client):
    """A model for HELM.

    Args:
        model: as for `LLM`: a folder, a GGUF file, a name on the hub, or None for the demo model.
        given: of LLM_ARGUMENTS.

    Raises:
        UserError: an argument that is unknown or cannot be used.
    """

    def __init__(self, model: str | None = None, **given):
        if unknown := [name for name in given if name not in LLM_ARGUMENTS]:
            raise UserError(f"unknown in the args of client_spec: {', '.join(unknown)}; known: {LLM_ARGUMENTS}")
        self.model = model
        self.given = given
        self.arguments = llm_arguments(given)

    @cached_property
    def llm(self) -> LLM:
        return LLM(self.model, **self.arguments)

    def close(self) -> None:
        """Free the model's memory; the next run loads it again."""
        if "llm" in vars(self):
            self.llm.close()

    def make_request(self, request: Request) -> RequestResult:
        runner = f"{JobRunner.__module__}.{JobRunner.__name__}"
        raise UserError(f"requests run as one job: give helm-run the option --runner-class-name {runner}")

    def results(self, requests: list[Request], folder: Path) -> list[RequestResult]:
        """The results of requests, by a job whose files are in `folder`. Raises UserError if a request cannot be
        run, or as `Job.run`."""
        rows = [row for n, request in enumerate(requests) for row in rows_of(n, request)]
        output = self._run(rows, folder)
        done = map(json.loads, output.read_text("utf-8").splitlines())
        return [self._result(list(islice(done, request.num_completions))) for request in requests]

    def _run(self, rows: list[dict], folder: Path) -> Path:
        """Run a job, or what an earlier run has left of it; returns its output file."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        name = hashlib.sha256(f"{self.model} {sorted(self.given.items())}\n{lines}".encode()).hexdigest()[:16]
        source = folder / f"{name}.in.jsonl"
        output = folder / f"{name}.jsonl"
        source.write_text(lines, "utf-8")
        with Job(str(output)) as job:
            job.run(self.llm, read_rows(str(source)), SamplingParams())
        return output

    def _result(self, rows: list[dict]) -> RequestResult:
        """The result of a request from its output rows. Raises UserError for a row that could not be run."""
        for row in rows:
            if "error" in row:
                raise UserError(f"request {row['custom_id']}: {row['error']}")
        return RequestResult(True, [], [self._completion(row) for row in rows], cached=False, request_time=0.0)

    def _completion(self, row: dict) -> GeneratedOutput:
        """A completion, without the tokens behind its text that ended it."""
        tokens = []
        left = len(row["text"])
        for token, logprob in zip(row["token_ids"], row["logprobs"]):
            if left <= 0:
                break
            tokens.append(Token(self.llm.tokenizer.decode([token], clean_up_tokenization_spaces=False), logprob))
            left -= len(tokens[-1].text)
        logprob = sum(token.logprob for token in tokens)
        return GeneratedOutput(row["text"], logprob, tokens, {"reason": row["finish_reason"]})


def rows_of(n: int, request: Request) -> list[dict]:
    """The rows of request number `n`, one for each completion. Raises UserError if it asks for something else than a
    text."""
    for name, neutral in REFUSED.items():
        if getattr(request, name) != neutral:
            raise UserError(f"request {n}: {name} is not supported: take a scenario whose adapter generates text")
    row = {"messages": request.messages} if request.messages else {"prompt": request.prompt}
    row |= {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p")}
    penalties = {name: getattr(request, name) for name in ("presence_penalty", "frequency_penalty")}
    row |= {name: value for name, value in penalties.items() if value}
    row |= {"stop": list(request.stop_sequences), "logprobs": True}
    return [{"custom_id": f"{n}-{k}"} | row for k in range(request.num_completions)]


class ModelTokenizer(HuggingFaceTokenizer):
    """The tokenizer of a model as the engine loads it, also from a GGUF file. `model`: as for `JobClient`."""

    def __init__(self, cache_config, tokenizer_name: str, model: str | None = None):
        super().__init__(cache_config, tokenizer_name)
        self.model = model

    def get_wrapped_tokenizer(self) -> WrappedPreTrainedTokenizer:
        with self._tokenizers_lock:
            if self._helm_tokenizer_name not in self._tokenizers:
                _, folder = find_model(self.model, weights=False)
                self._tokenizers[self._helm_tokenizer_name] = WrappedPreTrainedTokenizer(load_tokenizer(folder))
            return self._tokenizers[self._helm_tokenizer_name]

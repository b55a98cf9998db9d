"""The engine as a model of EleutherAI's lm-evaluation-harness, which is named h2o_flexgen there."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.evaluation.arguments import LLM_ARGUMENTS, check_numbers, llm_arguments
from h2o_flexgen.evaluation.settings import check_outputs
from h2o_flexgen.llm import LLM

try:
    import lm_eval.models  # noqa: F401 - the harness adds its own models only where there are none
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:  # the command says what to install
    TemplateLM = object
    register_model = lambda name: lambda model: model

log = logging.getLogger(__name__)

#: arguments that the harness gives to every model; batches are up to the policy
FROM_HARNESS = ("batch_size", "max_batch_size", "trust_remote_code")
#: what --model_args may name
KNOWN = ["pretrained", *LLM_ARGUMENTS, "max_length", "add_bos_token", "prefix_token_id"]
#: arguments of a generation that are obeyed, and others with the one value that changes nothing
GENERATION = "until max_gen_toks do_sample temperature top_k top_p".split()
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0}


@register_model("h2o_flexgen")
class HarnessLM(TemplateLM):
    """A model for the harness, which scores and generates all requests of a call as one job.

    With a full cache log-likelihoods take one pass. Under a KV budget the context is prefilled and the continuation fed
    token by token, so that evicted tokens are missing as in generation.

    Args:
        pretrained: as `model` of `LLM`: a folder, a GGUF file, a name on the hub, or None for the demo model.
        max_length: tokens of a context and its continuation; longer contexts lose their beginning. Default: the model's
            positions, or its sliding window.
        add_bos_token: whether texts begin with the tokenizer's first token; default: as the tokenizer is configured.
        prefix_token_id: stands for an empty context; default: the tokenizer's first token, or its last if it has no
            first one.
        device: as for `LLM`; cuda:0, which the harness names by default, is ignored without CUDA.
        options: those of KNOWN, which go to `LLM`: the KV budget in numbers (`hh_ratio` and so on, with `kv_rule`),
            limits on memory in GiB, and the others as `LLM` takes them. A revision of digits, which the harness reads
            as a number, is given as pretrained=NAME@REVISION. Those of FROM_HARNESS are ignored.

    Raises:
        UserError: an argument that is unknown or cannot be used, or a model without a tokenizer.
    """

    max_gen_toks = 256  # of a request that names no length, as in the harness's own models

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        device: str = "auto",
        **options,
    ):
        super().__init__()
        if options.get("trust_remote_code"):
            log.warning("trust_remote_code is ignored: code that comes with a model never runs")
        options = {name: value for name, value in options.items() if name not in FROM_HARNESS}
        unknown = [name for name in options if name not in KNOWN]
        if unknown:
            raise UserError(f"unknown in --model_args: {', '.join(unknown)}; known: {', '.join(KNOWN)}")
        check_numbers({"max_length": max_length, "prefix_token_id": prefix_token_id})
        if device == "cuda:0" and not torch.cuda.is_available():
            device = "auto"
        self.llm = LLM(pretrained, **llm_arguments(options | {"device": device}))
        self.tokenizer = self.llm.tokenizer
        spec = self.llm.spec
        if self.tokenizer is None:
            raise UserError(f"{self.llm.model.name} has no tokenizer, and the tasks of the harness are texts")
        most = spec.positions
        self.max_length = most if max_length is None else max_length
        if not (type(self.max_length) is int and 1 <= self.max_length <= most):
            raise UserError(f"`max_length` must be a whole number up to {most}, the most that this model can take")
        self.add_bos_token = add_bos_token
        if add_bos_token is not None:
            self.tokenizer.add_bos_token = add_bos_token
        tokens = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        self._prefix_token_id = next((token for token in tokens if token is not None), None)
        self.kv_slots: dict[str, dict | None] = {}

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> HarnessLM:
        """A model from --model_args, which win over the harness's own options (--device)."""
        return cls(**{**(additional_config or {}), **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> HarnessLM:
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def set_cache_hook(self, cache_hook) -> None:
        """Raises UserError for --use_cache with a KV budget that is a ratio: a run with fewer requests would size it
        differently."""
        self._need_sizes("--use_cache runs only the requests that are left")
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict:
        """For the harness's file of results."""
        return {"model_dtype": str(self.llm.dtype), "kv_slots": self.kv_slots}

    # texts and tokens

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Token ids of a text. A text that spells out the first token, as a chat template does, gets no second one."""
        if add_special_tokens is None:
            begun = string.startswith(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if begun else self.add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text, which ends where the answer begins or goes on. A template that refuses a system
        message gets the conversation without it, as in the harness's `hf` model."""
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise UserError("the model has no chat template: leave --apply_chat_template out")
        goal = dict(add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt)
        try:
            return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **goal)
        except TemplateError:
            without = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(without, tokenize=False, **goal)

    # requests

    def _loglikelihood_tokens(self, requests: list[tuple], **kwargs) -> list[tuple[float, bool]]:
        """For each (texts, context tokens, continuation tokens): the continuation's log-likelihood, and whether it is
        the most likely one."""

        def answered(index: int, answer: tuple[float, bool]) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

        return self._score("loglikelihood", [request[1:] for request in requests], answered)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows of `max_length`, each beginning where the one before ended.
        Raises UserError for a KV budget that is a ratio: the contexts of full windows have one token."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        self._need_sizes("a rolling log-likelihood decodes whole texts")
        windows = []
        owners = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += map(make_disjoint_window, rolling)
            owners += [owner] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._score("loglikelihood_rolling", windows)):
            totals[owner] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score(
        self,
        kind: str,
        pairs: list[tuple[list[int], list[int]]],
        answered: Callable[[int, tuple[float, bool]], None] = lambda index, answer: None,
    ) -> list[tuple[float, bool]]:
        """For each (context, continuation), in tokens: the continuation's log-probability, and whether each of its
        tokens is the most likely one. `answered` is called with each as soon as its row has ended.

        As in the harness's `hf` model a context loses its beginning if it exceeds `max_length`; the last token of a
        continuation is never an input, and does not count.

        Raises:
            UserError: a continuation has no token, or more than `max_length`; or a text cannot be scored.
        """
        rows = []
        starts = []
        answers = {}
        for index, (context, continuation) in enumerate(pairs):
            if not continuation:
                remedy = "correct the task's choices or its target_delimiter"
                raise UserError(f"{kind}, request {index}: the continuation adds no token to its context: {remedy}")
            rows.append((context + continuation)[-(self.max_length + 1) :])
            starts.append(len(rows[-1]) - len(continuation))
            if starts[-1] < 1:
                raise UserError(f"a continuation has {len(continuation)} tokens; `max_length` is {self.max_length}")

        def take(score) -> None:
            answers[score.index] = sum(score.token_logprobs), all(score.is_greedy)
            if score.error is None:
                answered(score.index, answers[score.index])

        prompt_lens = None if self.llm.kv_budget is None else starts
        check_outputs(self.llm.score(rows, prompt_lens, first_scored=starts, on_output=take), f"{kind}, request")
        self.kv_slots[kind] = self.llm.report.get("kv_budget")
        return [answers[index] for index in range(len(pairs))]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """A text for each (context, arguments of the generation), up to the first of its stop strings."""
        prompts = []
        params = []
        for request in requests:
            context, arguments = request.args
            params.append(SamplingParams(**self._generation(arguments)))
            most = params[-1].max_tokens
            room = self.max_length - most
            if room < 1:
                raise UserError(f"{most} tokens are to be generated; `max_length` is {self.max_length}")
            prompts.append((self.tok_encode(context) or [self.prefix_token_id])[-room:])

        def take(output) -> None:
            if output.error is None:
                self.cache_hook.add_partial("generate_until", requests[output.index].args, output.outputs[0].text)

        outputs = self.llm.generate(prompts, params, on_output=take)
        check_outputs(outputs, "generate_until, request")
        self.kv_slots["generate_until"] = self.llm.report.get("kv_budget")
        return [output.outputs[0].text for output in outputs]

    def _generation(self, arguments: dict) -> dict:
        """The arguments of a request's `SamplingParams`. Raises UserError for those that would have no effect."""
        from lm_eval.models.utils import normalize_gen_kwargs

        if arguments.get("do_sample"):  # the harness would default to 0, which is greedy
            arguments = {"temperature": 1.0} | arguments
        given = normalize_gen_kwargs(arguments, self.max_gen_toks)
        unknown = [name for name in given if name not in GENERATION and given[name] != NEUTRAL.get(name)]
        if unknown:
            raise UserError(f"unknown in --gen_kwargs: {', '.join(unknown)}; known: {', '.join(GENERATION)}")
        stop = [*given["until"], self.tokenizer.decode(self.eot_token_id)]
        return {
            "temperature": given.get("temperature", 0.0) if given["do_sample"] else 0.0,
            "top_k": given.get("top_k", 0),
            "top_p": given.get("top_p", 1.0),
            "max_tokens": given["max_gen_toks"],
            "stop": [text for text in stop if text],
        }

    def _need_sizes(self, why: str) -> None:
        """Raises UserError for a KV budget that is a ratio of the longest context."""
        budget = self.llm.kv_budget
        if budget is not None and (budget.hh_ratio is not None or budget.recent_ratio is not None):
            raise UserError(f"{why}: a ratio of the longest context says nothing, give `hh_size` and `recent_size`")

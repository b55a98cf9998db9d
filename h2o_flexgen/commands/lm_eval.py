"""Command line: EleutherAI's lm-evaluation-harness with a model that need not fit into memory.

python -m h2o_flexgen.lm_eval --model h2o_flexgen --model_args pretrained=facebook/opt-30b,hh_ratio=0.2 --tasks piqa
"""

from __future__ import annotations

import argparse
import inspect
import logging
import math
import sys
from collections.abc import Callable

from h2o_flexgen.commands import options
from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.policy import DEFAULT_RULE, GIB, KVBudget

try:
    import lm_eval.models  # noqa: F401 - the harness adds its own models only where there are none
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:  # `run` says what to install
    TemplateLM = object
    register_model = lambda name: lambda model: model

log = logging.getLogger(__name__)

#: what the harness gives every model; the policy decides on batches
OF_THE_HARNESS = ("batch_size", "max_batch_size", "trust_remote_code")
#: arguments of a generation that are obeyed, and others with the one value that changes nothing
GENERATION = "until max_gen_toks do_sample temperature top_k top_p".split()
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0}


@register_model("h2o_flexgen")
class HarnessLM(TemplateLM):
    """A model for the harness, which scores and generates all requests of a call as one job.

    With a full cache log-likelihoods take one pass. Under a KV budget the context is prefilled and the continuation fed
    token by token, so that what is evicted is missed as in generation.

    Args:
        pretrained: as `model` of `LLM`: a folder, a GGUF file, a hub's name, or None for the demo model.
        path, revision, policy, device, dtype, compress_weight, compress_cache, compute, offload_dir: as for `LLM`. A
            revision that the harness reads as a number is given as pretrained=NAME@REVISION.
        hh_ratio, recent_ratio: the KV budget as fractions of the longest context of a call.
        hh_size, recent_size: the KV budget in slots.
        kv_rule: which tokens have the slots.
        gpu_mem, cpu_mem, disk_mem: GiB of a tier to use at most.
        max_length: tokens of a context and what follows; longer contexts lose their beginning. Default: the model's
            positions, or its sliding window.
        add_bos_token: whether texts begin with the tokenizer's first token; by default as the tokenizer has it.
        prefix_token_id: stands for an empty context; by default the tokenizer's first token, or the last if it has no
            first one.
        batch_size, max_batch_size: not used.
        trust_remote_code: ignored, with a warning: code that comes with a model never runs.

    Raises:
        UserError: an argument that is not known or cannot be used, or a model without a tokenizer.
    """

    max_gen_toks = 256  # of a request that names no length, as in the harness's own models

    def __init__(
        self,
        pretrained: str | None = None,
        path: str | None = None,
        policy: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        compress_weight: str | None = None,
        compress_cache: str | None = None,
        compute: str | None = None,
        offload_dir: str | None = None,
        hh_ratio: float | None = None,
        recent_ratio: float | None = None,
        hh_size: int | None = None,
        recent_size: int | None = None,
        kv_rule: str | None = None,
        gpu_mem: float | None = None,
        cpu_mem: float | None = None,
        disk_mem: float | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        revision: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool | None = None,
        **unknown,
    ):
        super().__init__()
        if unknown:
            known = [name for name in inspect.signature(HarnessLM).parameters if name not in OF_THE_HARNESS]
            raise UserError(f"unknown in --model_args: {', '.join(unknown)}; known: {', '.join(known[:-1])}")
        if trust_remote_code:
            log.warning("trust_remote_code is ignored: code that comes with a model never runs")
        numbers = dict(hh_ratio=hh_ratio, recent_ratio=recent_ratio, hh_size=hh_size, recent_size=recent_size)
        caps = dict(gpu_mem=gpu_mem, cpu_mem=cpu_mem, disk_mem=disk_mem)
        _check_numbers(numbers | caps | dict(max_length=max_length, prefix_token_id=prefix_token_id))

        import torch

        from h2o_flexgen.llm import LLM

        if device == "cuda:0" and not torch.cuda.is_available():
            device = "auto"  # the harness names cuda:0 where the user names none
        self.llm = LLM(
            pretrained,
            policy,
            _budget(kv_rule, numbers),
            device,
            dtype,
            path=path,
            revision=revision,
            compress_weight=compress_weight,
            compress_cache=compress_cache,
            compute=compute,
            offload_dir=offload_dir,
            **{name: _bytes(name, gib) for name, gib in caps.items()},
        )
        self.tokenizer = self.llm.tokenizer
        spec = self.llm.spec
        if self.tokenizer is None:
            raise UserError(f"{self.llm.model.name} has no tokenizer, and the tasks of the harness are texts")
        most = min(spec.positions, spec.window or spec.positions)
        self.max_length = most if max_length is None else max_length
        if not (type(self.max_length) is int and 1 <= self.max_length <= most):
            raise UserError(f"`max_length` must be a whole number up to {most}, which this model can take")
        self.add_bos_token = add_bos_token
        if add_bos_token is not None:
            self.tokenizer.add_bos_token = add_bos_token
        tokens = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        self._prefix_token_id = next((token for token in tokens if token is not None), None)
        self.kv_slots: dict[str, dict | None] = {}

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> HarnessLM:
        """A model from --model_args; what they say wins over the harness's own options (--device)."""
        return cls(**{**(additional_config or {}), **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> HarnessLM:
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def set_cache_hook(self, cache_hook) -> None:
        """Raises UserError for --use_cache with a KV budget that a run with fewer requests would size otherwise."""
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
        """Token ids of a text. One that begins with the first token spelt out, as a chat template's, gets no second."""
        if add_special_tokens is None:
            begun = string.startswith(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if begun else self.add_bos_token
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **how)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text, up to where the answer begins, or goes on. A template that refuses a system
        message gets the conversation without it, as from the harness's `hf` model."""
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise UserError("the model has no chat template: leave --apply_chat_template out")
        how = dict(add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt)
        try:
            return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **how)
        except TemplateError:
            without = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(without, tokenize=False, **how)

    # requests

    def _loglikelihood_tokens(self, requests: list[tuple], **kwargs) -> list[tuple[float, bool]]:
        """For each (texts, context tokens, continuation tokens): the continuation's log-likelihood, and whether it is
        what the model would say."""

        def answered(index: int, answer: tuple[float, bool]) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

        return self._score("loglikelihood", [request[1:] for request in requests], answered)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows of `max_length` of which each begins where the last one ended.

        Raises:
            UserError: a KV budget that is a ratio: the contexts of whole windows have one token.
        """
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
        tokens is the most likely one. `answered` is told of each as soon as its batch is done.

        As with the harness's `hf` model a context loses its beginning where `max_length` needs it; the last token of a
        continuation is no input, and does not count.

        Raises:
            UserError: a continuation has no token, or more than `max_length`; or a text cannot be scored.
        """
        rows = []
        starts = []
        answers = {}
        for index, (context, continuation) in enumerate(pairs):
            if not continuation:
                mend = "mend the task's choices or its target_delimiter"
                raise UserError(f"{kind}, request {index}: the continuation has no token behind its context: {mend}")
            rows.append((context + continuation)[-(self.max_length + 1) :])
            starts.append(len(rows[-1]) - len(continuation))
            if starts[-1] < 1:
                raise UserError(f"a continuation has {len(continuation)} tokens; `max_length` is {self.max_length}")

        def take(score) -> None:
            answers[score.index] = sum(score.token_logprobs), all(score.is_greedy)
            if score.error is None:
                answered(score.index, answers[score.index])

        prompt_lens = None if self.llm.kv_budget is None else starts
        scores = self.llm.score(rows, prompt_lens, first_scored=starts, on_output=take)
        for score in scores:
            if score.error is not None:
                raise UserError(f"{kind}, request {score.index}: {score.error}")
        self.kv_slots[kind] = self.llm.report.get("kv_budget")
        return [answers[index] for index in range(len(pairs))]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """A text for each (context, arguments of the generation), up to the first of its stop strings."""
        from h2o_flexgen.engine.params import SamplingParams

        prompts = []
        params = []
        for request in requests:
            context, arguments = request.args
            how = self._generation(arguments)
            room = self.max_length - how["max_tokens"]
            if room < 1:
                raise UserError(f"{how['max_tokens']} tokens are to be generated; `max_length` is {self.max_length}")
            prompts.append((self.tok_encode(context) or [self.prefix_token_id])[-room:])
            params.append(SamplingParams(**how))

        def take(output) -> None:
            if output.error is None:
                self.cache_hook.add_partial("generate_until", requests[output.index].args, output.outputs[0].text)

        outputs = self.llm.generate(prompts, params, on_output=take)
        for output in outputs:
            if output.error is not None:
                raise UserError(f"generate_until, request {output.index}: {output.error}")
        self.kv_slots["generate_until"] = self.llm.report.get("kv_budget")
        return [output.outputs[0].text for output in outputs]

    def _generation(self, arguments: dict) -> dict:
        """The `SamplingParams` of a request. Raises UserError for arguments that would be without effect."""
        from lm_eval.models.utils import normalize_gen_kwargs

        if arguments.get("do_sample"):  # the harness would take 0, which is greedy
            arguments = {"temperature": 1.0} | arguments
        how = normalize_gen_kwargs(arguments, self.max_gen_toks)
        unknown = [name for name in how if name not in GENERATION and how[name] != NEUTRAL.get(name)]
        if unknown:
            raise UserError(f"unknown in --gen_kwargs: {', '.join(unknown)}; known: {', '.join(GENERATION)}")
        stop = [*how["until"], self.tokenizer.decode(self.eot_token_id)]
        return {
            "temperature": how.get("temperature", 0.0) if how["do_sample"] else 0.0,
            "top_k": how.get("top_k", 0),
            "top_p": how.get("top_p", 1.0),
            "max_tokens": how["max_gen_toks"],
            "stop": [text for text in stop if text],
        }

    def _need_sizes(self, why: str) -> None:
        """Raises UserError for a KV budget that is a ratio of the longest context."""
        budget = self.llm.kv_budget
        if budget is not None and (budget.hh_ratio is not None or budget.recent_ratio is not None):
            raise UserError(f"{why}: a ratio of the longest context is no measure, give `hh_size` and `recent_size`")


def _check_numbers(arguments: dict) -> None:
    for name, value in arguments.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"`{name}` must be a number, not {value!r}")


def _bytes(name: str, gib: float | None) -> int | None:
    if gib is not None and not 0 < gib < math.inf:
        raise UserError(f"`{name}` must be more than 0 GiB, not {gib}")
    return gib and int(gib * GIB)


def _budget(kv_rule: str | None, sizes: dict) -> KVBudget | None:
    """The KV budget of --model_args, None for a full cache."""
    from h2o_flexgen.kv_cache import check_rule

    if kv_rule is not None:
        check_rule(kv_rule)  # before tasks are loaded
    if any(value is not None for value in sizes.values()):
        return KVBudget(**sizes, rule=kv_rule or DEFAULT_RULE)
    if kv_rule is not None:
        raise UserError("`kv_rule` says which tokens a KV budget keeps: give one too, such as hh_ratio=0.2")
    return None


class Passed(options.Parser):
    """Leaves all options to the harness."""

    def parse_args(self, argv: list[str] | None = None, namespace: argparse.Namespace | None = None):
        return argparse.Namespace(argv=sys.argv[1:] if argv is None else argv)


def make_parser() -> argparse.ArgumentParser:
    return Passed("python -m h2o_flexgen.lm_eval", "Run lm-evaluation-harness with a model named h2o_flexgen.")


def run(args: argparse.Namespace) -> None:
    """Raises UserError without the harness; what it raises itself is its own."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as e:
        raise UserError(f"lm-evaluation-harness cannot be loaded ({reason(e)}): pip install lm-eval") from None
    sys.argv = ["lm-eval", *args.argv]  # the only place where it looks
    cli_evaluate()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `options.main` says."""
    return options.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Tiny models with random weights that make the tokens vary, and prompts for which rounding errors decide nothing.

A new family takes an entry in VARIANTS, and one in BASE or in oracle.ORACLES if its config or its blocks are not
LLaMA's. Its first variant is the plainest; its head size is a multiple of 4, which a cache in 4 bits needs. At least
one variant is tied.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from oracle import Trace, fresh_rotary, oracle_of

from h2o_flexgen.policy import KVBudget

#: lower bounds of the difference between the best two logits, and between a rank that stays and one that goes, so that
#: fp32 sums in any order give the same tokens
MARGIN = 2e-3
SLACK = 1e-5
#: the cache rule of tests that are not about one: in short prompts few of its choices are close calls
RULE = "smoothed"
#: upper bound of the errors of transformers' own log-probabilities in fp32
NOISE = 2e-5

LLAMA = dict(
    vocab_size=96,
    hidden_size=24,
    num_hidden_layers=2,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    eos_token_id=2,
)
#: model_type -> the config of its variants, if it is not LLAMA
BASE = {
    "opt": dict(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        init_std=0.4,
        eos_token_id=2,
    ),
    "mistral": {**LLAMA, "sliding_window": None},
    "mixtral": {**LLAMA, "sliding_window": None, "num_local_experts": 4},
    "qwen3_moe": {**LLAMA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
    "gpt_neox": dict(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        eos_token_id=2,
    ),
}
BASE["qwen2_moe"] = {**BASE["qwen3_moe"], "shared_expert_intermediate_size": 20}
BASE["gemma2"] = {**LLAMA, "head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 11}
BASE["gemma3_text"] = {**BASE["gemma2"], "num_hidden_layers": 3, "sliding_window_pattern": 3, "sliding_window": 7}
BASE["gemma4_text"] = {
    **LLAMA,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
BASE["gpt_oss"] = {**LLAMA, "intermediate_size": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}
BASE["gpt_oss"] |= {"sliding_window": 9}
BASE["phi3"] = {**LLAMA, "pad_token_id": 0, "original_max_position_embeddings": 128}
LINEAR = dict(rope_theta=5e3, rope_scaling={"type": "linear", "factor": 2.5})
#: texts are longer than 16 positions
DYNAMIC = dict(max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
LLAMA3 = dict(
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
)
YARN = dict(
    max_position_embeddings=16,
    rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
)
#: texts are shorter and longer than the original 16 positions
LONGROPE = dict(
    original_max_position_embeddings=16,
    rope_scaling={"type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 4.0]},
)
#: texts are longer than the original 3 positions
SHORT_LONGROPE = dict(
    original_max_position_embeddings=3,
    rope_scaling={"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.5, 4.0]},
)
NO_CAPS = dict(attn_logit_softcapping=None, final_logit_softcapping=None)
FULL = "full_attention"
SLIDING = "sliding_attention"
MIXTURE = dict(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=12)
THREE = dict(num_attention_heads=6, num_key_value_heads=2)
EIGHT = dict(num_attention_heads=8, num_key_value_heads=1, hidden_size=32)
#: model_type -> {variant: changes to its config}; the first variant of a family runs in the most tests
VARIANTS = {
    "opt": {
        "opt": dict(num_hidden_layers=3),
        "post_norm": dict(do_layer_norm_before=False),
        "350m_style": dict(do_layer_norm_before=False, word_embed_proj_dim=20),
        "widened_embedding": dict(word_embed_proj_dim=48),
        "post_norm_no_affine": dict(do_layer_norm_before=False, layer_norm_elementwise_affine=False),
        "galactica": dict(
            activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=True
        ),
        "untied": dict(tie_word_embeddings=False),
        "untied_projected": dict(tie_word_embeddings=False, word_embed_proj_dim=24, do_layer_norm_before=False),
        "no_final_norm": dict(_remove_final_layer_norm=True),
        "odd_vocab": dict(vocab_size=77),
        "one_layer": dict(num_hidden_layers=1),
        "deep": dict(num_hidden_layers=6, hidden_size=16, word_embed_proj_dim=16, num_attention_heads=2, ffn_dim=32),
        "odd_sizes": dict(hidden_size=21, word_embed_proj_dim=21, num_attention_heads=3, ffn_dim=35),
    },
    "llama": {
        "llama": dict(),
        "llama_no_groups_tied": dict(num_key_value_heads=4, tie_word_embeddings=True),
        "llama_groups_of_3_wide_heads_linear": dict(**THREE, **LINEAR, head_dim=10),
        "llama_groups_of_8_dynamic": dict(**EIGHT, **DYNAMIC, tie_word_embeddings=True),
        "llama_biases_llama3": dict(**LLAMA3, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
        "llama_longrope": dict(**LONGROPE),
        "llama_yarn": dict(**YARN, hidden_act="gelu_pytorch_tanh", vocab_size=77),
    },
    "mistral": {
        "mistral": dict(head_dim=8),
        "mistral_groups_of_3_odd_hidden_linear": dict(**THREE, **LINEAR, hidden_size=23, head_dim=6),
        "mistral_groups_of_8_tied_window_yarn": dict(**EIGHT, **YARN, tie_word_embeddings=True, sliding_window=64),
        "mistral_no_groups_dynamic": dict(**DYNAMIC, num_key_value_heads=4),
        "mistral_window": dict(head_dim=8, sliding_window=12),
    },
    "qwen2": {
        "qwen2": dict(),
        "qwen2_groups_of_3_tied_yarn": dict(**THREE, **YARN, tie_word_embeddings=True),
        "qwen2_groups_of_8_dynamic": dict(**EIGHT, **DYNAMIC),
        "qwen2_no_groups_llama3": dict(**LLAMA3, num_key_value_heads=4, head_dim=14),
        "qwen2_window_of_no_layer": dict(use_sliding_window=True, sliding_window=4, max_window_layers=2),
        "qwen2_window_of_two_layers": dict(
            use_sliding_window=True, sliding_window=6, max_window_layers=1, num_hidden_layers=3
        ),
    },
    "qwen3": {
        "qwen3": dict(head_dim=8),
        "qwen3_groups_of_3_tied_yarn": dict(**THREE, **YARN, tie_word_embeddings=True, head_dim=10),
        "qwen3_groups_of_8_dynamic": dict(**EIGHT, **DYNAMIC, head_dim=4),
        "qwen3_no_groups_biases_llama3": dict(**LLAMA3, num_key_value_heads=4, head_dim=6, attention_bias=True),
    },
    "qwen3_moe": {
        "qwen3_moe": dict(norm_topk_prob=True),
        "qwen3_moe_one_of_seven_dense_first": dict(num_experts=7, num_experts_per_tok=1, mlp_only_layers=[0]),
        "qwen3_moe_all_of_three_tied": dict(
            num_experts=3, num_experts_per_tok=3, decoder_sparse_step=2, tie_word_embeddings=True
        ),
        "qwen3_moe_window_groups_of_3_yarn": dict(
            **THREE, **YARN, num_experts=6, norm_topk_prob=True, use_sliding_window=True, sliding_window=9
        ),
    },
    "qwen2_moe": {
        "qwen2_moe": dict(),
        "qwen2_moe_one_of_seven_dense_first_tied_yarn": dict(
            **YARN, num_experts=7, num_experts_per_tok=1, mlp_only_layers=[0], tie_word_embeddings=True
        ),
        "qwen2_moe_all_of_three_windows_of_even_layers": dict(
            num_experts=3,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=3,
        ),
        "qwen2_moe_groups_of_3_no_biases": dict(
            **THREE, num_experts=6, decoder_sparse_step=2, qkv_bias=False, shared_expert_intermediate_size=50
        ),
    },
    "mixtral": {
        "mixtral": dict(head_dim=8),
        "mixtral_of_one_expert_tied": dict(num_local_experts=1, num_experts_per_tok=1, tie_word_embeddings=True),
        "mixtral_three_of_eight_linear": dict(**LINEAR, num_local_experts=8, num_experts_per_tok=3, head_dim=8),
        "mixtral_no_groups_llama3": dict(**LLAMA3, num_key_value_heads=4),
    },
    "gpt_oss": {
        "gpt_oss": dict(),
        "gpt_oss_one_of_seven_tied": dict(num_local_experts=7, num_experts_per_tok=1, tie_word_embeddings=True),
        "gpt_oss_groups_of_3_windows_everywhere_linear": dict(
            **THREE, **LINEAR, layer_types=[SLIDING] * 2, swiglu_limit=1.5, swiglu_alpha=1.2, head_dim=10
        ),
        "gpt_oss_groups_of_8_no_biases": dict(
            **EIGHT, attention_bias=False, layer_types=[FULL, SLIDING], num_local_experts=3, num_experts_per_tok=3
        ),
    },
    "gpt_neox": {
        "gpt_neox": dict(rotary_pct=0.5),
        "gpt_neox_serial_tied": dict(use_parallel_residual=False, tie_word_embeddings=True),
        "gpt_neox_odd_heads_linear": dict(
            **LINEAR, hidden_size=21, num_attention_heads=3, intermediate_size=35, rotary_pct=0.6
        ),
        "gpt_neox_no_bias_dynamic": dict(**DYNAMIC, attention_bias=False, rotary_pct=1.0, rotary_emb_base=3000),
        "gpt_neox_one_head_yarn": dict(**YARN, num_attention_heads=1, hidden_act="gelu_fast"),
    },
    "gemma2": {
        "gemma2": dict(attn_logit_softcapping=5.0, final_logit_softcapping=20.0, tie_word_embeddings=True),
        "gemma2_groups_of_3_untied_no_caps_linear": dict(
            **THREE, **LINEAR, head_dim=10, tie_word_embeddings=False, hidden_size=30, **NO_CAPS
        ),
        "gemma2_groups_of_8_biases": dict(
            **EIGHT, attention_bias=True, layer_types=[FULL, SLIDING], attn_logit_softcapping=3.0, vocab_size=77
        ),
        "gemma2_no_groups_windows_everywhere": dict(
            num_key_value_heads=4,
            hidden_size=20,
            layer_types=[SLIDING] * 2,
            hidden_activation="silu",
            rms_norm_eps=1e-3,
        ),
    },
    "gemma3_text": {
        "gemma3_text": dict(tie_word_embeddings=True),
        "gemma3_text_groups_of_3_linear_untied": dict(
            **THREE,
            rope_theta=5e4,
            rope_local_base_freq=3e3,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            head_dim=10,
            hidden_size=30,
            tie_word_embeddings=False,
            final_logit_softcapping=20.0,
        ),
        "gemma3_text_groups_of_8_biases": dict(
            **EIGHT, attention_bias=True, layer_types=[FULL, SLIDING, FULL], head_dim=4, vocab_size=77
        ),
        "gemma3_text_no_groups_dynamic": dict(
            **DYNAMIC, num_key_value_heads=4, layer_types=[SLIDING, SLIDING, FULL], rms_norm_eps=1e-3
        ),
    },
    "gemma4_text": {
        "gemma4_text": dict(final_logit_softcapping=20.0, tie_word_embeddings=True),
        "gemma4_text_experts_and_values_that_are_keys": dict(
            **MIXTURE, attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention="vision"
        ),
        "gemma4_text_all_of_three_experts_untied_groups_of_3": dict(
            **THREE,
            **MIXTURE | dict(num_experts=3, top_k_experts=3),
            rope_parameters={
                FULL: {"rope_type": "proportional", "rope_theta": 5e4, "partial_rotary_factor": 0.75, "factor": 2.0},
                SLIDING: {"rope_type": "default", "rope_theta": 3e3},
            },
            tie_word_embeddings=False,
            global_head_dim=10,
            hidden_activation="silu",
            num_hidden_layers=2,
            layer_types=[FULL] * 2,
        ),
        "gemma4_text_groups_of_8_biases_values_that_are_keys": dict(
            **EIGHT, attention_bias=True, attention_k_eq_v=True, head_dim=4, vocab_size=77, rms_norm_eps=1e-3
        ),
    },
    "phi3": {
        "phi3": dict(hidden_size=32),
        "phi3_groups_of_3_partial_tied_window": dict(
            **THREE, hidden_size=48, partial_rotary_factor=0.75, tie_word_embeddings=True, sliding_window=14
        ),
        "phi3_groups_of_8_longrope": dict(**EIGHT, **SHORT_LONGROPE, rms_norm_eps=1e-3, hidden_act="gelu"),
        "phi3_no_groups_odd_vocab": dict(num_key_value_heads=None, vocab_size=77, rope_theta=5e3),
    },
}
FAMILY = {name: model_type for model_type, variants in VARIANTS.items() for name in variants}
CONFIGS = {name: {**BASE.get(FAMILY[name], LLAMA), **VARIANTS[FAMILY[name]][name]} for name in FAMILY}
#: those whose RoPE angles depend on the length of the text; without Phi-3's, whose keys transformers computes again
#: when a text outgrows the original length
BY_LENGTH = [name for name in CONFIGS if ("dynamic" in name or "longrope" in name) and FAMILY[name] != "phi3"]
#: those with layers whose sliding window is shorter than the texts of tests
WINDOWS = ["mistral_window", "qwen2_window_of_two_layers"]
#: those whose layers rotate differently
BY_LAYER = [name for name in CONFIGS if FAMILY[name] in ("gemma3_text", "gemma4_text")]
#: family -> its first variant
FIRST = {model_type: next(iter(variants)) for model_type, variants in VARIANTS.items()}


#: where the processes of a test run share what they have computed; None if there is only one
SHARED: Path | None = None


def sized(heavy: int, recent: int | None = None, rule: str = RULE) -> KVBudget:
    """A budget in slots, by the rule that `Tiny.reference` takes too if none is given."""
    return KVBudget.from_size(heavy, recent, rule)


@dataclass
class Tiny:
    """A tiny model: transformers' and, in `folder`, its checkpoint."""

    name: str
    hf: object
    folder: Path
    _answers: dict = field(default_factory=dict)

    def __post_init__(self):
        self.oracle = oracle_of(self.hf)

    def _once(self, key: tuple, compute: Callable):
        """The result of `compute`, which is called once for each model and key in a test run."""
        if key not in self._answers:
            self._answers[key] = compute() if SHARED is None else self._shared(key, compute)
        return self._answers[key]

    def _shared(self, key: tuple, compute: Callable):
        path = SHARED / hashlib.sha256(f"{self._digest} {key}".encode()).hexdigest()
        if path.exists():
            return pickle.loads(path.read_bytes())
        found = compute()
        with NamedTemporaryFile(dir=SHARED, delete=False) as file:
            pickle.dump(found, file)
        Path(file.name).rename(path)
        return found

    @cached_property
    def _digest(self) -> str:
        """Of weights and config."""
        found = hashlib.sha256(self.hf.config.to_json_string().encode())
        for name, tensor in self.hf.state_dict().items():
            found.update(name.encode() + tensor.numpy().tobytes())
        return found.hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.hf.config.vocab_size

    def prompts(self, lengths, seed: int = 0) -> list[list[int]]:
        rng = random.Random(f"{self.name} {seed}")
        tokens = iter(lambda: rng.randrange(self.vocab_size), None)
        return [list(islice(tokens, n)) for n in lengths]

    def reference(self, prompt: list[int], max_tokens: int, heavy=None, recent=None, rule=RULE, cache=None) -> Trace:
        key = (tuple(prompt), max_tokens, heavy, recent, rule, cache)
        return self._once(key, lambda: self.oracle.generate(prompt, max_tokens, heavy, recent, rule, cache))

    def references(self, prompts, max_tokens: int, *budget) -> list[Trace]:
        return [self.reference(p, max_tokens, *budget) for p in prompts]

    def clear_cut_prompts(
        self, lengths, max_tokens: int, budgets=((None, None),), behind: tuple[int, ...] = ()
    ) -> list[list[int]]:
        """Prompts of these lengths for which rounding errors decide nothing under any of the budgets (heavy, recent),
        (heavy, recent, rule) or (heavy, recent, rule, format of the cache). The tokens `behind`, which do not count,
        are the beginning of each."""
        return [self._clear_cut(n, place, max_tokens, budgets, behind) for place, n in enumerate(lengths)]

    def _clear_cut(self, length: int, place: int, max_tokens: int, budgets, behind: tuple[int, ...]) -> list[int]:
        problems = Counter()
        for seed in range(100):
            (prompt,) = self.prompts([length], seed=1000 * place + seed)
            prompt = [*behind, *prompt]
            problem = self._problem(prompt, max_tokens, budgets)
            if problem is None:
                return prompt
            problems[problem] += 1
        raise AssertionError(f"{self.name}: no clear-cut prompt of {length} tokens among 100: {dict(problems)}")

    def _problem(self, prompt: list[int], max_tokens: int, budgets) -> str | None:
        """Why a prompt does not serve as a test."""
        for budget in budgets:
            trace = self.reference(prompt, max_tokens, *budget)
            if len(set(trace.tokens)) <= min(3, len(trace.tokens) // 4):
                return "the same tokens are repeated"
            if trace.margin <= MARGIN:
                return f"two logits differ by less than {MARGIN}"
            if trace.slack <= SLACK:
                return f"two ranks of {budget} differ by less than {SLACK} (see `unit` of the rule's oracle)"
            if trace.rounding <= 1:
                return "a number in the cache is between two codes"
        return None if self._noise(prompt, max_tokens) < NOISE else f"errors in fp32 grow to {NOISE}"

    def _noise(self, prompt: list[int], max_tokens: int) -> float:
        """The error of transformers in fp32 against the reference in fp64: some tokens magnify every rounding."""
        trace = self.reference(prompt, max_tokens)
        tokens, logprobs = self.transformers(prompt, max_tokens)
        assert tokens == trace.tokens, f"{self.name}: the oracle is not transformers for the prompt {prompt}"
        return max(abs(a - b) for a, b in zip(logprobs, trace.logprobs))

    def transformers(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens that transformers generates greedily in fp32, and their log-probabilities."""
        return self._once((tuple(prompt), max_tokens), lambda: self._transformers(prompt, max_tokens))

    def _transformers(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        self.hf.base_model.rotary_emb = fresh_rotary(self.hf)
        with torch.inference_mode():
            out = self.hf.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=1,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, len(prompt) :].tolist()
        return tokens, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens)]


def build(name: str, folder: Path, seed: int = 0, **changes) -> Tiny:
    """Make the model `name` of CONFIGS, with `changes` to its config, and save it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(FAMILY[name], **copy.deepcopy({**CONFIGS[name], **changes}))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    less_one = 0 if "gemma" in name and "gemma4" not in name else 1  # Gemma's norms, until its fourth
    with torch.no_grad():
        for key, tensor in model.named_buffers():
            if key.endswith("layer_scalar"):
                tensor.normal_(1, 0.3)
        for key, tensor in model.named_parameters():
            if key.endswith("bias"):
                tensor.normal_(0, 0.1)
            elif "experts" in key:
                tensor.normal_(0, 0.7)
            elif "norm" in key or key.endswith("scale"):
                tensor.normal_(less_one, 0.3)
            elif "embed" in key:
                tensor.normal_(0, config.hidden_size**-0.5 if "gemma" in name else 0.8)  # Gemma multiplies the rows
            else:
                tensor.normal_(0, 0.5)
    model.save_pretrained(folder)
    return Tiny(name, model, folder)

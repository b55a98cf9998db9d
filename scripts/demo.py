"""A demo of one minute: a small chat model answers questions and summarises texts with a KV cache of fixed size. The
summaries are repeated with the full cache, and the perplexity of both is printed.
"""

from __future__ import annotations

import math
import textwrap
from pydoc_data.topics import topics
from statistics import fmean

from h2o_flexgen import LLM, KVBudget, SamplingParams
from h2o_flexgen.jobs.input import builtin_prompts

QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Give me a tip for better sleep.")
#: topics of the language reference that ships with Python
TEXTS = ("with", "exceptions")
#: passages to score, tokens of their prompts, and scored tokens, which are fed one by one
PASSAGES = 8
PROMPT = 256
SCORED = 64
PARAMS = SamplingParams(max_tokens=40)
#: fp32, since 16-bit types round differently from one processor to the next
OPTIONS = {"dtype": "float32", "progress": False}


def ask(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


def show(label: str, text: str) -> None:
    text = textwrap.fill(" ".join(text.split()), 116, initial_indent=f"{label:<9}", subsequent_indent=" " * 9)
    print(text, flush=True)


def perplexity(llm: LLM) -> float:
    passages = builtin_prompts(llm.tokenizer, llm.spec.vocab, PASSAGES, PROMPT + SCORED)
    scores = llm.score(passages, prompt_len=PROMPT)
    return math.exp(-fmean(logprob for score in scores for logprob in score.token_logprobs))


def main() -> None:
    questions = [ask(question) for question in QUESTIONS]
    summaries = [ask(f"Summarize this text in two sentences:\n\n{topics[name][:2400]}") for name in TEXTS]
    with LLM(kv_budget=KVBudget.from_ratio(0.2, rule="h2o"), **OPTIONS) as llm:
        answers = [output.outputs[0].text for output in llm.chat(questions + summaries, PARAMS)]
        slots = llm.report["kv_budget"]
        longest = llm.report["workload"]["prompt_len"]
        print(
            f"{llm.report['model']}, {llm.report['dtype']} on {llm.report['device']}; H2O keeps {slots['heavy']} heavy "
            f"hitters and {slots['recent']} recent tokens of up to {longest}, on average"
        )
        for question, answer in zip(QUESTIONS, answers):
            show("question", question)
            show("answer", answer)
        h2o = perplexity(llm)
        slots = llm.report["kv_budget"]
    with LLM(**OPTIONS) as llm:
        full_answers = [output.outputs[0].text for output in llm.chat(summaries, PARAMS)]
        for name, answer, full_answer in zip(TEXTS, answers[len(QUESTIONS) :], full_answers):
            print()
            show("text", f'Python\'s language reference, "{name}", its first 2,400 characters')
            show("H2O", answer)
            show("full", full_answer)
        full = perplexity(llm)
    print(
        f"\nWhat evicting costs: perplexity {full:.2f} with the full cache, {h2o:.2f} with {slots['heavy']} + "
        f"{slots['recent']} slots ({h2o / full - 1:+.0%}), {PASSAGES} x ({PROMPT} + {SCORED}) tokens"
    )


if __name__ == "__main__":
    main()

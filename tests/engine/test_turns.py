"""One LLM in several threads, from within its own calls, and after a fork."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError

ON_DISK = Policy(2, 2, (0, 0, 0, 0, 0, 0))


def prompts_of(job: int) -> list[list[int]]:
    return [[3 + 20 * job + n] * (1 + 5 * n) for n in range(3)]


#: jobs with equal shapes and different tokens, so that data left in a buffer by one would fit another
JOBS = list(map(prompts_of, range(4)))


def open_llm(model, **options) -> LLM:
    return LLM(str(model.folder), ON_DISK, device="cpu", dtype="float32", progress=False, **options)


@pytest.fixture
def llm(tiny):
    with open_llm(tiny("llama")) as found:
        yield found


def tokens(llm: LLM, prompts, **options) -> list[list[int]]:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, **options)]


def test_threads_that_share_an_llm_take_turns(llm):
    alone = [tokens(llm, job) for job in JOBS]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda n: tokens(llm, JOBS[n % 4]), range(20)))
    assert together == [alone[n % 4] for n in range(20)]


def test_threads_may_also_score_talk_and_close(llm):
    budget = KVBudget.from_size(4)
    score = lambda: [scored.token_logprobs for scored in llm.score(JOBS[1])]

    def talk():
        with llm.session(budget) as session:
            return session.generate(JOBS[2][2], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids

    calls = [lambda: tokens(llm, JOBS[0]), score, llm.close]
    alone = [call() for call in calls]
    spoken = talk()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: calls[n % 3](), range(12)))
    assert found == [alone[n % 3] for n in range(12)]
    assert talk() == spoken


@pytest.mark.parametrize("call", ["generate", "score", "session", "close"])
def test_a_call_from_on_output_is_refused_and_changes_nothing(llm, call):
    alone = tokens(llm, JOBS[0])
    arguments = () if call in ("session", "close") else ([[5, 9] * 9],)
    errors = []

    def again(output):
        with pytest.raises(UserError) as error:
            getattr(llm, call)(*arguments)
        errors.append(str(error.value))

    assert tokens(llm, JOBS[0], on_output=again) == alone
    assert len(errors) == len(JOBS[0])
    assert "`on_output`" in errors[0]
    assert tokens(llm, JOBS[0]) == alone


def test_a_call_from_on_text_is_refused(llm, tiny):
    refused = []

    def again(stream, text):
        with pytest.raises(UserError, match="in the middle of a call"):
            llm.generate([[5]])
        with pytest.raises(UserError, match="in the middle of a call"):
            session.close()
        refused.append(stream)

    llm.tokenizer = llm.model.tokenizer = Letters()
    with llm.session(KVBudget.from_size(4)) as session:
        session.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True), again)
    assert refused


class Letters:
    """A tokenizer that shows every token as a letter."""

    def decode(self, tokens, **options) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def in_a_fork(child) -> None:
    """Run `child` in a fork of this process, and fail unless it returns within 20 seconds."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            child()
            os._exit(0)
        except BaseException as e:
            os.write(2, f"{e!r}\n".encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_is_refused_and_the_parent_continues(llm, tiny):
    alone = tokens(llm, JOBS[0])
    session = llm.session(KVBudget.from_size(4))
    session.feed([5, 6, 7])

    calls = [lambda: llm.generate([[5]]), lambda: llm.score([[5, 6]]), llm.session, lambda: session.feed([5])]

    def child():
        for call in (*calls, lambda: open_llm(tiny("llama"))):
            with pytest.raises(UserError, match="fork"):
                call()
        session.close()
        llm.close()

    in_a_fork(child)
    assert session.generate([8], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids
    assert tokens(llm, JOBS[0]) == alone

"""A session matches the oracle, wherever its caches are, and far past the model's positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from stream_oracle import StreamOracle

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.engine.streams import Streams
from h2o_flexgen.errors import PlanError
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.machine import memory

pytest_plugins = ["command_tools"]

#: every family with RoPE, and each kind of RoPE and of attention groups once, except RoPE by the text's length
MODELS = [name for name in zoo.FIRST.values() if name != "opt"]
MODELS += ["llama_biases_llama3", "mistral_groups_of_8_tied_window_yarn", "gpt_neox_odd_heads_linear"]
RAM = dict(gpu_batch_size=4)
DISK = dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=1)
POLICIES = {
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=4, prefill_tokens=20),
    "attention on cpu": dict(percent=(50, 50, 0, 100, 0, 100), gpu_batch_size=3, cpu_cache_compute=True),
    "thirds": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=2, prefill_tokens=1),
    "no overlap": dict(percent=(0, 0, 0, 50, 0, 0), gpu_batch_size=3, overlap=False),
}
HEAVY = 5
RECENT = 6
#: (tokens read, tokens generated) of each turn: more in all than the models' 128 positions
TURNS = [(40, 5), (1, 6), (33, 3), (17, 4)]
SHORT = [(30, 5), (1, 9), (20, 3)]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def opened(model, rule="smoothed", **policy) -> LLM:
    budget = KVBudget.from_size(HEAVY, RECENT, rule)
    return LLM(str(model.folder), Policy(**(policy or RAM)), budget, device="cpu", dtype="float32", progress=False)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


class Expected:
    """The oracle's turns, read in chunks: `texts`, `outputs` and the `logprobs` of the last text, which is only
    read."""

    def __init__(self, model, chunk: int, seed: int, rule: str = "smoothed", rolling: bool = True, turns=TURNS):
        stream = StreamOracle(model.oracle, HEAVY, RECENT, rule, rolling)
        waiting = []
        self.texts = model.prompts([n for n, _ in turns] + [40], seed)
        self.outputs = []
        for text, (_, count) in zip(self.texts, turns):
            stream.feed(waiting + text, chunk)
            self.outputs.append(stream.generate(count))
            waiting = self.outputs[-1][-1:]
        stream.feed(waiting + self.texts[-1][:-1], chunk)
        stream.score(self.texts[-1][-1])
        self.logprobs = stream.logprobs[-40:]
        self.is_clear = stream.margin > 2e-3 and stream.slack > 1e-5

    @classmethod
    def clear(cls, model, chunk: int, seed: int = 0, **more) -> Expected:
        """Those of the first texts in which no choice of a token, to generate or to evict, is a close call."""
        for n in range(100):
            expected = cls(model, chunk, 1000 * seed + n, **more)
            if expected.is_clear:
                return expected
        raise AssertionError(f"{model.name}: each of 100 texts has two logits or two ranks that rounding could swap")


def turns_of(session, expected: Expected, turns=TURNS) -> None:
    for text, output, (_, count) in zip(expected.texts, expected.outputs, turns):
        assert session.generate(text, greedy(count)).token_ids == output
    assert session.feed(expected.texts[-1]) == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("n, name", [*enumerate(MODELS)])
def test_every_model_gives_what_the_oracle_gives(tiny, n, name):
    model = tiny(name)
    expected = Expected.clear(model, chunk=16)
    with opened(model, **(RAM, DISK)[n % 2]) as llm, llm.session(chunk=16) as session:
        turns_of(session, expected)
        assert session.lengths() == sum(n + count for n, count in TURNS) + 40


@pytest.mark.parametrize(
    "chunk, name", [(1, "gpt_neox"), (HEAVY + RECENT, "llama_groups_of_3_wide_heads_linear"), (64, "gpt_neox")]
)
def test_chunks_of_any_size(tiny, chunk, name):
    model = tiny(name)
    expected = Expected.clear(model, chunk, turns=SHORT)
    with opened(model) as llm, llm.session(chunk=chunk) as session:
        turns_of(session, expected, SHORT)


def rules() -> list[str]:
    """Every rule that a session accepts, with options that matter with few slots."""
    found = {name: name for name, rule in RULES.items() if rule.growth == "fixed"}
    found |= {
        "vatp": "vatp:first=2",
        "decayed": "decayed:decay=0.8",
        "sinks": "sinks:first=2",
        "voted": "voted:window=4:pool=3",
    }
    return [*found.values(), "h2o:first=1:last=3", "voted"]


@pytest.mark.parametrize("n, rule", [*enumerate(rules())])
def test_every_rule_gives_what_its_oracle_gives(tiny, n, rule):
    model = tiny("llama")
    expected = Expected.clear(model, 9, rule=rule, turns=SHORT)
    with opened(model, rule, **(RAM, DISK)[n % 2]) as llm, llm.session(chunk=9) as session:
        turns_of(session, expected, SHORT)


def test_a_rule_that_keeps_every_generated_token_is_refused(tiny):
    with opened(tiny("llama"), "snapkv") as llm:
        for rolling in (True, False):
            with pytest.raises(UserError, match="snapkv keeps every generated token"):
                llm.session(position_rolling=rolling)


@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox"])
def test_positions_may_stay_as_they_are(tiny, name):
    model = tiny(name)
    expected = Expected.clear(model, 8, rolling=False, turns=SHORT)
    for policy in (RAM, DISK):
        with opened(model, **policy) as llm, llm.session(chunk=8, position_rolling=False) as session:
            turns_of(session, expected, SHORT)
            with pytest.raises(UserError, match="would come to 130 tokens, more than the model's 128 positions"):
                session.feed([5] * 22)
            session.feed([5] * 20)


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("name", zoo.WINDOWS)
def test_windows_slide_over_turns(tiny, name, rolling, chunk):
    """Over positions, or over ranks. In a long chunk many tokens leave at once, and budgets are larger than windows."""
    model = tiny(name)
    expected = Expected.clear(model, chunk, rolling=rolling, turns=SHORT)
    policy = DISK if chunk == 5 else RAM
    with opened(model, **policy) as llm, llm.session(chunk=chunk, position_rolling=rolling) as session:
        turns_of(session, expected, SHORT)


@pytest.mark.parametrize("n, rule", [*enumerate(["h2o:first=1:last=1", "decayed:decay=0.8", "mean", "sinks:first=2"])])
def test_rules_slide_with_the_window(tiny, n, rule):
    model = tiny(zoo.WINDOWS[n % 2])
    expected = Expected.clear(model, 9, rule=rule, rolling=False, turns=SHORT)
    with opened(model, rule) as llm, llm.session(chunk=9, position_rolling=False) as session:
        turns_of(session, expected, SHORT)


def test_a_session_without_a_budget_keeps_windows(tiny):
    """And all tokens of the other layers, so that it gives what a job gives."""
    model = tiny(zoo.WINDOWS[1])
    (prompt,) = model.clear_cut_prompts([30], 20)
    tokens = model.transformers(prompt, 20)[0]
    with LLM(str(model.folder), Policy(**RAM), device="cpu", dtype="float32", progress=False) as llm:
        with llm.session(chunk=12) as session:
            assert session.generate(prompt, greedy(8)).token_ids == tokens[:8]
            assert session.generate(tokens[8:13], greedy(7)).token_ids == tokens[13:]


def test_a_stream_goes_far_past_the_positions(tmp_path):
    """Five times as far, where it still matches the oracle."""
    model = zoo.build("qwen3", tmp_path, max_position_embeddings=32)
    turns = [(35, 5)] * 3 + [(3, 9)]
    expected = Expected.clear(model, 16, turns=turns)
    with opened(model) as llm, llm.session(chunk=16) as session:
        turns_of(session, expected, turns)
        assert session.lengths() > 5 * llm.spec.positions


@pytest.fixture(scope="module")
def streams(tiny):
    return [Expected.clear(tiny("llama"), HEAVY + RECENT + 1, seed) for seed in range(4)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_streams_of_one_block_give_what_each_gives_alone(tiny, streams, policy):
    """With other lengths, in other turns; an idle stream does not change."""
    model = tiny("llama")
    begins = [0, 2, 0, 1]  # the turn of the block in which a stream has its first one
    with opened(model, **policy) as llm, llm.session(count=4, chunk=HEAVY + RECENT + 1) as session:
        for turn in range(len(TURNS) + max(begins)):
            own = [turn - begin if 0 <= turn - begin < len(TURNS) else None for begin in begins]
            texts = [None if n is None else e.texts[n] for n, e in zip(own, streams)]
            params = [greedy(1 if n is None else TURNS[n][1]) for n in own]
            outputs = session.generate(texts, params)
            expected = [None if n is None else e.outputs[n] for n, e in zip(own, streams)]
            assert [output and output.token_ids for output in outputs] == expected
        few = [streams[0].texts[-1], None, None, streams[3].texts[-1]]
        found = session.feed(few)
        assert found[1] is found[2] is None
        for n in (0, 3):
            assert found[n] == pytest.approx(streams[n].logprobs, abs=1e-4)


def test_sampled_texts_do_not_depend_on_how_they_are_cut_or_placed(tiny):
    model = tiny("llama")
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=7)
    texts = model.prompts([20, 9])

    def sampled(policy, **session):
        with opened(model, **policy) as llm, llm.session(count=2, **session) as found:
            first = [o.token_ids for o in found.generate(texts, params)]
            return first, [o.token_ids for o in found.generate(["", ""], params)]

    first, second = sampled(RAM)
    assert first != second and first[0] != first[1]
    assert sampled(DISK) == (first, second)


def test_a_prompt_that_fits_is_what_generate_makes_of_it(tiny):
    """With a cache that holds all of it, and positions that do not roll."""
    model = tiny("llama")
    (prompt,) = model.clear_cut_prompts([40], 20)
    with LLM(str(model.folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        expected = llm.generate([prompt], greedy(20))[0].outputs[0]
        with llm.session() as session:
            assert session.generate(prompt, greedy(20)).token_ids == expected.token_ids
            with pytest.raises(UserError, match="more than the model's 128 positions"):
                session.generate([5] * 60, greedy(20))


def test_generate_rolls_too(tiny):
    """The prompt of a job in one chunk, and then step by step."""
    model = tiny("gpt_neox")
    expected = Expected.clear(model, 100, turns=[(40, 30)])
    budget = KVBudget(hh_size=HEAVY, recent_size=RECENT, rule="smoothed", position_rolling=True)
    for policy in (RAM, DISK):
        with LLM(str(model.folder), Policy(**policy), budget, device="cpu", dtype="float32", progress=False) as llm:
            (output,) = llm.generate([expected.texts[0]], greedy(30))
            assert output.outputs[0].token_ids == expected.outputs[0]
            assert llm.report["kv_budget"]["position_rolling"] is True


def test_memory_stays_flat(tiny):
    """Over the same number of tokens again and again, including caches, which are outside Python's heap."""
    model = tiny("llama")
    (text,) = model.prompts([600])
    with opened(model, **DISK) as llm, llm.session(chunk=64) as session:
        session.feed(text)
        disk = llm.runner.transport.disk_bytes()
        before = memory.resident()
        for _ in range(3):
            session.feed(text)
        assert llm.runner.transport.disk_bytes() == disk > 0
        assert memory.resident() < before + (4 << 20)


# conversations


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The prompt tokens that streams have been fed."""
    tokens = []
    run = Streams._run

    def noted(self, prompts, *args):
        for prompt in prompts.values():
            tokens.extend(prompt)
        return run(self, prompts, *args)

    monkeypatch.setattr(Streams, "_run", noted)
    return tokens


def test_chat_reads_only_the_new_part_of_a_conversation(talker, read):
    """The end of the previous answer, the question, and the beginning of the next answer, which is empty here."""
    pieces = []
    tell = lambda stream, piece: pieces.append((stream, piece))
    with LLM(str(talker), Policy(), device="cpu", dtype="float32", progress=False) as llm, llm.session() as session:
        for n, question in enumerate(["What is a list?", "And a\ntuple?", "Why?"]):
            answer = session.chat(question, greedy(6), tell)
            assert "".join(piece for _, piece in pieces) == answer and pieces[0][0] == 0
            # from the second question on, the last token of the answer comes first
            assert llm.tokenizer.decode(read[1:] if n else read) == ("\n" if n else "") + f"user: {question}\n"
            read.clear()
            pieces.clear()


def test_the_demo_model_chats(demo_home, read, monkeypatch):
    """Its answers end as in its template, so that tokens can be compared."""
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(demo_home))
    questions = ["What is the capital of France?", "And of Spain?"]
    messages = []
    options = dict(device="cpu", dtype="float32", progress=False)
    with LLM(None, Policy(4), KVBudget.from_size(100), **options) as demo, demo.session() as session:
        for question in questions:
            answer = session.chat(question, SamplingParams(max_tokens=40))
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            read.extend(demo.tokenizer(answer, add_special_tokens=False)["input_ids"])
    text = demo.tokenizer.apply_chat_template(messages, tokenize=False)
    assert demo.tokenizer.decode(read) + "<|im_end|>\n" == text
    assert "Paris" in messages[1]["content"] and "Madrid" in messages[3]["content"]


def test_conversations_side_by_side(talker):
    turns = [["What is a list?", "Name a colour.", None], [None, "Another one?", "Hello!"]]
    params = greedy(8)
    with LLM(str(talker), Policy(4), device="cpu", dtype="float32", progress=False) as llm:
        with llm.session(count=3) as session:
            found = [session.chat(turn, params) for turn in turns]
        for stream in range(3):
            with llm.session() as session:
                alone = [session.chat(turn[stream], params) for turn in turns if turn[stream] is not None]
            assert [answers[stream] for answers in found if answers[stream] is not None] == alone


# errors


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("opt", {}, "needs RoPE: opt's positions are in its embeddings"),
        ("llama_groups_of_8_dynamic", {}, "dynamic depends on the length of the text"),
        ("llama_longrope", {}, "longrope depends on the length of the text"),
        ("llama", dict(count=0), "`count` must be a whole number"),
        ("llama", dict(chunk=2.5), "`chunk` must be a whole number"),
        ("llama", dict(kv_budget=KVBudget.from_ratio(0.2)), "is in slots"),
        ("llama", dict(kv_budget=KVBudget.from_size(8, rule="mean:layers=LAYERS")), "which a stream lacks"),
        ("llama", dict(kv_budget=KVBudget.from_size(64)), "128 slots leave no room for new tokens in the model's 128"),
    ],
)
def test_a_session_that_cannot_be(tiny, name, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("LAYERS").write_text('{"budgets": [0.1, 0.5], "losses": [[1, 0], [2, 0]]}')
    with opened(tiny(name)) as llm, pytest.raises(UserError, match=message):
        llm.session(**options)


def test_a_full_cache_cannot_roll(tiny):
    with LLM(str(tiny("llama").folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match="`position_rolling` needs a KV budget"):
            llm.session(position_rolling=True)


@pytest.mark.parametrize("policy, count", [(Policy(**RAM), 10**18), ("auto", 10**9)])
def test_more_streams_than_any_machine_holds(tiny, policy, count):
    with opened(tiny("llama")) as llm, pytest.raises(PlanError, match=f"`count`: {count} streams need more than"):
        llm.policy = policy
        llm.session(count=count)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s: s.feed([]), "the prompt is empty"),
        (lambda s: s.feed([5, 960]), "token ids are whole numbers below 96"),
        (lambda s: s.feed(5), "not int"),
        (lambda s: s.feed(None), "not NoneType"),
        (lambda s: s.feed([{"role": "user", "content": "a"}]), "messages are for `chat`"),
        (lambda s: s.feed("text"), "no tokenizer"),
        (lambda s: s.chat("text"), "no tokenizer"),
        (lambda s: s.generate([5], [GREEDY, GREEDY]), "`sampling_params` has 2 for 1"),
        (lambda s: s.generate([5], SamplingParams(stop="a")), "`stop` needs a tokenizer"),
    ],
)
def test_bad_input_changes_nothing(tiny, call, message):
    model = tiny("llama")
    with opened(model) as llm, llm.session() as session:
        (text,) = model.prompts([30])
        before = session.feed(text[:20])
        with pytest.raises(UserError, match=message):
            call(session)
        after = session.feed(text[20:])
        with llm.session() as other:
            assert (other.feed(text[:20]), other.feed(text[20:])) == (before, after)


def test_several_streams_need_a_list_with_an_entry_for_each(tiny):
    with opened(tiny("llama")) as llm, llm.session(count=2) as session:
        for given in ([[5]], [5, 6, 7], "text", None):
            with pytest.raises(UserError, match="2 streams: give a list"):
                session.feed(given)
        assert session.feed([None, None]) == session.generate([None, None]) == [None, None]
        with pytest.raises(UserError, match="the prompt is empty"):
            session.generate([[], []])


def test_a_session_that_has_ended_says_why(tiny):
    model = tiny("llama")
    with opened(model) as llm:
        session = llm.session()
        session.feed([5, 6])
        llm.generate([[5, 6]], GREEDY)
        with pytest.raises(UserError, match="has ended .another job of its model began.: begin a new one"):
            session.feed([5])
        first = llm.session()
        second = llm.session()
        with pytest.raises(UserError, match="has ended .the next session of its model began"):
            first.feed([5])
        first.close()
        second.feed([5, 6])
        second.close()
        with pytest.raises(UserError, match="has ended .it was closed"):
            second.generate([5], GREEDY)
        third = llm.session()
    with pytest.raises(UserError, match="has ended .its model was closed"):
        third.feed([5])


@pytest.mark.parametrize("error, policy", [(KeyboardInterrupt, DISK), (UserError, RAM), (RuntimeError, DISK)])
def test_an_error_or_an_interrupt_within_a_turn_ends_the_session(tiny, monkeypatch, error, policy):
    model = tiny("llama")
    (text,) = model.prompts([30])
    with opened(model, **policy) as llm:
        session = llm.session(chunk=8)
        session.feed(text)

        def fail(*args):
            raise error("by this test")

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr("h2o_flexgen.engine.step.Walk._piece", fail)
            session.generate(text, GREEDY)
        with pytest.raises(UserError, match="has ended .an error or an interrupt ended it"):
            session.feed(text)
        again = llm.session(chunk=8)
        assert len(again.feed(text)) == 29


def test_a_stream_with_nan_ends_the_session(tiny, monkeypatch):
    model = tiny("llama")
    with opened(model) as llm:
        session = llm.session(count=2)
        nan = lambda spec, w, hidden: torch.full((len(hidden), spec.vocab), float("nan"))
        with monkeypatch.context() as patch, pytest.raises(UserError, match="stream 1: .* overflowed"):
            patch.setattr("h2o_flexgen.models.llama.logits", nan)
            session.feed([None, [5, 6, 7]])
        with pytest.raises(UserError, match="has ended"):
            session.feed([[5], None])

"""Numbers hidden in passages: whether a model still finds them.

Sentences such as "The secret number of Oslo is 48213." stand at five depths of a passage, from its beginning to its
end, and the model completes "The secret number of Oslo is". One number is asked for behind the passage, or in front of
it; of five numbers the first is asked for behind the passage, in the prompt, and the others in turn, when the cache has
been cut to its budget without regard to them.
"""

from __future__ import annotations

from random import Random

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.outputs import ScoreOutput
from h2o_flexgen.engine.scoring import question_of
from h2o_flexgen.evaluation.asking import asks, fitted, following, prompt
from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.trials import Span, Trial, is_right

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CITIES = "Oslo Rome Lima Cairo Paris Tokyo Delhi Dublin Vienna Lisbon Prague Madrid Athens Boston Sydney".split()

BEHIND = "asked behind"
IN_FRONT = "asked in front"
FIRST = "of 5, the first"
LATER = "of 5, the others"


def trials_of(model: LoadedModel, passage: Passage, index: int) -> list[Trial]:
    """One number asked for behind the passage and one in front, at a depth that changes from passage to passage, and
    five numbers. Raises UserError if the passage leaves no room for them."""
    random = Random(index)
    cities = random.sample(CITIES, len(DEPTHS))
    numbers = {city: str(random.randrange(10_000, 100_000)) for city in cities}
    at = dict(zip(DEPTHS, cities))
    alone = DEPTHS[index % len(DEPTHS)]
    one = {alone: at[alone]}
    return [
        _trial(model, passage, index, one, numbers, in_front=False),
        _trial(model, passage, index, one, numbers, in_front=True),
        _trial(model, passage, index, at, numbers, in_front=False),
    ]


def _trial(
    model: LoadedModel, passage: Passage, index: int, at: dict[float, str], numbers: dict[str, str], in_front: bool
) -> Trial:
    """A passage with the numbers of cities `at` depths, which are asked for in random order."""
    cities = Random(index).sample([*at.values()], len(at))
    sentences = {depth: f"{_begun(city)} {numbers[city]}." for depth, city in at.items()}
    ask = lambda text: prompt(model, asks(text, _question(cities[0]), in_front), _begun(cities[0]))
    text = hidden(fitted(model, passage, ask("\n".join(sentences.values()))), sentences)
    question = question_of(model, ask(text), [f" {numbers[cities[0]]}"])
    ids = question.prompt + question.token_ids[0]
    first = (IN_FRONT if in_front else BEHIND) if len(at) == 1 else FIRST
    spans = [Span(first, len(question.prompt), len(ids))]
    for city in cities[1:]:
        ids += model.encode(".", begins=False) + following(model, _question(city), _begun(city))
        answer = model.encode(f" {numbers[city]}", begins=False)
        spans.append(Span(LATER, len(ids), len(ids) + len(answer)))
        ids += answer
    model.spec.check_length(len(ids))
    return Trial(ids, len(question.prompt), spans, index)


def _begun(city: str) -> str:
    return f"The secret number of {city} is"


def _question(city: str) -> str:
    return f"What is the secret number of {city}?"


def hidden(text: str, sentences: dict[float, str]) -> str:
    """A text with sentences on lines of their own, each behind the word at its depth in [0, 1]."""
    parts = []
    done = 0
    for depth, sentence in sorted(sentences.items()):
        space = text.find(" ", int(depth * len(text)))
        cut = 0 if depth == 0 else len(text) if space < 0 else space
        parts += [text[done:cut].strip(), sentence]
        done = cut
    return "\n".join(filter(None, [*parts, text[done:].strip()]))


def judge(trials: list[Trial], scores: list[ScoreOutput]) -> dict[str, list[float]]:
    """The fraction of numbers found, of each passage."""
    found: dict[str, list[float]] = {}
    for trial, score in zip(trials, scores, strict=True):
        for column in dict.fromkeys(span.column for span in trial.answers):
            rights = [all(is_right(score, span)) for span in trial.answers if span.column == column]
            found.setdefault(column, []).append(sum(rights) / len(rights))
    return found

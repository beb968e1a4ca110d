"""Judge: a language model scores replies: one by one, by a rubric, or in comparison.

All three also take the options of Asker. A judge whose model sees is shown the pictures of the
conversation where they stand in it. An answer that cannot be read gives no reward
(`judge`), or 0 (`rubric`, `ruler`), and `judge_success` 0 in the metrics.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from trireme.config.options import fitting_options
from trireme.ext.external_model.asker import Asker
from trireme.log import get_logger
from trireme.pictures import Picture, content_text, digest_in, is_picture, media_type
from trireme.registry import did_you_mean
from trireme.rewards.orm import ORM, Unscored, Value
from trireme.text import from_json

logger = get_logger("explorer")

PROMPT = """Judge the last reply of this conversation. {reference}
Answer with one number from 0 (useless) to 1 (perfect), and nothing else.

{dialogue}"""
RULER = """Several replies to one conversation follow. Compare them with each other. {reference}
Give each a score from 0 to 1: the better a reply reaches what was asked for, the higher. Replies
that are better than others must have higher scores, small differences small distances.

<conversation>
{prompt}
</conversation>

{candidates}

You may reason briefly. End with one JSON list of {count} scores, in the order of the replies."""
RUBRIC = """Rate the reply from 1 to 10 by how well it meets all criteria together. A criterion
counts as much as its weight; a reply that misses several must be rated low.

<prompt>
{prompt}
</prompt>
<reply>
{reply}
</reply>
<criteria>
{criteria}
</criteria>

Answer with JSON: {{"rating": <a whole number from 1 to 10>}}"""
_NUMERAL = r"(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
_NUMBER = re.compile(
    rf"(?P<minus>[-\u2212])?(?P<number>{_NUMERAL})"
    rf"(?:\s*(?:/|out\s+of\b)\s*(?P<of>{_NUMERAL})|(?P<percent>\s*%)"
    r"|(?P<other>,\d|\s*(?:/|(?:out\s+)?of\b|stars?\b)))?",
    re.IGNORECASE,
)
"""A number with its scale (`/10`, `out of 10`, `%`), or with a sign of one that is not known: a
minus before it, `stars` after.
"""
_LABEL = re.compile(r"[^\d:=]*[:=]")
"""What may stand before a number on its line, such as `Score:`."""
_said: set[str] = set()
_UNREAD = {"judge_success": 0.0}
_LIST = re.compile(r"\[[^\[\]]*\]")
_OBJECT = re.compile(r"\{[^{}]*\}")
_MARK = re.compile(r"\[image ([0-9a-f]{64})\]")
"""Stands in a question's text where a picture goes; no model knows the digest of what it sees."""
Pictures = Mapping[str, Picture]
"""Pictures by digest."""


class Asking(ORM):
    """A reward that asks a model; unknown options are passed to the Asker."""

    prompt: ClassVar[str]
    subjects: ClassVar[tuple[str, ...]]
    """What a question may show; it has to show the first, which is judged."""

    def __init__(
        self, prompt: str | None = None, pictures: bool | None = None, **model: Any
    ) -> None:
        """`prompt` is the question, with its subjects in braces. `pictures`: whether the model is
        shown those of the conversation; None: unless it is known to read text alone. Raises
        ValueError for another subject in it, and if what is judged is not.
        """
        self._shows = pictures
        self._prompt = self.prompt if prompt is None else prompt
        _refuse_question(self._prompt, self.subjects)
        self._asker = Asker(**fitting_options("a judge", Asker, model))

    @property
    def auxiliary(self) -> int | None:
        """The index of the auxiliary model that judges; None if it is an endpoint."""
        return self._asker.auxiliary

    def examine(self) -> None:
        """Raise ValueError if the model's endpoint does not answer."""
        self._asker.examine()

    def _seen(self, pictures: Pictures, models: Sequence[Any]) -> Pictures:
        """Return the pictures that the model is shown: all, or none."""
        shows = self._asker.sees(models) if self._shows is None else self._shows
        return pictures if shows else {}

    async def _answer(self, question: str, seen: Pictures, models: Sequence[Any]) -> str:
        content = with_pictures(question, seen)
        return await self._asker.ask([{"role": "user", "content": content}], models)


class ModelJudge(Asking):
    """A number from 0 to 1 for each dialogue. `prompt` may use {dialogue} and {reference}."""

    prompt = PROMPT
    subjects = ("dialogue", "reference")

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[Value | Unscored]:
        """Score each completion by the judge's model."""
        truths = kwargs.get("solution") or [None] * len(completions)
        models = kwargs.get("auxiliary_models", ())
        asked = zip(kwargs["messages"], _pictures_of(kwargs), truths, strict=True)
        return list(await asyncio.gather(*(self._ask(*question, models) for question in asked)))

    async def _ask(
        self, messages: Any, pictures: Pictures, truth: Any, models: Sequence[Any]
    ) -> Value | Unscored:
        seen = self._seen(pictures, models)
        text = self._prompt.format(dialogue=_dialogue(messages, seen), reference=_reference(truth))
        answer = await self._answer(text, seen, models)
        if (score := read_score(answer)) is None:
            expected = "expected one number from 0 to 1, or with its scale, such as 8/10 or 80%"
            return Unscored(f"it answered {answer[:80]!r}: {expected}", _UNREAD)
        return Value(score, {"judge_success": 1.0})


class RelativeJudge(Asking):
    """Scores from 0 to 1 for all rollouts of a task, by one question that compares them.

    Equal replies are shown once and have one score. (RULER: relative scores are easier than
    absolute ones, and the advantage is relative anyway.) `prompt` may use {prompt}, {candidates},
    {count} and {reference}.
    """

    prompt = RULER
    subjects = ("candidates", "prompt", "count", "reference")

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[Value | None]:
        """Score the completions of one prompt by comparing them."""
        dialogues = kwargs["messages"]
        shared = _shared(dialogues)
        models = kwargs.get("auxiliary_models", ())
        pictures = {d: p for shown in _pictures_of(kwargs) for d, p in shown.items()}
        seen = self._seen(pictures, models)
        replies = [_dialogue(messages[shared:], seen) for messages in dialogues]
        shown = list(dict.fromkeys(replies))
        truth = (kwargs.get("solution") or [None])[0]
        text = comparison(dialogues[0][:shared], shown, truth, prompt=self._prompt, seen=seen)
        answer = await self._answer(text, seen, models)
        scores = read_scores(answer, len(shown))
        if scores is None:
            _say_unread("ruler", answer, f"a list of {len(shown)} numbers from 0 to 1")
        success = {"judge_success": float(scores is not None)}
        by_reply = dict(zip(shown, scores or [0.0] * len(shown), strict=True))
        return [Value(by_reply[reply], success) for reply in replies]


class RubricJudge(Asking):
    """A rating by weighted criteria, from 0 to 1 (implicit aggregation of arXiv:2507.17746).

    Criteria are the row's column `rubric`: a list of {description, weight}, or of texts.
    """

    prompt = RUBRIC
    subjects = ("reply", "prompt", "criteria")

    def __init__(
        self,
        criteria: Sequence[Any] = (),
        prompt: str | None = None,
        pictures: bool | None = None,
        **model: Any,
    ) -> None:
        """`criteria` are for rows without any; `prompt` may use {prompt}, {reply}, {criteria}."""
        super().__init__(prompt, pictures, **model)
        self._criteria = list(criteria)

    def examine(self, rubric: Sequence[Any] = ()) -> None:
        """Raise ValueError as Asking does, and for a row without criteria that can be shown."""
        super().examine()
        _criteria((rubric[0] if rubric else None) or self._criteria)

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[Value | None]:
        """Score each completion by its row's criteria. Raises ValueError for a row without any."""
        rubrics = kwargs.get("rubric") or [None] * len(completions)
        models = kwargs.get("auxiliary_models", ())
        asked = zip(kwargs["messages"], _pictures_of(kwargs), completions, rubrics, strict=True)
        return list(await asyncio.gather(*(self._ask(*question, models) for question in asked)))

    async def _ask(
        self, messages: Any, pictures: Pictures, reply: str, rubric: Any, models: Sequence[Any]
    ) -> Value:
        seen = self._seen(pictures, models)
        criteria = _criteria(rubric or self._criteria)
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompt = _dialogue(messages[: replies[-1]] if replies else messages, seen)
        text = self._prompt.format(prompt=prompt, reply=reply, criteria=criteria)
        answer = await self._answer(text, seen, models)
        rating = _rating(answer)
        if rating is None:
            _say_unread("rubric", answer, '{"rating": <1 to 10>}')
            return Value(0.0, _UNREAD)
        return Value((rating - 1) / 9, {"judge_success": 1.0})


def _say_unread(judge: str, answer: str, expected: str) -> None:
    """Warn once of each kind of judge: one whose answers are never read would give 0 without
    end.
    """
    if judge not in _said:
        _said.add(judge)
        logger.warning(
            "the judge '%s' answered %r: expected %s; the replies score 0, and so will those of "
            "further such answers, without a warning (metric judge_success)",
            *(judge, answer[:80], expected),
        )


def _refuse_question(question: str, subjects: Sequence[str]) -> None:
    shown = ", ".join(f"{{{name}}}" for name in subjects)
    try:
        named = [name for _, name, *_ in string.Formatter().parse(question) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"the prompt of a judge is no text with {shown}: {error}; a brace itself is doubled"
        ) from error
    if unknown := [name for name in named if name not in subjects]:
        raise ValueError(
            f"the prompt of a judge has {{{unknown[0]}}}: expected {shown}; a brace itself is "
            'doubled, as in {{"score": 1}}'
        )
    if subjects[0] not in named:
        raise ValueError(
            f"the prompt of a judge lacks {{{subjects[0]}}}, which it judges: expected {shown}"
        )


def seen_text(message: Mapping[str, Any]) -> str:
    """Return a message as a reward model sees it, as text; the log says once that pictures are
    left out.
    """
    content = message.get("content")
    if isinstance(content, list) and any(map(is_picture, content)):
        _warn_of_pictures("a reward model takes text alone")
    return content_text(message)


@cache
def _warn_of_pictures(why: str) -> None:
    logger.warning(
        "a conversation that is judged shows pictures, and [image] stands in their place: %s", why
    )


def _pictures_of(columns: Mapping[str, Any]) -> Sequence[Pictures]:
    """Return the pictures of each rollout's messages."""
    return columns.get("message_pictures") or [{}] * len(columns["messages"])


def _dialogue(messages: Sequence[Mapping[str, Any]], seen: Pictures) -> str:
    """Return a conversation as text, with a mark for each picture that is seen."""
    return "\n\n".join(f"{m['role']}: {content_text(m, _mark(seen))}" for m in messages)


def _mark(seen: Pictures) -> Callable[[Mapping[str, Any]], str]:
    def mark(part: Mapping[str, Any]) -> str:
        if (digest := digest_in(part)) in seen:
            return f"[image {digest}]"
        _warn_of_pictures("the judge's model takes text alone, or has the option pictures: false")
        return "[image]"

    return mark


def with_pictures(question: str, seen: Pictures) -> str | list[dict[str, Any]]:
    """Return a message's content: the question, in parts if it has marks of pictures."""
    pieces = _MARK.split(question)  # digests are every second one
    if not seen or not any(digest in seen for digest in pieces[1::2]):
        return question
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        if number % 2 and piece in seen:
            parts.append(_openai_part(seen[piece]))
        elif text := f"[image {piece}]" if number % 2 else piece:
            parts.append({"type": "text", "text": text})
    return parts


def _openai_part(picture: Picture) -> dict[str, Any]:
    """Return a content's part that shows a picture, as OpenAI's chat completions have it."""
    kind = media_type(picture.data) or "application/octet-stream"
    data = base64.b64encode(picture.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _reference(truth: Any) -> str:
    return "" if truth is None else f"The reference answer is: {truth}"


def _shared(dialogues: Sequence[Sequence[Any]]) -> int:
    """Count the messages that all dialogues have in common, up to the first reply."""
    first = dialogues[0]
    end = next((i for i, m in enumerate(first) if m["role"] == "assistant"), len(first))
    return next(
        (i for i in range(end) if any(list(d[i : i + 1]) != [first[i]] for d in dialogues)), end
    )


def comparison(
    conversation: Sequence[Any],
    replies: Sequence[str],
    truth: Any = None,
    *,
    prompt: str = RULER,
    seen: Pictures | None = None,
) -> str:
    """Return the question which of several replies to a conversation are better; with a mark for
    each picture that is `seen`.
    """
    candidates = "\n\n".join(
        f'<reply number="{i}">\n{text}\n</reply>' for i, text in enumerate(replies, 1)
    )
    return prompt.format(
        prompt=_dialogue(conversation, seen or {}),
        candidates=candidates,
        count=len(replies),
        reference=_reference(truth),
    )


def read_score(answer: str) -> float | None:
    """Return the score from 0 to 1 that an answer states, see `_stated`; None if there is none.

    With a scale it is the share of it: `8/10` and `80%` are 0.8. A larger number without one is
    None.
    """
    number, most = _stated(answer) or (-1.0, None)
    score = number / (most or 1.0)
    return score if 0 <= score <= 1 else None


def _stated(answer: str) -> tuple[float, float | None] | None:
    """Return the number that an answer states and the scale after it, if it has one: the only
    number, else the only one on a line of its own. None if there is none, or its scale is unknown.
    """
    stated = {_number(match) for match in _NUMBER.finditer(answer)}
    if len(stated) > 1:
        lines = (_LABEL.sub("", line, count=1).strip(" *_`#") for line in answer.splitlines())
        alone = (_NUMBER.fullmatch(line.removesuffix(".")) for line in lines)
        stated = {_number(match) for match in alone if match}
    return stated.pop() if len(stated) == 1 else None


def _number(match: re.Match[str]) -> tuple[float, float | None] | None:
    """Return a number and its scale; None for one of an unknown scale."""
    most = 100.0 if match["percent"] else float(match["of"]) if match["of"] else None
    if match["minus"] or match["other"] or most == 0:
        return None
    return float(match["number"]), most


def read_scores(answer: str, count: int) -> list[float] | None:
    """Return the last list of `count` numbers in an answer; None if it is not of numbers from 0
    to 1: cut, `[8, 6]` would be no comparison.
    """
    for text in reversed(_LIST.findall(answer)):
        try:
            parsed = json.loads(text)
        except ValueError:
            continue
        numbers = [x for x in parsed if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) == len(parsed) == count:
            return [float(n) for n in numbers] if all(0 <= n <= 1 for n in numbers) else None
    return None


def _rating(answer: str) -> float | None:
    """Return the rating from 1 to 10 of an answer: the last `rating` in its JSON, else the number
    that the text states, without a scale or out of 10.
    """
    number, most = _stated(_rated(answer)) or (0.0, None)
    return number if 1 <= number <= 10 and most in (None, 10) else None


def _rated(answer: str) -> str:
    """Return the last `rating` in an answer's JSON as text; the answer itself without one."""
    for text in reversed(_OBJECT.findall(answer)):
        try:
            rated = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if "rating" in rated:
            return str(rated["rating"])
    return answer


def _criteria(rubric: Any) -> str:
    why = ""
    try:
        criteria = from_json(rubric) if isinstance(rubric, str) else rubric
    except ValueError as error:
        criteria, why = None, f" ({error})"
    if not isinstance(criteria, list) or not criteria:
        raise ValueError(
            "the rubric judge needs criteria: the row's column 'rubric', a list of texts or of "
            f"{{description, weight}}, or its option `criteria`; it got {rubric!r:.60}{why}"
        )
    lines, weights = [], []
    for number, item in enumerate(criteria, 1):
        item = item if isinstance(item, Mapping) else {"description": item}
        for key in ("description", "weight"):
            near = [name for name in item if did_you_mean(str(name), [key])]
            if key not in item and near:
                raise ValueError(
                    f"criterion {number} of the rubric has '{near[0]}'; did you mean '{key}'?"
                )
        if not isinstance(item.get("description"), str):
            raise ValueError(f"a criterion of the rubric must have a description: {item!r:.60}")
        weight = item.get("weight")
        number_or_word = isinstance(weight, int | float | str | None) and weight == weight
        if not number_or_word or isinstance(weight, bool) or weight in (math.inf, -math.inf):
            raise ValueError(
                f"the weight of criterion {number} of the rubric is {weight!r:.60}: expected a "
                "number, or a word such as Essential"
            )
        weights.append(weight)
        weight_text = "" if weight is None else f" (weight {weight})"
        lines.append(f"{number}.{weight_text} {item['description']}")
    if all(weight == 0 for weight in weights):
        raise ValueError("the weights of the rubric's criteria are all 0: expected one that is not")
    return "\n".join(lines)

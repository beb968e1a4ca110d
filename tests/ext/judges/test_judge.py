"""Judges: models behind a real OpenAI-compatible server, or of this run, judge replies."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.limits import HANG_S
from tests.tiny import make_tokenizer
from trireme.engines.scripted import ScriptedEngine
from trireme.ext.external_model.asker import Asker
from trireme.ext.judges import judge as judge_module
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.pictures import Picture
from trireme.rewards.grouped import Judge, Row
from trireme.task import Task
from trireme.workflows.single_turn import OnPolicyDistillWorkflow, SimpleWorkflow

QUESTION = {"role": "user", "content": "1+1?"}
TASK = Task(raw_task={"question": "1+1?", "solution": "2"})


class Said:
    """An auxiliary model that answers in order, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        tokenizer = make_tokenizer()
        engine = ScriptedEngine(self._answer, tokenizer=tokenizer)
        self.model = Model(engine, ChatTokens(tokenizer), max_model_len=8192, model_path="m")

    def _answer(self, prompt: str) -> str:
        self.asked.append(prompt)
        return self.answers.pop(0)


def rows(texts: list[str]) -> list[Row]:
    return [Row(text, [QUESTION, {"role": "assistant", "content": text}]) for text in texts]


def rewards(reward: Any, said: Said, texts: list[str], task: Task = TASK) -> Any:
    """Totals and parts."""
    given = {"concurrency": 1} | (reward if isinstance(reward, dict) else {"name": reward})
    return asyncio.run(Judge.of([given]).rewards(task, rows(texts), [said.model]))


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What we log: asyncio reports a client that an earlier test has left open."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("trireme")]


def over_http(said: list[str], texts: list[str]) -> list[float | None]:
    from tests.ext.http.made import on_port, rollouts_over

    async def go() -> list[float | None]:
        tokenizer = make_tokenizer()
        rollouts = rollouts_over(
            ScriptedEngine(said, tokenizer=tokenizer), tokenizer, max_model_len=4096
        )
        async with on_port(rollouts) as url:
            options = {"name": "judge", "base_url": f"{url}/v1", "model": "m", "concurrency": 1}
            return (await Judge.of([options]).rewards(TASK, rows(texts)))[0]

    return asyncio.run(go())


@pytest.mark.extension("http")
def test_the_number_that_it_says_is_the_reward() -> None:
    assert over_http(["0.75", "it is 1"], ["2", "3"]) == [0.75, 1.0]


@pytest.mark.extension("http")
@pytest.mark.parametrize("answer", ["good", "8"])
def test_a_judge_that_says_no_number_from_0_to_1_does_not_apply(answer: str) -> None:
    with pytest.raises(ValueError, match="no reward function applies to rollout 0"):
        over_http([answer], ["2"])


@pytest.mark.parametrize(
    "answer", ["7.", "**7**", "12/10", "3/0", "1 of 5", "1 star", "0,8", "-0.5", "1/2/2030"]
)
def test_a_number_of_an_unknown_scale_is_no_reward(answer: str) -> None:
    with pytest.raises(ValueError, match="judge gave None") as raised:
        rewards("judge", Said(answer), ["2"])
    assert f"it answered '{answer}': expected one number from 0 to 1" in str(raised.value)


@pytest.mark.parametrize(
    "answer", ["There is 1 mistake, so 0.3", "Between 0 and 1, I give 0.7", "0.2\n\n0.9"]
)
def test_of_several_numbers_none_is_the_reward_unless_one_stands_alone(answer: str) -> None:
    with pytest.raises(ValueError, match="expected one number from 0 to 1"):
        rewards("judge", Said(answer), ["2"])


def test_thinking_that_was_cut_off_is_no_answer() -> None:
    with pytest.raises(ValueError, match="it answered ''"):
        rewards("judge", Said("<think>The reply has 1 error, so"), ["2"])
    _, metrics = rewards("ruler", Said("<think>maybe [0.1, 0.9] or"), ["2", "3"])
    assert metrics[0]["judge_success"] == 0.0


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ('Answer {"score": x}. {dialogue}', r"has \{\"score\"\}.* a brace itself is doubled"),
        ("{dialogue} {criterion}", r"has \{criterion\}: expected \{dialogue\}, \{reference\}"),
        ("Is it good?", r"lacks \{dialogue\}, which it judges"),
        ("{dialogue", "expected '}'"),
    ],
)
def test_a_question_without_its_subject_is_refused_when_it_is_made(prompt: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Judge.of([{"name": "judge", "prompt": prompt}])


def test_numbers_that_no_request_can_have_are_refused_when_a_judge_is_made() -> None:
    for name in ("concurrency", "timeout", "max_tokens"):
        with pytest.raises(ValueError, match=f"{name}.* 0"):
            Judge.of([{"name": "judge", name: 0}])


def test_what_a_judge_answers_is_shown_by_its_beginning() -> None:
    with pytest.raises(ValueError, match=r"gave None \(it answered 'I +cannot say x{60,80}': ex"):
        rewards("judge", Said("I cannot say " + "x" * 500), ["2"])


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        *(("**0.7**", 0.7), ("Score: .5.", 0.5), ("- 1", 1.0), ("1\n\nGood.", 1.0)),
        *(("1e-1", 0.1), ("0.7. Yes, 0.70.", 0.7), ("0.8\n\nIt makes 2 points.", 0.8)),
        *(("0.8/1", 0.8), ("**8 / 10**.", 0.8), ("Score: 4 out of 5", 0.8), ("80%", 0.8)),
        *(("4/5 stars", 0.8), ("1/10", 0.1), ("2 mistakes.\n\nScore: 8/10", 0.8)),
        *(("1. Right.\n2. Short.\n\n**Score:** 0.3.", 0.3), ("<think>1 error</think>0.5", 0.5)),
    ],
)
def test_a_number_from_0_to_1_is_the_reward(answer: str, reward: float) -> None:
    assert rewards("judge", Said(answer), ["2"])[0] == [reward]


def test_an_auxiliary_model_judges_and_equal_dialogues_are_asked_once() -> None:
    said = Said("<think>0.1? no</think>0.5", "0.25")
    totals, parts = rewards("judge", said, ["2", "3", "2"])
    assert totals == [0.5, 0.25, 0.5]
    assert parts[0] == {"rewards/judge": 0.5, "judge_success": 1.0}
    assert len(said.asked) == 2 and "The reference answer is: 2" in said.asked[0]


SHOWN = {
    "role": "user",
    "content": [{"type": "image", "image": "sha256:1"}, {"type": "text", "text": "What?"}],
}


@pytest.mark.parametrize("name", ["judge", "ruler", "rubric"])
def test_a_picture_is_named_to_a_judge_that_reads_text(name: str) -> None:
    said = Said("[0.5, 0.25]" if name == "ruler" else "0.5", "0.25")
    judged = [Row(text, [SHOWN, {"role": "assistant", "content": text}]) for text in "ab"]
    judge = Judge.of([{"name": name, "concurrency": 1}])
    task = Task(raw_task={"rubric": ["is short"]})
    asyncio.run(judge.rewards(task, judged, [said.model]))
    assert all("user: [image]What?" in asked for asked in said.asked)


PICTURE = Picture(b"\x89PNG", "ab" * 32, tokens=1, grid=(1, 2, 2))
SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
WRITTEN = {"role": "assistant", "content": f"It is [image {'cd' * 32}] and [image]."}


class Shown:
    """A model on another server, which keeps the contents that it was asked."""

    model_path = "judge"

    def __init__(self, answer: str) -> None:
        self.answer, self.asked = answer, list[Any]()
        completions = SimpleNamespace(create=self._create)
        self._client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
        self._client.model_path, self._client.with_options = "judge", lambda **_: self._client

    def get_openai_async_client(self) -> Any:
        return self._client

    async def _create(self, messages: Any, **_: Any) -> Any:
        self.asked += [message["content"] for message in messages]
        said = SimpleNamespace(message=SimpleNamespace(content=self.answer))
        return SimpleNamespace(choices=[said])


def shown_to(model: Any, name: str, dialogue: Any = None, **options: Any) -> None:
    """Have a conversation with a picture of the prompt and one of a tool judged."""
    content = [{"type": "image", "image": f"sha256:{PICTURE.digest}"}]
    seen = [SHOWN | {"content": [*content, {"type": "text", "text": "What?"}]}]
    seen += [WRITTEN, {"role": "tool", "content": content}, WRITTEN]
    row = Row("It is.", dialogue or seen, pictures={PICTURE.digest: PICTURE})
    judge = Judge.of([{"name": name, **options}])
    task = Task(raw_task={"rubric": ["is short"]})
    asyncio.run(judge.rewards(task, [row], [model]))


@pytest.mark.parametrize("name", ["judge", "ruler", "rubric"])
def test_a_judge_of_another_server_is_shown_pictures_where_they_stand(name: str) -> None:
    """Also those of tools; what a reply writes in the form of a mark is text."""
    model = Shown({"judge": "0.5", "ruler": "[0.5]", "rubric": '{"rating": 5}'}[name])
    shown_to(model, name)
    [content] = model.asked
    assert content.count(SEEN) == 2
    first = content.index(SEEN)
    assert content[first - 1]["text"].endswith("user: ")
    assert content[first + 1]["text"].startswith("What?")
    text = "".join(part.get("text", "") for part in content)
    assert f"[image {'cd' * 32}] and [image]." in text and "tool: " in text


def test_a_judge_that_is_to_take_text_alone_is_shown_no_pictures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judge_module._warn_of_pictures.cache_clear()
    model, said = Shown("0.5"), Said("0.5")
    shown_to(model, "judge", pictures=False)
    shown_to(said.model, "judge")  # of this run, without a reader of pictures
    [content] = model.asked
    assert "user: [image]What?" in content and "user: [image]What?" in said.asked[0]
    [warned] = ours(caplog)
    assert "[image] stands in their place: the judge's model takes text alone" in warned
    with pytest.raises(RuntimeError, match="a message shows a picture, and this model takes text"):
        shown_to(Said("0.5").model, "judge", pictures=True)


def test_an_api_that_refuses_pictures_is_said_to_take_text_alone() -> None:
    class Refuses(Shown):
        async def _create(self, messages: Any, **_: Any) -> Any:
            error: Any = ValueError("not a multimodal model")
            error.status_code = 400
            raise error

    with pytest.raises(RuntimeError, match=r"multimodal model; it was shown .* pictures: false"):
        shown_to(Refuses("0.5"), "judge")
    with pytest.raises(
        RuntimeError, match=r"the judge judge gave no answer: not a multimodal model$"
    ):
        shown_to(Refuses("0.5"), "judge", [QUESTION, WRITTEN | {"content": "2"}])


def test_that_a_reward_model_sees_no_pictures_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judge_module._warn_of_pictures.cache_clear()
    assert (
        judge_module.seen_text({"role": "user", "content": [{"type": "text", "text": "a"}]}) == "a"
    )
    assert not caplog.records
    for _ in range(2):
        assert judge_module.seen_text(SHOWN) == "[image]What?"
    [record] = caplog.records
    assert "[image] stands in their place: a reward model takes" in record.getMessage()


def test_the_relative_judge_compares_all_replies_in_one_question() -> None:
    said = Said("The first is right: [1, 0]. Or rather [0.9, 0.2]")
    totals, parts = rewards("ruler", said, ["two", "three", "two"])
    assert totals == [0.9, 0.2, 0.9]
    assert parts[1] == {"rewards/ruler": 0.2, "judge_success": 1.0}
    (asked,) = said.asked
    assert asked.count("1+1?") == 1 and "list of 2 scores" in asked
    assert asked.index("assistant: two") < asked.index("assistant: three")


@pytest.mark.parametrize(
    "answer",
    ["all are good", "[1, 2, 3]", "[0.5, true]", "[0.5, NaN]", "[1", "[8, 6]", "[-0.1, 0.5]"],
)
def test_scores_that_cannot_be_read_are_nobodys_advantage(
    answer: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_module, "_said", set())
    for _ in range(2):
        totals, parts = rewards("ruler", Said(answer), ["two", "three"])
        assert totals == [0.0, 0.0] and parts[0]["judge_success"] == 0.0
    [warned] = ours(caplog)
    assert warned.startswith(f"the judge 'ruler' answered {answer!r}: expected a list of 2 numbers")


def test_an_answer_that_is_not_read_counts_also_where_another_reward_applies() -> None:
    judge = Judge.of([{"name": "judge", "concurrency": 1}, "format"])
    given = judge.rewards(TASK, rows(["2", "3"]), [Said("good", "0.5").model])
    totals, parts = asyncio.run(given)
    assert totals == [0.0, 0.5]
    assert [part["judge_success"] for part in parts] == [0.0, 1.0]
    assert "rewards/judge" not in parts[0]


def test_a_rubric_rating_goes_from_0_to_1() -> None:
    rubric = [{"description": "is short", "weight": 2}, "names a number"]
    task = Task(raw_task={"rubric": rubric})
    said = Said('```json\n{"rating": 10}\n```', '{"rating": 4}', '{"rating": 11}')
    totals, parts = rewards("rubric", said, ["a", "b", "c"], task)
    assert totals == [1.0, pytest.approx(1 / 3), 0.0]
    assert [part["judge_success"] for part in parts] == [1.0, 1.0, 0.0]
    assert "1. (weight 2) is short\n2. names a number" in said.asked[0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        *(("Rating: **4**", 1 / 3), ("4/10", 1 / 3), ("4 out of 10.", 1 / 3), ("10", 1.0)),
        *(('{"rating": "4"}', 1 / 3), ('{"rating": "4/10"}', 1 / 3), ("1 mistake\n\n4", 1 / 3)),
    ],
)
def test_a_rating_is_read_without_json_too(answer: str, reward: float) -> None:
    totals, parts = rewards({"name": "rubric", "criteria": ["is kind"]}, Said(answer), ["a"])
    assert totals == [pytest.approx(reward)] and parts[0]["judge_success"] == 1.0


@pytest.mark.parametrize("answer", ["0.8", "4/5", "0", "40%", '{"rating": true}', "8 for 2 errors"])
def test_a_rating_that_is_not_read_is_0_and_is_said_once(
    answer: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_module, "_said", set())
    for _ in range(2):
        asked = {"name": "rubric", "criteria": ["is kind"]}
        totals, parts = rewards(asked, Said(answer), ["a"])
        assert totals == [0.0] and parts[0]["judge_success"] == 0.0
    [warned] = ours(caplog)
    assert "the judge 'rubric' answered" in warned and "score 0" in warned


def test_criteria_come_from_the_row_else_from_the_yaml_else_it_is_said() -> None:
    said = Said('{"rating": 1}')
    assert rewards({"name": "rubric", "criteria": ["is kind"]}, said, ["a"])[0] == [0.0]
    assert "1. is kind" in said.asked[0]
    with pytest.raises(ValueError, match="the row's column 'rubric'"):
        rewards("rubric", Said(), ["a"])
    twice = '[{"description": "a", "weight": 1, "weight": 2}]'
    with pytest.raises(
        ValueError, match=r"it got .*an object has the name 'weight' more than once"
    ):
        rewards("rubric", Said(), ["a"], Task(raw_task={"rubric": twice}))
    for text in ("is polite", '["is polite"', "{}"):  # as JSON, a text has the list
        with pytest.raises(ValueError, match=f"a list of texts .* it got '{re.escape(text)}'"):
            rewards("rubric", Said(), ["a"], Task(raw_task={"rubric": text}))


@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        (
            [{"description": "a", "wieght": 2}],
            "criterion 1 of the rubric has 'wieght'; did .*'weight'",
        ),
        (["a", {"descripton": "a"}], "criterion 2 of the rubric has 'descripton'; did you mean"),
        ([{"description": "a", "weight": True}], "the weight of criterion 1 .* is True: expected"),
        ([{"description": "a", "weight": [2]}], r"is \[2\]: expected a number"),
        ([{"description": "a", "weight": float("nan")}], "is nan: expected a number"),
        ([{"description": "a", "weight": 0}], "criteria are all 0"),
        (None, "the row's column 'rubric'"),
    ],
)
def test_a_rubric_that_cannot_be_shown_is_refused_before_the_run(rubric: Any, said: str) -> None:
    task = Task({"prompt": "?", "rubric": rubric})
    with pytest.raises(ValueError, match=said):
        Judge.of(["rubric"]).examine(task)
    with pytest.raises(ValueError, match=said):
        rewards("rubric", Said(), ["a"], task)


def test_weights_may_be_words_or_negative_and_other_keys_stay() -> None:
    rubric = [
        {"description": "a", "weight": "Essential", "title": "t"},
        {"description": "b", "weight": -1, "title": None},
    ]
    Judge.of(["rubric"]).examine(Task({"prompt": "?", "rubric": rubric}))
    Judge.of([{"name": "rubric", "criteria": ["is kind"]}]).examine(Task({"prompt": "?"}))


def ask(asker: Asker, model: Any, *texts: str) -> list[str]:
    async def go() -> list[str]:
        asked = ([{"role": "user", "content": text}] for text in texts)
        return list(await asyncio.gather(*(asker.ask(messages, [model]) for messages in asked)))

    return asyncio.run(go())


def test_answers_on_disk_outlive_the_process(tmp_path: Path) -> None:
    first, second = Said("yes"), Said()
    folder = str(tmp_path / "answers")
    assert ask(Asker(cache=folder), first.model, "good?") == ["yes"]
    assert ask(Asker(cache=folder), second.model, "good?") == ["yes"]
    (kept,) = (tmp_path / "answers").rglob("*.json")
    assert json.loads(kept.read_text()) == {"answer": "yes"}


@pytest.mark.parametrize("text", ["", '{"answer": "y', "[1]", '{"other": 1}', "\udcff"])
def test_a_damaged_answer_on_disk_is_asked_for_again(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Said("yes"), Said("no")
    folder = str(tmp_path / "answers")
    assert ask(Asker(cache=folder), first.model, "good?") == ["yes"]
    (kept,) = (tmp_path / "answers").rglob("*.json")
    kept.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert ask(Asker(cache=folder), second.model, "good?") == ["no"]
    assert json.loads(kept.read_text()) == {"answer": "no"}
    assert str(kept) in caplog.text


def test_without_a_cache_only_questions_at_one_time_are_shared() -> None:
    said = Said("a", "b")

    async def go() -> list[str]:
        asker = Asker(cache=None)
        asked = [asker.ask([{"role": "user", "content": "good?"}], [said.model]) for _ in range(2)]
        again = [{"role": "user", "content": "good?"}]
        return [*await asyncio.gather(*asked), await asker.ask(again, [said.model])]

    assert asyncio.run(go()) == ["a", "a", "b"]


def test_a_failure_is_not_remembered_and_names_the_judge() -> None:
    async def go() -> None:
        dead = Asker(base_url="http://127.0.0.1:9/v1", model="m", max_retries=0, timeout=HANG_S)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the judge m at http://127.0.0.1:9/v1 gave no"):
                await dead.ask([{"role": "user", "content": "x"}])

    asyncio.run(go())


def test_a_server_that_fails_for_a_while_is_asked_again() -> None:
    async def go() -> tuple[str, int]:
        requests = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal requests
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(size)
            requests += 1
            message = {"role": "assistant", "content": "0.5"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m",
                               "choices": [choice]}).encode()  # fmt: skip
            status = b"503 Busy" if requests < 3 else b"200 OK"
            kind = b"content-type: application/json\r\nconnection: close\r\nretry-after: 0\r\n"
            writer.write(b"HTTP/1.1 " + status + b"\r\n" + kind)
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            asker = Asker(base_url=f"http://127.0.0.1:{port}/v1", model="m", max_retries=3)
            return await asker.ask([{"role": "user", "content": "x"}]), requests

    assert asyncio.run(go()) == ("0.5", 3)


def test_what_a_judge_needs_is_said() -> None:
    with pytest.raises(ValueError, match="a judge by base_url needs the name of its model"):
        Asker(base_url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"asks auxiliary model 0, and .*auxiliary_models has 0"):
        asyncio.run(Judge.of(["judge"]).rewards(TASK, rows(["a"])))
    with pytest.raises(ValueError, match=r"no option 'temprature' .did you mean 'temperature'"):
        Judge.of([{"name": "ruler", "temprature": 1}])


def test_an_endpoint_that_does_not_answer_is_told_before_the_run() -> None:
    dead = {"name": "judge", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    task = Task(raw_task={"prompt": "1+1?"}, reward_fn=[dead])
    with pytest.raises(ValueError, match=r"judge m at http://127\.0\.0\.1:9/v1 does not answer"):
        SimpleWorkflow.examine(task)
    with pytest.raises(ValueError, match="the judge m at nowhere does not answer"):
        Judge.of([dead | {"base_url": "nowhere"}]).examine(Task(raw_task={}))


@pytest.mark.extension("http")
def test_one_that_answers_whatever_it_be_is_good() -> None:
    from tests.ext.http.made import on_port, rollouts_over

    async def go() -> None:
        tokenizer = make_tokenizer()
        engine = ScriptedEngine(["1"], tokenizer=tokenizer)
        async with on_port(rollouts_over(engine, tokenizer, max_model_len=64)) as url:
            alive = {"name": "ruler", "base_url": f"{url}/no/such/path", "model": "m"}
            await asyncio.to_thread(Judge.of([alive]).examine, Task(raw_task={}))

    asyncio.run(go())


def test_a_workflow_without_any_reward_is_told_before_the_run() -> None:
    with pytest.raises(ValueError, match="SimpleWorkflow needs a reward"):
        SimpleWorkflow.examine(Task(raw_task={"prompt": "1+1?"}))
    OnPolicyDistillWorkflow.examine(Task(raw_task={"prompt": "1+1?"}))  # there it only measures


def test_a_question_that_another_gave_up_is_asked_by_those_who_wait_for_its_answer() -> None:
    """The other's model is revoked with its rollout, which nobody else's reward may feel."""
    over, told = asyncio.Event(), "yes"

    def model(answer: Any) -> Any:
        create = SimpleNamespace(completions=SimpleNamespace(create=answer))
        client = SimpleNamespace(chat=create, model_path="judge")
        client.with_options = lambda **_: client
        return SimpleNamespace(get_openai_async_client=lambda: client)

    async def revoked(**_: Any) -> Any:
        await over.wait()
        raise RuntimeError("rollout 1/0/0 is over: its model takes no more calls")

    async def answers(**_: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=told))])

    async def go() -> str:
        asker, messages = Asker(), [{"role": "user", "content": "good?"}]
        first = asyncio.ensure_future(asker.ask(messages, [model(revoked)]))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(asker.ask(messages, [model(answers)])) for _ in range(2)]
        await asyncio.sleep(0)
        over.set()
        with pytest.raises(RuntimeError, match="gave no answer: rollout 1/0/0 is over"):
            await first
        assert await others[1] == told
        return await others[0]

    assert asyncio.run(go()) == told


def test_an_endpoint_that_is_down_is_waited_for_once_by_all_who_ask_the_same() -> None:
    calls = []

    async def fails(**_: Any) -> Any:
        calls.append(1)
        await asyncio.sleep(0)
        raise ConnectionError("nobody is there")

    async def go() -> list[Any]:
        asker = Asker(base_url="http://127.0.0.1:9/v1", model="judge")
        asker._client = SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(create=fails)), model_path="judge"
        )
        asker._client.with_options = lambda **_: asker._client
        messages = [{"role": "user", "content": "good?"}]
        asked = (asker.ask(messages) for _ in range(3))
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(go())
    assert all("gave no answer: nobody is there" in str(error) for error in found)
    assert calls == [1]

"""Sessions over HTTP: who is recorded where, what a reward is for, and what a commit takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.ext.http.agents import Shipped, asks, make_client, make_rollouts
from trireme.ext.http.room import room_of
from trireme.ext.http.sessions import Sessions

CHAT = "v1/chat/completions"
Script = Callable[[httpx.AsyncClient], Awaitable[None]]


def serve(
    script: Script, replies: Any = lambda _: "yes", **options: Any
) -> tuple[Shipped, Sessions]:
    """Run a client's script against a server."""
    wait = options.pop("wait", 0.0)

    async def main() -> tuple[Shipped, Sessions]:
        rollouts, shipped = make_rollouts(replies, wait), Shipped()
        sessions = Sessions(rollouts.session_model, ship=shipped, **options)
        async with make_client(rollouts, sessions) as client:
            await script(client)
        return shipped, sessions

    return asyncio.run(main())


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(f"/{path}", json=body)
    assert response.is_success, response.text
    return response.json()


async def play(client: httpx.AsyncClient, name: str, reward: float, **whose: Any) -> None:
    """A session of one call with its reward."""
    await post(client, f"s/{name}/{CHAT}", **asks("well?"))
    await post(client, "feedback", reward=reward, session_id=name, **whose)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (f"/s/one/{CHAT}", {}),
        (f"/{CHAT}", {"x-session-id": "one"}),
        (f"/{CHAT}", {"authorization": "Bearer session:one"}),
        (f"/{CHAT}", {"authorization": "bearer session:one"}),
    ],
)
def test_a_session_is_a_url_a_header_or_a_key(path: str, headers: dict[str, str]) -> None:
    async def script(client: httpx.AsyncClient) -> None:
        messages = asks("well?")["messages"]
        for _ in range(2):
            reply = await client.post(path, headers=headers, json={"messages": messages})
            assert reply.headers["x-session-id"] == "one"
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "?"}]
        assert await post(client, "feedback", reward=0.5, session_id="one") == {"rewarded": 1}
        assert await post(client, "commit", session_id="one") == {"committed": 1}

    shipped, sessions = serve(script)
    [[experience]] = shipped.commits
    assert (experience.eid.task, experience.reward, len(sessions)) == ("one", 0.5, 0)
    assert experience.response_text is not None and experience.response_text.count("yes") == 2


@pytest.mark.parametrize(
    "name", ["a\rb", "a\nset-cookie: b", "\0", "задача", "\x1b[2J", " a", "a" * 201, "a\x7f"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_name_that_no_header_can_repeat_is_refused_before_anything_is_generated(
    name: str, stream: bool
) -> None:
    async def script(client: httpx.AsyncClient) -> None:
        body = asks("well?") | {"stream": stream}
        path = f"/s/{quote(name, safe='')}/{CHAT}"
        answers = [await client.post(path, json=body)]
        if name.isascii() and not name.startswith(" "):  # a client cannot send others in a header
            headers = [(b"x-session-id", name.encode())]
            answers.append(await client.post(f"/{CHAT}", json=body, headers=headers))
        for answer in answers:
            assert answer.status_code == 400, answer.text
            assert "printable ASCII characters" in answer.json()["error"]["message"]

    _, sessions = serve(script)
    assert len(sessions) == 0


def test_a_session_may_be_named_as_the_api_s_version() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await play(client, "v1", 1.0)

    assert serve(script)[1].open("v1").reward == 1.0
    assert room_of(f"/s/v1/{CHAT}", 9) == room_of(f"/{CHAT}", 9)


def test_a_commit_takes_whole_groups_once() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        for run in range(3):
            await play(client, f"a{run}", run, task_id="a", run_id=run)
        await play(client, "b", 1, task_id="b")
        await post(client, f"s/a3/{CHAT}", **asks("still playing"))
        assert await post(client, "commit", session_id="a1") == {"committed": 3}
        assert await post(client, "commit", session_id="a1") == {"committed": 0}
        assert await post(client, "commit", task_id="b") == {"committed": 1}
        late = await client.post("/commit", json={"session_id": "a3"})
        assert late.status_code == 400 and "has no reward" in late.text
        await post(client, "feedback", reward=1, session_id="a3", task_id="a", run_id=3)
        assert await post(client, "commit") == {"committed": 1}

    shipped, _ = serve(script)
    found = [[(e.eid.task, e.eid.run, e.reward) for e in commit] for commit in shipped.commits]
    assert found == [
        [("a", 0, 0), ("a", 1, 1), ("a", 2, 2)],
        [],
        [("b", 0, 1)],
        [("a", 3, 1)],
    ]


def test_runs_without_a_number_or_with_a_taken_one_get_one_of_their_own() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        for name, whose in (("x", {"run_id": 1}), ("y", {"run_id": 1}), ("z", {})):
            await play(client, name, 1, task_id="a", **whose)
        await post(client, "commit")

    shipped, _ = serve(script)
    assert [e.eid.run for e in shipped.commits[0]] == [1, 0, 2]


def test_a_reward_for_a_reply_is_for_that_reply_also_when_a_later_one_came_first() -> None:
    async def main() -> Shipped:
        shipped = Shipped()
        rollouts = make_rollouts(lambda p: "first" if "first" in p else "other", wait=0.2)
        engine: Any = rollouts.engine
        sessions = Sessions(rollouts.session_model, ship=shipped)
        async with make_client(rollouts, sessions) as client:
            slow = asyncio.ensure_future(post(client, f"s/one/{CHAT}", **asks("first")))
            while not engine.prompts:
                await asyncio.sleep(0.001)
            engine.wait = 0
            quick = await post(client, f"s/one/{CHAT}", **asks("other"))
            assert not slow.done()
            for reward, reply in enumerate([await slow, quick]):
                await post(client, "feedback", reward=reward, msg_ids=[reply["id"]])
            await post(client, "commit")
        return shipped

    [experiences] = asyncio.run(main()).commits
    assert {e.reward: e.response_text for e in experiences} == {0: "first", 1: "other"}


@pytest.mark.parametrize("rated", [False, True])
def test_a_reply_that_was_lost_and_asked_for_again_is_trained_only_with_its_own_reward(
    rated: bool,
) -> None:
    async def script(client: httpx.AsyncClient) -> None:
        chat = asks("well?")["messages"]
        lost, again = [await post(client, f"s/one/{CHAT}", messages=chat) for _ in range(2)]
        more = [*chat, again["choices"][0]["message"], {"role": "user", "content": "and?"}]
        last = await post(client, f"s/one/{CHAT}", messages=more)
        await post(client, "feedback", reward=1.0, msg_ids=[last["id"]])
        if rated:
            await post(client, "feedback", reward=0.5, msg_ids=[lost["id"]])
        await post(client, "commit", session_id="one")

    shipped, _ = serve(script)
    [experiences] = shipped.commits
    assert [e.reward for e in experiences] == [0.5] * rated + [0.0, 1.0]
    assert [e.eid.step for e in experiences] == list(range(len(experiences)))
    assert all(e.metrics["conversation/orphans"] == 1 for e in experiences)


def test_calls_without_a_session_are_rewarded_by_their_ids() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        ids = [(await post(client, CHAT, **asks("well?")))["id"] for _ in range(2)]
        await post(client, "feedback", reward=1, msg_ids=ids, task_id="t")
        assert await post(client, "commit") == {"committed": 2}
        again = await client.post("/feedback", json={"reward": 1, "msg_ids": ids})
        assert again.status_code == 400 and "was sent already" in again.text

    shipped, _ = serve(script)
    assert [(e.eid.task, e.eid.run) for e in shipped.commits[0]] == [("t", 0), ("t", 1)]


@pytest.mark.parametrize(
    "body",
    [{"reward": 1}, {"reward": 1, "session_id": "nobody"}, {"reward": 1, "msg_ids": ["no"]}],
)
def test_feedback_for_nobody_is_refused(body: dict[str, Any]) -> None:
    async def script(client: httpx.AsyncClient) -> None:
        assert (await client.post("/feedback", json=body)).status_code == 400
        nan = b'{"reward": NaN, "session_id": "a"}'
        headers = {"content-type": "application/json"}
        assert (await client.post("/feedback", content=nan, headers=headers)).is_client_error

    serve(script)


def test_sessions_without_a_reward_are_dropped_when_too_many_and_counted() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        for name in "abcd":
            await play(client, name, 1) if name == "a" else await post(
                client, f"s/{name}/{CHAT}", **asks("well?")
            )
        assert "trireme_sessions_dropped_total 1" in (await client.get("/metrics")).text
        for name in "cd":
            await post(client, "feedback", reward=1, session_id=name)
        full = await client.post(f"/s/e/{CHAT}", json=asks("well?"))
        assert full.status_code == 400 and "POST /commit" in full.text
        assert await post(client, "commit") == {"committed": 3}

    _, sessions = serve(script, most=3)
    assert sessions.dropped == 1


def test_sessions_are_dropped_when_what_they_hold_is_too_much() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        for name in "abcd":
            await post(client, f"s/{name}/{CHAT}", **asks("x" * 30_000))
        await post(client, "feedback", reward=1.0, session_id="d")

    _, sessions = serve(script, most_held=150_000)
    assert (len(sessions), sessions.dropped) == (3, 1), "the oldest one"
    sessions.close("d")
    sessions.close("b")
    sessions.close("c")
    assert sessions._held == 0


def test_sessions_without_a_reward_are_dropped_when_quiet() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await play(client, "kept", 1)
        await post(client, f"s/lost/{CHAT}", **asks("well?"))

    _, sessions = serve(script, keep=0.0)
    assert sessions.drop_quiet() == sessions.dropped == 1
    assert [e.eid.task for e in sessions.take()] == ["kept"]


def test_a_misspelt_key_commits_and_rewards_nothing() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await play(client, "one", 1)
        wrong = {
            "commit": {"session": "two"},
            "feedback": {"reward": 2, "session_id": "one", "task": "a"},
        }
        for path, body in wrong.items():
            answer = await client.post(f"/{path}", json=body)
            assert answer.status_code == 422 and f"request's {list(body)[-1]}" in answer.text

    shipped, sessions = serve(script)
    assert (shipped.commits, sessions.open("one").reward) == ([], 1)


def test_a_commit_of_a_session_and_of_another_task_is_refused() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await play(client, "a0", 1, task_id="a")
        both = await client.post("/commit", json={"session_id": "a0", "task_id": "b"})
        assert both.status_code == 400
        assert "'a0' belongs to task 'a', and task_id is 'b': expected one" in both.text
        assert await post(client, "commit", session_id="a0", task_id="a") == {"committed": 1}

    assert len(serve(script)[0].commits) == 1


def test_a_reply_of_another_session_than_the_named_one_gets_no_reward() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        reply = (await post(client, f"s/one/{CHAT}", **asks("well?")))["id"]
        body = {"reward": 1, "session_id": "two", "msg_ids": [reply]}
        answer = await client.post("/feedback", json=body)
        assert answer.status_code == 400
        assert f"reply '{reply}' belongs to session 'one', not 'two'" in answer.text
        assert await post(client, "feedback", **body | {"session_id": "one"}) == {"rewarded": 1}

    assert serve(script)[1].open("one").rewarded


def test_a_call_under_way_in_a_session_that_is_committed_fails_and_is_no_experience() -> None:
    async def main() -> Shipped:
        rollouts, shipped = make_rollouts(lambda _: "yes"), Shipped()
        engine: Any = rollouts.engine
        sessions = Sessions(rollouts.session_model, ship=shipped)
        async with make_client(rollouts, sessions) as client:
            await play(client, "one", 1)
            engine.wait = 0.2
            late = asyncio.ensure_future(client.post(f"/s/one/{CHAT}", json=asks("and?")))
            while len(engine.prompts) < 2:
                await asyncio.sleep(0.001)
            assert await post(client, "commit", session_id="one") == {"committed": 1}
            assert (await late).status_code == 500 and "is over" in (await late).text
            assert len(sessions) == 0
        return shipped

    assert len(asyncio.run(main()).commits[0]) == 1


def test_a_name_that_is_used_again_has_another_stream_of_chance() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await play(client, "one", 1)
            await post(client, "commit")

    rollouts = make_rollouts(lambda _: "yes")

    async def main() -> None:
        sessions = Sessions(rollouts.session_model, ship=Shipped())
        async with make_client(rollouts, sessions) as client:
            await script(client)

    asyncio.run(main())
    engine: Any = rollouts.engine
    assert engine.keys == [("session", "one", 0, 0), ("session", "one", 1, 0)]


def test_a_server_of_agents_has_no_way_to_the_weights_and_wants_its_key() -> None:
    async def main() -> None:
        rollouts = make_rollouts(lambda _: "yes")
        sessions = Sessions(rollouts.session_model, ship=Shipped())
        async with make_client(rollouts, sessions, key="secret") as client:
            assert (await client.post("/commit", json={})).status_code == 401
            assert (await client.get("/health")).json() == {"status": "ok"}
            client.headers["authorization"] = "Bearer secret"
            assert (await client.post("/commit", json={})).json() == {"committed": 0}
            for path in ("/engine/weights/commit", "/update_weights_from_path/", "/infer/"):
                assert (await client.post(path, json={})).status_code == 404

    asyncio.run(main())

"""The trainers' endpoints: what they give lines up, in every mode, and ends with the client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ext.http.made import client_of, on_port, torch_rollouts, until
from tests.limits import HANG_S
from trireme.ext.multi_turn.scheduler import MultiTurnScheduler
from trireme.registry import MULTI_TURNS

CONFIG = {"max_tokens": 12, "temperature": 1.0, "logprobs": True}
ENDLESS = {"max_tokens": 100_000, "ignore_eos": True}


class Again(MultiTurnScheduler):
    """Asks for more after each reply, also where that was cut."""

    def check_finished(self, *_: Any) -> bool:
        return False

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": f"again {current_turn}"})
        return {"infer_request": infer_request, "rollout_infos": {"asked": current_turn}}


@pytest.fixture(autouse=True)
def again() -> None:
    if "again" not in MULTI_TURNS:
        MULTI_TURNS.register("again")(Again)


def asked(*texts: str) -> dict[str, Any]:
    requests = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return {"infer_requests": requests, "request_config": CONFIG}


def flat(rows: list[list[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


async def infer(folder: Path, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    async with torch_rollouts(folder, **options) as rollouts, client_of(rollouts) as client:
        answer = await client.post("/infer/", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.mark.parametrize("turns", [None, 3])
def test_ids_masks_logprobs_and_messages_of_infer_line_up(
    tiny_dir: Path, turns: int | None
) -> None:
    scheduler = {"scheduler": "again", "max_turns": turns} if turns else {}
    outputs = asyncio.run(infer(tiny_dir, asked("one", "two"), scheduler=scheduler))
    assert len(outputs) == 2
    for text, output in zip(("one", "two"), outputs, strict=True):
        roles = [message["role"] for message in output["messages"]]
        assert roles == ["user", "assistant"] * (turns or 1)
        assert output["messages"][0]["content"] == text
        ids = output["response_token_ids"]
        assert len(ids) == (turns or 1) and all(0 < len(row) <= 12 for row in ids)
        assert [len(row) for row in output["response_loss_mask"]] == [len(row) for row in ids]
        assert [len(row) for row in output["rollout_logprobs"]] == [len(row) for row in ids]
        experience = output["experience"]
        tokens, mask = experience["tokens"], experience["mask"]
        assert len(tokens) == len(mask) == len(experience["logprobs"])
        assert [t for t, m in zip(tokens, mask, strict=True) if m] == flat(ids)
        sampled = [p for p, m in zip(experience["logprobs"], mask, strict=True) if m]
        assert sampled == pytest.approx(flat(output["rollout_logprobs"]))
        assert output["response"]["usage"]["completion_tokens"] == sum(map(len, ids))
        choice = output["response"]["choices"][0]
        assert choice["message"]["content"] == output["messages"][-1]["content"]
        assert len(choice["logprobs"]["content"]) == len(ids[-1])
        infos = output["rollout_infos"]
        assert infos["num_turns"] == (turns or 1) and infos.get("asked") == (turns and turns - 1)


def test_batch_mode_and_the_asynchronous_one_give_the_same(tiny_dir: Path) -> None:
    body = asked("one", "two", "three")
    options: dict[str, Any] = {"scheduler": {"scheduler": "again", "max_turns": 3}}
    one, two = (
        asyncio.run(infer(tiny_dir, body, use_async_engine=mode, **options))
        for mode in (True, False)
    )
    for name in ("response_token_ids", "response_loss_mask", "messages", "rollout_infos"):
        assert [output[name] for output in one] == [output[name] for output in two]


def test_requests_of_one_key_do_not_say_the_same(tiny_dir: Path) -> None:
    found = asyncio.run(infer(tiny_dir, asked("one", "one") | {"key": [1, 2, 3]}))
    assert found[0]["response_token_ids"] != found[1]["response_token_ids"]


@pytest.mark.parametrize("path", ["/generate/", "/chat/"])
def test_prompts_and_chats_give_n_completions_each_in_order(tiny_dir: Path, path: str) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    given = {"messages": chats} if path == "/chat/" else {"prompts": ["one", "two"]}

    async def main() -> dict[str, Any]:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            body = given | {"n": 3, "max_tokens": 4}
            return (await client.post(path, json=body)).json()

    found = asyncio.run(main())
    assert len(found["prompt_ids"]) == 2 and len(found["completion_ids"]) == 6
    assert list(map(len, found["logprobs"])) == list(map(len, found["completion_ids"]))


ONE = {"prompts": ["one"], "max_tokens": 3, "temperature": 0.5}
TALK = {"messages": [{"role": "user", "content": "one"}]}


def posted(folder: Path, path: str, *bodies: dict[str, Any]) -> list[tuple[int, Any]]:
    async def main() -> list[tuple[int, Any]]:
        async with torch_rollouts(folder) as rollouts, client_of(rollouts) as client:
            answers = [await client.post(path, json=body) for body in bodies]
            return [(answer.status_code, answer.json()) for answer in answers]

    return asyncio.run(main())


def test_clients_that_name_logprobs_get_the_likeliest_of_each_token(tiny_dir: Path) -> None:
    bodies = [ONE | {"logprobs": count} for count in (0, 2, None)]
    for count, (status, found) in zip(
        (1, 3, 1), posted(tiny_dir, "/generate/", *bodies), strict=True
    ):
        (ids,), (logprobs,) = found["completion_ids"], found["logprobs"]
        (tokens,) = found["logprob_token_ids"]
        assert status == 200 and len(logprobs) == len(tokens) == len(ids) == 3
        for token, own, among in zip(ids, logprobs, tokens, strict=True):
            assert token in among and own == sorted(own, reverse=True)
            assert count <= len(own) == len(among) <= max(count, 1) + (count > 1)


def test_generation_kwargs_take_precedence(tiny_dir: Path) -> None:
    more = {"seed": 3, "max_tokens": 2, "n": 2}
    one, two, other, wrong = posted(
        tiny_dir,
        "/generate/",
        ONE | {"generation_kwargs": more},
        ONE | {"generation_kwargs": more},
        ONE | {"generation_kwargs": more | {"seed": 4}},
        ONE | {"generation_kwargs": {"sede": 3}},
    )
    assert list(map(len, one[1]["completion_ids"])) == [2, 2]
    assert one[1]["completion_ids"] == two[1]["completion_ids"] != other[1]["completion_ids"]
    assert (
        wrong[0] == 400 and "no option 'sede': did you mean 'seed'?" in wrong[1]["error"]["message"]
    )


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate/", ONE | {"images": None, "guided_decoding_regex": None}, "ok"),
        ("/generate/", ONE | {"temprature": 2}, "unknown key 'temprature': did you mean 'temper"),
        ("/generate/", ONE | {"guided_decoding_regex": "a*"}, "key 'guided_decoding_regex'"),
        ("/chat/", {"messages": [[]], "chat_template_kwargs": {"x": 1}}, "'chat_template_kwargs'"),
        ("/infer/", {"infer_requests": [TALK], "metrics": None, "use_tqdm": False}, "ok"),
        ("/infer/", {"infer_requests": [TALK], "request_confg": {"n": 1}}, "mean 'request_config'"),
        ("/infer/", {"infer_requests": [TALK | {"image": ["x"]}]}, "infer_requests.0 has the unkn"),
        (
            "/infer/",
            {"infer_requests": [TALK | {"chat_template_kwargs": {"enable_thinking": False}}]},
            "infer_requests.0.chat_template_kwargs is {'enable_thinking': False}: expected nothing",
        ),
        *(
            ("/infer/", {"infer_requests": [TALK], "request_config": {name: value}}, name)
            for name, value in (("num_beams", 4), ("length_penalty", 0.5), ("stream", True))
        ),
    ],
)
def test_what_has_no_effect_is_refused(
    tiny_dir: Path, path: str, body: dict[str, Any], message: str
) -> None:
    ((status, answer),) = posted(tiny_dir, path, body)
    assert status == 200 if message == "ok" else 400 <= status < 500
    if message != "ok":
        assert message in answer["error"]["message"]
        assert "Value error" not in answer["error"]["message"]


def test_health_answers_while_the_engine_generates(tiny_dir: Path) -> None:
    async def main() -> None:
        async with (
            torch_rollouts(tiny_dir, max_model_len=20_000) as rollouts,
            on_port(rollouts) as url,
            httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
        ):
            body = asked("one") | {"request_config": ENDLESS}
            calls = [asyncio.ensure_future(client.post("/infer/", json=body)) for _ in range(4)]
            await until(lambda: rollouts.engine.health().running == 4)
            for path in ("/health", "/health/"):
                assert (await client.get(path)).json() == {"status": "ok"}
            told = (await client.get("/engine/health")).json()
            assert told["running"] == 4 and told["max_model_len"] == 20_000
            assert "trireme_requests_running 4" in (await client.get("/metrics")).text
            for call in calls:
                call.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infer/", asked("one", "two") | {"request_config": ENDLESS}),
        ("/generate/", {"prompts": ["a"], "n": 64, "max_tokens": 100_000}),  # some do not end soon
        ("/engine/generate", {"ids": [5], "sampling": ENDLESS}),
        ("/v1/completions", {"prompt": "a", **ENDLESS}),
        ("/v1/completions", {"prompt": "a", "stream": True, **ENDLESS}),
    ],
)
def test_a_client_that_goes_away_frees_the_engine(
    tiny_dir: Path, path: str, body: dict[str, Any]
) -> None:
    async def main() -> None:
        async with (
            torch_rollouts(tiny_dir, max_model_len=100_000) as rollouts,
            on_port(rollouts) as url,
        ):
            engine = rollouts.engine
            async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
                call = asyncio.ensure_future(client.post(path, json=body))
                await until(lambda: engine.health().running > 0)
                call.cancel()
            await until(lambda: engine.health().running == engine.health().waiting == 0)
            assert (await rollouts.engine.abort()) == 0

    asyncio.run(main())


def test_a_failing_scheduler_is_told_and_the_others_of_its_request_end(tiny_dir: Path) -> None:
    class Broken(Again):
        def step(self, infer_request: Any, *others: Any) -> dict[str, Any]:
            return {"nothing": 1}

    async def main() -> None:
        options: dict[str, Any] = {"scheduler": {"scheduler": Broken, "max_turns": 3}}
        async with torch_rollouts(tiny_dir, **options) as rollouts, client_of(rollouts) as client:
            answer = await client.post("/infer/", json=asked("one", "two"))
            assert answer.status_code == 500  # the scheduler's fault, and not the client's
            assert "Broken.step returned" in answer.json()["error"]["message"]
            assert rollouts.engine.health().running == 0

    asyncio.run(main())

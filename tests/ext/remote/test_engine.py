"""The remote engine against servers of this process: weights, restarts, several servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from tests.e2e.job import small_config
from tests.ext.http.made import on_port, rollouts_over, torch_rollouts, until
from tests.limits import HANG_S
from tests.model.fake import FakeEngine
from trireme.config import load_config
from trireme.engines.device import Device
from trireme.engines.engine import Completion, Engine, Sampling
from trireme.ext.http import INSTANCE
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.remote import engine as remote
from trireme.ext.remote import servers
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import RemoteServers
from trireme.launch.check import make_plans
from trireme.launch.explorer_side import lone_explorer
from trireme.launch.modes import run_bench
from trireme.launch.stage import open_stage
from trireme.monitor.console import Console

PROMPT = [5, 6, 7, 8]
SHORTER = [5, 9, 7]
SHORT = Sampling(max_tokens=4, ignore_eos=True)


def weights_of(rollouts: Rollouts, change: float = 0.0) -> dict[str, Any]:
    engine: Any = rollouts.engine
    state = engine.module.state_dict()
    return {name: tensor.clone() + change for name, tensor in state.items()}


def with_servers(
    folder: Path,
    count: int,
    main: Callable[[RemoteEngine, list[Rollouts], list[str]], Awaitable[Any]],
    **options: Any,
) -> None:
    async def go() -> None:
        async with AsyncExitStack() as stack:
            made = [
                await stack.enter_async_context(torch_rollouts(folder, **options))
                for _ in range(count)
            ]
            urls = [await stack.enter_async_context(on_port(one)) for one in made]
            engine = RemoteEngine(urls)
            try:
                await asyncio.wait_for(main(engine, made, urls), HANG_S)
            finally:
                await engine.close()

    asyncio.run(go())


def test_weights_that_are_sent_are_those_that_sample(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BUCKET_BYTES", 4096)  # several parts

    async def main(engine: RemoteEngine, made: list[Rollouts], _: list[str]) -> None:
        own: Engine = engine
        before = await own.fingerprint()
        (old,) = await engine.generate(PROMPT, SHORT, key=(1, 0, 0, 0))
        await engine.update_weights(weights_of(made[0], 0.05), 3)
        after = await engine.fingerprint()
        assert after == await made[0].engine.fingerprint() and after != before
        (new,) = await engine.generate(PROMPT, SHORT, key=(1, 0, 0, 0))
        assert (old.versions, new.versions) == ([0] * 4, [3] * 4)
        assert made[0].engine.health().version == engine.health().version == 3
        rows = await engine.logprobs([PROMPT])
        assert rows == await made[0].engine.logprobs([PROMPT])

    with_servers(tiny_dir, 1, main)


def test_what_is_more_than_a_server_takes_at_once_goes_in_several_requests(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "MOST_SAMPLES", 4)
    monkeypatch.setattr(servers, "MOST_TOKENS", 10)
    posted: list[list[int]] = []

    async def main(engine: RemoteEngine, _: list[Rollouts], urls: list[str]) -> None:
        post = engine._client.stream

        def noted(*words: Any, **options: Any) -> Any:
            requests = options["json"]["requests"]
            posted.append([len(request["ids"]) for request in requests])
            return post(*words, **options)

        monkeypatch.setattr(engine._client, "stream", noted)
        await engine.connect()
        sizes = [(3, 2), (3, 2), (1, 1), (9, 1), (12, 1), (2, 4), (2, 1)]  # tokens, samples
        found = await asyncio.gather(
            *(
                engine.generate([5] * tokens, replace(SHORT, n=n), key=(1, 0, index))
                for index, (tokens, n) in enumerate(sizes)
            )
        )
        assert [len(samples) for samples in found] == [n for _, n in sizes]
        assert posted == [[3, 3], [1, 9], [12], [2], [2]]

    with_servers(tiny_dir, 1, main)


def test_weights_of_another_model_are_refused_and_change_nothing(tiny_dir: Path) -> None:
    async def main(engine: RemoteEngine, made: list[Rollouts], _: list[str]) -> None:
        before = await engine.fingerprint()
        wrong = weights_of(made[0])
        wrong["nothing.weight"] = wrong.pop(sorted(wrong)[-1])
        with pytest.raises(ValueError, match=r"not belong to this model: 1 tensors are missing"):
            await engine.update_weights(wrong, 1)
        with pytest.raises(ValueError, match="expected a folder of safetensors"):
            await engine.update_weights(tiny_dir / "nothing", 1)
        assert await engine.fingerprint() == before and engine.health().version == 0

    with_servers(tiny_dir, 1, main)


def test_each_token_has_its_version_when_weights_come_in_the_middle(tiny_dir: Path) -> None:
    async def main(engine: RemoteEngine, made: list[Rollouts], _: list[str]) -> None:
        long = Sampling(max_tokens=400, ignore_eos=True)
        call = asyncio.ensure_future(engine.generate(PROMPT, long, key=(1, 0, 0, 0)))
        await until(lambda: made[0].engine.health().generated_tokens > 10)
        await engine.update_weights(weights_of(made[0], 0.01), 1)
        (reply,) = await call
        assert reply.versions == sorted(reply.versions) and set(reply.versions) == {0, 1}
        assert len(reply.versions) == len(reply.ids) == 400

    with_servers(tiny_dir, 1, main)


def test_a_server_that_was_started_again_ends_the_engine(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts:
            async with on_port(rollouts) as url:
                engine = RemoteEngine([url])
                await engine.generate(PROMPT, SHORT)
            async with on_port(rollouts, port=int(url.rsplit(":", 1)[1])):
                for call in (
                    lambda: engine.generate(PROMPT, SHORT),
                    lambda: engine.update_weights(weights_of(rollouts), 1),
                ):
                    engine.servers.failure = None
                    with pytest.raises(
                        RuntimeError, match="was restarted, and has lost the weights of"
                    ):
                        await call()
                    with pytest.raises(RuntimeError, match="the remote engine has failed"):
                        engine.health()
                await engine.close()

    asyncio.run(main())


def test_a_server_that_is_gone_ends_the_engine(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir, max_model_len=20_000) as rollouts:
            async with on_port(rollouts) as url:
                engine = RemoteEngine([url])
                long = Sampling(max_tokens=100_000, ignore_eos=True)
                calls = [asyncio.ensure_future(engine.generate(PROMPT, long)) for _ in range(3)]
                await until(lambda: rollouts.engine.health().running == 3)  # all are connected
            for call in calls:
                with pytest.raises(RuntimeError, match=f"the rollout server {url} is gone"):
                    await asyncio.wait_for(call, HANG_S)
            assert await engine.abort() == 0
            await asyncio.wait_for(engine.close(), HANG_S)

    asyncio.run(main())


def test_the_loss_of_a_server_has_a_reason_where_the_error_has_no_words(tiny_dir: Path) -> None:
    """httpx's error of a connection that is cut in the middle of an answer has none."""

    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, on_port(rollouts) as url:
            engine = RemoteEngine([url])
            await engine.servers.connect()

            async def cut() -> None:
                raise httpx.ReadError("")

            with pytest.raises(RuntimeError, match=rf"{url} is gone \(/engine/x\): ReadError"):
                await engine._heard(url, "/engine/x", cut())
            await engine.close()

    asyncio.run(main())


def test_a_server_that_is_started_again_gets_the_weights_and_what_was_under_way(
    tiny_dir: Path,
) -> None:
    """Version 3 was served; the server ends in the middle of replies, and a new one comes."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            old = await stack.enter_async_context(torch_rollouts(tiny_dir, max_model_len=2000))
            new = await stack.enter_async_context(torch_rollouts(tiny_dir, max_model_len=2000))
            weights = weights_of(old, 0.05)
            async with on_port(old) as url:
                engine = RemoteEngine([url])
                engine.servers.restarted = True
                await engine.update_weights(weights, 3)

                async def renew(lacking: Callable[[], bool]) -> None:
                    assert lacking()
                    await engine.servers.persist(lambda: engine.update_weights(weights, 4))

                engine.servers.renew = renew
                long = Sampling(max_tokens=300, ignore_eos=True)
                keys = [(1, task, 0, 0) for task in range(3)]
                calls = [asyncio.ensure_future(engine.generate(PROMPT, long, key=k)) for k in keys]
                await until(lambda: old.engine.health().running == 3)
            await asyncio.wait_for(engine.servers.loss(url), HANG_S)
            assert not any(call.done() for call in calls) and engine.health().running == 3
            keeping = asyncio.ensure_future(engine.servers.keep_complete())
            async with on_port(new, port=int(url.rsplit(":", 1)[1])):
                await engine.servers.again(0, url)
                replies = await asyncio.wait_for(asyncio.gather(*calls), HANG_S)
                assert {v for [reply] in replies for v in reply.versions} == {4}
                assert await engine.fingerprint() == await new.engine.fingerprint()
                keeping.cancel()
                await engine.close()

    asyncio.run(main())


def test_a_push_that_a_server_does_not_live_to_see_is_done_again_and_no_other(
    tiny_dir: Path,
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            rollouts = await stack.enter_async_context(torch_rollouts(tiny_dir))
            async with on_port(rollouts) as url:
                engine = RemoteEngine([url])
                engine.servers.restarted = True
                await engine.connect()
                with pytest.raises(
                    ValueError, match="not belong to this model"
                ):  # the server is well
                    push = partial(engine.update_weights, {"x": torch.zeros(1)}, 1)
                    await engine.servers.persist(push)
            weights = weights_of(rollouts)
            push = asyncio.ensure_future(
                engine.servers.persist(lambda: engine.update_weights(weights, 1))
            )
            await asyncio.wait_for(engine.servers.loss(url), HANG_S)
            async with on_port(rollouts, port=int(url.rsplit(":", 1)[1])):
                await engine.servers.again(0, url)
                await asyncio.wait_for(push, HANG_S)
                assert rollouts.engine.health().version == 1 and not engine.servers.bare
                await engine.close()

    asyncio.run(main())


def test_while_a_server_is_gone_another_has_its_tasks(tiny_dir: Path) -> None:
    async def main(engine: RemoteEngine, made: list[Rollouts], urls: list[str]) -> None:
        engine.servers.restarted = True
        await engine.connect()
        engine.servers.lost(urls[0], engine.servers.instances[urls[0]], "is gone")
        for task in range(8):
            await engine.generate(PROMPT, SHORT, key=(1, task, 0, 0))
        assert [one.engine.health().generated_tokens for one in made] == [0, 32]

    with_servers(tiny_dir, 2, main)


def test_a_server_that_never_answers_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers, "NOTED_S", 0.0)
    monkeypatch.setattr(servers, "WAIT_S", 1.0)

    async def main() -> None:
        for url, kind in (("http://127.0.0.1:9", "did not answer"), ("127.0.0.1:9", "protocol")):
            with pytest.raises(TimeoutError, match=f"{url} .*base_urls.*{kind}"):
                await RemoteEngine([url]).generate(PROMPT, SHORT)

    asyncio.run(main())
    (waits,) = caplog.records  # long before it gives up; nobody waits for what is no address
    assert "server http://127.0.0.1:9 (explorer.rollout_model.base_urls) does not" in waits.message


def test_a_wrong_key_is_told(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, on_port(rollouts, key="k") as url:
            with pytest.raises(RuntimeError, match="refuses access: this server requires its key"):
                await RemoteEngine([url], api_key="other").generate(PROMPT, SHORT)
            assert await RemoteEngine([url], api_key="k").generate(PROMPT, SHORT)

    asyncio.run(main())


def test_a_task_stays_with_one_server_and_weights_go_to_all(tiny_dir: Path) -> None:
    async def main(engine: RemoteEngine, made: list[Rollouts], _: list[str]) -> None:
        for task in range(8):
            before = [one.engine.health().generated_tokens for one in made]
            for run in range(3):
                await engine.generate(PROMPT, SHORT, key=(1, task, run, 0))
            after = [one.engine.health().generated_tokens for one in made]
            assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 12]
        assert all(one.engine.health().generated_tokens for one in made)
        await engine.update_weights(weights_of(made[0], 0.1), 5)
        assert [one.engine.health().version for one in made] == [5, 5]
        marks = [await one.engine.fingerprint() for one in made]
        assert marks[0] == marks[1] == await engine.fingerprint()

    with_servers(tiny_dir, 2, main)


def test_servers_with_different_weights_are_found_out(tiny_dir: Path) -> None:
    async def main(engine: RemoteEngine, made: list[Rollouts], urls: list[str]) -> None:
        await engine.fingerprint()
        await made[1].engine.update_weights(weights_of(made[1], 0.1), 0)
        with pytest.raises(RuntimeError, match=f"{urls[1]} has other weights than {urls[0]}"):
            await engine.fingerprint()
        # and the probe's row is scored by each
        assert engine.traits.members == 2
        rows = [PROMPT, PROMPT, PROMPT, SHORTER]
        scored = [await one.engine.logprobs([PROMPT, SHORTER]) for one in made]
        expected = [scored[0][0], scored[1][0], scored[0][0], scored[1][1]]
        assert scored[0] != scored[1] and await engine.logprobs(rows) == expected

    with_servers(tiny_dir, 2, main)


def test_samples_are_those_of_an_engine_in_this_process(tiny_dir: Path) -> None:
    async def main(engine: RemoteEngine, made: list[Rollouts], _: list[str]) -> None:
        sampling = Sampling(max_tokens=20, n=2, logprobs=2, stop=("a",))
        far = await engine.generate(PROMPT, sampling, key=(1, "x", 0, 0))
        async with torch_rollouts(tiny_dir) as near:
            here = await near.engine.generate(PROMPT, sampling, key=(1, "x", 0, 0))
        assert far == here

    with_servers(tiny_dir, 1, main)


def test_tokens_are_told_while_they_come_and_each_once(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = replace(SHORT, max_tokens=200, n=2, logprobs=2)

    async def main(engine: RemoteEngine, made: list[Rollouts], _: list[str]) -> None:
        told: list[tuple[int, int, float, dict[int, float]]] = []
        ended = asyncio.ensure_future(
            engine.generate(PROMPT, sampling, key=(1,), on_token=lambda *t: told.append(t))
        )
        other = asyncio.ensure_future(engine.generate(PROMPT, sampling, key=(2,)))
        await until(lambda: len(told) > 2)
        assert not ended.done()
        completions = await ended
        await other
        for index, completion in enumerate(completions):
            own = [token for sample, *token in told if sample == index]
            assert [token for token, *_ in own] == completion.ids
            assert [p for _, p, _ in own] == pytest.approx(completion.logprobs, abs=1e-6)
            assert [others for *_, others in own] == completion.alternatives
        again: list[int] = []
        tell = remote._without_repeats(lambda sample, token, *_: again.append(token))
        for part in ((5, 6), (5, 6, 7)):  # the server was lost after two
            one = tell()
            for token in part:
                one(0, token, 0.0, {})
        assert again == [5, 6, 7]

    with_servers(tiny_dir, 1, main)


class Slow(FakeEngine):
    """Takes its time for weights, and for the reply to a long prompt."""

    async def update_weights(self, source: Any, version: int) -> None:
        await asyncio.sleep(1)

    async def generate(self, ids: Any, *args: Any, **named: Any) -> list[Completion]:
        await asyncio.sleep(5 if len(ids) > 2 else 0)
        return await super().generate(ids, *args, **named)


def test_weights_have_a_limit_of_their_own_and_a_failure_names_its_limit() -> None:
    """A push that takes longer than a rollout may is no loss of the server."""

    async def main() -> list[str]:
        served: Any = Slow(lambda _: "yes")
        async with on_port(rollouts_over(served, served.tokenizer)) as url:
            engine = RemoteEngine([url], timeout=0.5)
            await engine.update_weights({"w": torch.zeros(2)}, 1)
            assert (await engine.generate([5, 6], SHORT))[0].text == "yes"
            said = []
            with pytest.raises(RuntimeError) as failed:
                await engine.generate([5, 6, 7], SHORT)
            said.append(str(failed.value).removeprefix(f"the rollout server {url} "))
            await engine.close()
            engine = RemoteEngine([url], sync_timeout=0.5)
            with pytest.raises(RuntimeError) as failed:
                await engine.update_weights({"w": torch.zeros(2)}, 2)
            said.append(str(failed.value).removeprefix(f"the rollout server {url} "))
            await engine.close()
        return said

    assert asyncio.run(main()) == [
        "did not answer /engine/stream within 0.5 s (explorer.max_timeout)",
        "did not answer /engine/weights/commit within 0.5 s (synchronizer.sync_timeout)",
    ]


def test_a_server_that_hangs_while_it_is_sent_weights_has_no_longer_than_a_rollout() -> None:
    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A server that stops after its first answer, as a stopped process does."""
        if b"/engine/health" in await reader.readuntil(b"\r\n\r\n"):
            said = b'{"multi_turn": false, "seed": 0}'
            head = f"HTTP/1.1 200 OK\r\n{INSTANCE}: a\r\ncontent-length: {len(said)}\r\n\r\n"
            writer.write(head.encode() + said)
        await reader.read()
        writer.close()

    async def main() -> str:
        async with await asyncio.start_server(hangs, "127.0.0.1", 0) as server:
            url = "http://{}:{}".format(*server.sockets[0].getsockname())
            engine = RemoteEngine([url], timeout=0.5, sync_timeout=HANG_S)
            with pytest.raises(RuntimeError) as failed:
                await engine.update_weights({"w": torch.zeros(2)}, 1)
            await engine.close()
        return str(failed.value).removeprefix(f"the rollout server {url} ")

    assert asyncio.run(main()) == (
        "answered neither /engine/weights nor /health for 0.5 s (explorer.max_timeout)"
    )


@pytest.mark.parametrize("was_used", [True, False])
@pytest.mark.parametrize(
    "mode", ["bench", pytest.param("explore", marks=pytest.mark.extension("sql"))]
)
def test_a_users_server_does_not_stay_with_the_weights_of_an_earlier_run(
    mode: str, was_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never had others need not see the folder of the model."""
    config = small_config(tmp_path)
    if mode == "explore":
        store = {"name": "shared", "storage_type": "sql"}
        config["buffer"]["trainer_input"] = {"experience_buffer": store}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))

    async def main() -> None:
        served = torch_rollouts(Path(config["model"]["model_path"]), max_model_len=128)
        async with served as rollouts, on_port(rollouts) as url:
            servers = f"explorer.rollout_model.base_urls=[{url}]"
            remote = ("explorer.rollout_model.engine_type=remote", servers)
            [plan] = make_plans(load_config(path, (f"mode={mode}", *remote)))
            earlier = RemoteServers().engine(plan, plan.engine.urls, None)
            own = await earlier.fingerprint()
            if was_used:
                await earlier.update_weights(weights_of(rollouts, 0.05), 7)
                assert await earlier.fingerprint() != own
            else:
                monkeypatch.delattr(RemoteEngine, "update_weights")
            await earlier.close()
            engine, device = RemoteServers().engine(plan, plan.engine.urls, None), Device(1)
            console: Any = Console(live=False)
            with open_stage(plan, plan.model_path, device, console) as stage:
                side = await lone_explorer(stage, engine)
                if mode == "bench":
                    await run_bench(stage, side)
                assert await engine.fingerprint() == own
                assert rollouts.engine.health().version == 0
                await side.close()
            await engine.close()
            device.close()

    asyncio.run(main())

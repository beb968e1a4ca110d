"""The page's server: who is let in, and what it answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from tests.buffer.made import TOOLS, experience
from tests.ext.page.made import make_run
from tests.odd import ALL, ODD
from trireme.buffer import trained
from trireme.buffer.record import Record
from trireme.ext.page.app import STATIC, UPLOT, Page, create_app
from trireme.ext.page.report import write_report
from trireme.ext.page.serve import PageOptions, _listen, serve
from trireme.files import write_bytes
from trireme.monitor.events import StepDone
from trireme.monitor.monitor import JsonLinesMonitor
from trireme.pictures import Picture

RUN = {"run": "run"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture
def stranger(folder: Path) -> TestClient:
    return TestClient(create_app(Page(folder), "open sesame"), follow_redirects=False)


@pytest.fixture
def client(stranger: TestClient) -> TestClient:
    assert stranger.get("/?token=open+sesame").headers["location"] == "/"
    return stranger


def test_nobody_gets_in_without_the_token(stranger: TestClient) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/uplot/uPlot.iife.min.js", "/?token=wrong"):
        answer = stranger.get(path)
        assert answer.status_code == 401 and "open the whole URL" in answer.text
    given = stranger.get("/?token=open+sesame")
    assert given.status_code == 303
    cookie = given.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert stranger.get("/api/runs").status_code == 200


def test_a_search_may_leave_out_how_many_there_are(client: TestClient) -> None:
    query = "/api/rollouts?run=run&kind=train&text=reply&limit=3"
    whole, quick = client.get(query).json(), client.get(query + "&uncounted=1").json()
    assert quick["rows"] == whole["rows"] and len(quick["rows"]) == 3
    assert (quick["total"], whole["total"]) == (None, 24)
    assert client.get(query + "&uncounted=1&text=nowhere").json()["total"] == 0


def test_an_answer_does_not_wait_for_an_acknowledgement(folder: Path) -> None:
    listener = _listen(PageOptions(folder, port=0))
    with listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_second_page_takes_a_free_port_and_a_port_that_is_asked_for_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("trireme.ext.page.serve.PORT", port)
        with _listen(PageOptions(folder)) as listener:
            assert listener.getsockname()[1] != port
        with pytest.raises(
            OSError, match=f"--port {port} cannot be used: Address already in use: "
        ):
            _listen(PageOptions(folder, port=port))


def test_a_wrong_token_does_not_log_a_browser_out(client: TestClient) -> None:
    answer = client.get("/?token=of+yesterday")
    assert answer.headers["location"] == "/" and "set-cookie" not in answer.headers
    assert client.get("/api/runs").status_code == 200


def test_a_key_with_a_plus_opens_the_page_from_a_url_as_typed(folder: Path) -> None:
    browser = TestClient(create_app(Page(folder), "a+b/c=="), follow_redirects=False)
    assert browser.get("/?token=a+b/c==").status_code == 303
    assert browser.get("/api/runs").status_code == 200


def test_what_cannot_be_read_is_said_and_hides_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path / "whole", steps=1)
    broken = make_run(tmp_path / "broken", steps=1)
    (broken / "run/starts.json").unlink()
    (broken / "run/starts.json").mkdir()  # no file can be read here, whoever asks
    client = TestClient(create_app(Page(tmp_path), "k"), headers={"authorization": "Bearer k"})
    assert [run["name"] for run in client.get("/api/runs").json()] == ["whole"]
    answer = client.get("/api/about", params={"run": "broken"})
    assert answer.status_code == 500 and "cannot be read" in answer.json()["error"]


def test_settings_that_json_has_no_numbers_for_are_shown_as_texts(tmp_path: Path) -> None:
    options = "{most: .inf, least: -.inf, of: [.nan, 1.5], .inf: x}"
    for name, given in (("plain", "{most: 1.0}"), ("odd", options)):
        path = make_run(tmp_path / name, steps=1) / "run/start_2.yaml"
        path.write_text(f"reward_fn_args: {given}\n")
    client = TestClient(create_app(Page(tmp_path), "k"), headers={"authorization": "Bearer k"})
    runs = {run["name"]: run for run in client.get("/api/runs").json()}
    assert [runs[name]["settings"]["most"] for name in ("odd", "plain")] == ["inf", 1.0]
    start = client.get("/api/about", params={"run": "odd"}).json()["starts"][1]
    expected = {"most": "inf", "least": "-inf", "of": ["nan", 1.5], "inf": "x"}
    assert start["config"] == {"reward_fn_args": expected}
    differences = client.get("/api/compare", params={"run": "odd", "other": "plain"}).json()
    assert {"key": "reward_fn_args.most", "old": "inf", "new": 1.0} in differences


def test_an_answer_that_cannot_be_encoded_is_an_error_with_a_sentence(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless: list[Any] = []
    endless.append(endless)
    monkeypatch.setattr("trireme.ext.page.app.about", lambda run: endless)
    answer = client.get("/api/about", params=RUN)
    assert answer.status_code == 400 and answer.json()["error"]


def test_the_page_may_load_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    for name in re.findall(r'"/uplot/([^"]+)"', page.text):
        assert client.get(f"/uplot/{name}").content == (UPLOT / name).read_bytes()
    for path in STATIC.iterdir():
        assert client.get(f"/static/{path.name}").content == path.read_bytes()
        if path.suffix != ".svg":
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
            assert "http://" not in text and "https://" not in text
    for path in ("..%2Fapp.py", "%2e%2e/app.py", "nothing.js"):
        assert client.get(f"/static/{path}").status_code == 404
    assert client.get("/uplot/package-lock.json").status_code == 404


def test_the_chart_library_is_the_locked_version() -> None:
    lock = json.loads((UPLOT / "package-lock.json").read_text())
    version = lock["packages"]["node_modules/uplot"]["version"]
    assert f"(v{version})" in (UPLOT / "uPlot.iife.min.js").read_text()[:100]


def test_what_a_page_asks_for(client: TestClient) -> None:
    (run,) = client.get("/api/runs").json()
    assert run["name"] == "run" and run["warnings"][0]["step"] == 2
    assert client.get("/api/curves", params=RUN).json()["trainer"]["steps"] == [1, 2, 3]
    meanings = client.get("/api/meanings", params=RUN).json()
    assert "wait" in meanings["time/wait"]["meaning"] and meanings["actor/entropy"]["healthy"]
    assert len(client.get("/api/about", params=RUN).json()["starts"]) == 2
    found = client.get("/api/rollouts", params={**RUN, "kind": "train", "limit": "5"}).json()
    assert found["total"] == 24 and len(found["rows"]) == 5
    steps = {"count": 6, "groups": 6, "steps": [1, 2, 3], "rewards": [1.0, 1.0]}
    assert found["facts"]["eval"] == steps
    assert found["rows"][0]["question"] == "What is 1 + 3?"
    one = client.get("/api/rollout", params={**RUN, "eid": "2/1/0/0"}).json()
    assert one["messages"][2]["role"] == "tool" and one["tools"] == TOOLS
    failed = client.get("/api/rollout", params={**RUN, "eid": "2/1/3/0", "kind": "failed"}).json()
    assert failed["failure"]["message"] == "ValueError: no"


def test_every_token_has_its_numbers(client: TestClient) -> None:
    found = client.get("/api/tokens", params={**RUN, "eid": "2/1/1/0"}).json()
    assert found["ids"] == [5, 6, 7, 8, 9, 10] and found["mask"] == [0, 0, 1, 1, 1, 1]
    assert found["logprobs"][:2] == [None, None] and found["logprobs"][2] == pytest.approx(-0.1)
    assert found["trained_logprobs"] == [None, None, -0.25, -0.25, -0.25, -0.25]
    assert found["ratio"][5] == pytest.approx(1.1618, abs=1e-4)  # exp(-0.25 - -0.4)
    assert found["advantages"][2:] == [1, 1, 1, 1] and found["versions"][2:] == [1] * 4
    assert found["trained_step"] == 2 and len(found["text"]) == 6


def test_held_out_rollouts_have_their_tokens_and_nothing_that_training_made(
    client: TestClient,
) -> None:
    asked = {**RUN, "kind": "eval", "eid": "2/held_out/1/0/0"}
    found = client.get("/api/tokens", params=asked).json()
    assert found["ids"] == [5, 6, 7, 8, 9, 10] and found["mask"] == [0, 0, 1, 1, 1, 1]
    assert found["logprobs"][2] == pytest.approx(-0.1) and found["versions"][2:] == [1] * 4
    assert "ratio" not in found and found["advantages"] is None and found["notes"] == []
    assert client.get("/api/rollout", params=asked).json()["messages"][2]["role"] == "tool"


def test_the_numbers_are_those_of_the_newest_step_that_is_still_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = Page(run)
    eid, kept = "1/1/1/0", run / "buffer/trained"
    assert page.tokens({**RUN, "eid": eid})["trained_step"] == 1
    first = (kept / "step_1.safetensors").read_bytes()
    write_bytes(kept / "step_3.safetensors", first)  # a resume has trained it in step 3
    assert page.tokens({**RUN, "eid": eid})["trained_step"] == 3
    (kept / "step_3.safetensors").unlink()  # rewound
    assert page.tokens({**RUN, "eid": eid})["trained_step"] == 1


def test_the_files_of_all_steps_are_listed_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks = make_run(tmp_path / "run"), []
    kept, files = run / "buffer/trained", trained.files
    monkeypatch.setattr(trained, "files", lambda folder: looks.append(folder) or files(folder))
    os.utime(kept, (1e9, 1e9))  # nobody writes any more
    page = Page(run)
    for number in range(4):
        assert page.tokens({**RUN, "eid": f"1/1/{number}/0"})["trained_step"] == 1
    assert len(looks) == 1
    write_bytes(kept / "step_3.safetensors", (kept / "step_1.safetensors").read_bytes())
    assert page.tokens({**RUN, "eid": "1/1/1/0"})["trained_step"] == 3


def test_a_wrong_question_is_answered_in_a_sentence(client: TestClient) -> None:
    for path, query, sentence in (
        ("curves", {"run": "other"}, "no run 'other'"),
        ("rollouts", {**RUN, "least": "much"}, "least is 'much': expected a number"),
        ("rollouts", {**RUN, "order": "x"}, "one of newest, oldest"),
        ("rollout", {**RUN, "eid": "9/9"}, "no rollout '9/9'"),
        ("tokens", {**RUN, "eid": "9/9"}, "no tokens of '9/9' are stored"),
        ("export", {**RUN, "format": "xml"}, "expected jsonl or parquet"),
    ):
        answer = client.get(f"/api/{path}", params=query)
        assert answer.status_code == 400 and sentence in answer.json()["error"]


def test_a_selection_is_sent_as_a_file(client: TestClient) -> None:
    answer = client.get("/api/export", params={**RUN, "kind": "eval", "format": "jsonl"})
    assert len(answer.text.splitlines()) == 6
    assert 'filename="run_rollouts.jsonl"' in answer.headers["content-disposition"]


def test_a_file_that_cannot_be_written_is_an_answer_and_no_broken_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    record = Record(lines=run / "buffer/failed.jsonl")
    record.write_lines([{"eid": "1/0/0/0", "step": 1, "prompt": 5, "info": {}}])
    record.close()
    client = TestClient(create_app(Page(run), "k"), headers={"authorization": "Bearer k"})
    answer = client.get("/api/export", params={**RUN, "kind": "failed", "format": "parquet"})
    assert answer.status_code == 400 and "Parquet cannot hold" in answer.json()["error"]


def test_beyond_loopback_a_key_is_needed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 is open to other machines: give"):
        serve(PageOptions(folder, "0.0.0.0", 0))
    (tmp_path / "key").write_text("")
    with pytest.raises(ValueError, match="is empty: expected a key"):
        serve(PageOptions(folder, "0.0.0.0", 0, tmp_path / "key"))


def test_a_report_is_one_file_with_all_that_it_shows(folder: Path, tmp_path: Path) -> None:
    path = write_report(folder, tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert "TRIREME_REPORT" in text and '"2/1/1/0"' in text and "view/app.js" in text
    assert 'src="/' not in text and 'href="/' not in text
    with pytest.raises(ValueError, match="is a folder: expected a file"):
        write_report(folder, tmp_path)


def test_odd_texts_of_a_run_are_shown_searched_sent_and_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    buffer = run / "buffer"
    database = f"sqlite:///{buffer}/explorer_output.db"
    record = Record(database=database, lines=buffer / "experience_buffer.jsonl", messages=True)
    more = {"prompt_text": ALL, "response_text": f"{ALL} end", "stop_reason": ALL,
            "info": {**ODD, ALL: ALL}, "messages": [{"role": "user", "content": ALL}]}  # fmt: skip
    record._write([experience(2, 0, 0, 1.0, **more)])
    record.close()
    failed = Record(lines=buffer / "failed.jsonl")
    failed.write_lines([{"eid": "1/0/0/0", "step": 1, "prompt": ALL, "info": {"error": ALL}}])
    failed.close()
    JsonLinesMonitor(run / "monitor").hear(
        StepDone("explorer", 2, {f"rollout/reward/{ALL}/mean": 1.0})
    )
    client = TestClient(create_app(Page(run), "k"), headers={"authorization": "Bearer k"})

    def get(path: str, **query: str) -> Any:
        answer = client.get(f"/api/{path}", params={**RUN, **query})
        assert answer.status_code == 200, (path, answer.text)
        return answer

    shown = get("rollout", eid="2/0/0/0").json()
    assert shown["prompt"] == shown["messages"][0]["content"] == json.loads(json.dumps(ALL))
    assert get("tokens", eid="2/0/0/0").json()["ids"]
    assert get("rollouts", text="gone nowhere").json()["total"] == 0
    for text in ("plain", "a\0b", "\U0001f600"):
        assert get("rollouts", text=text).json()["total"] >= 1, text
    assert "ud83d" in get("export", kind="train", format="jsonl").text
    assert get("export", kind="train", format="parquet").content.startswith(b"PAR1")
    for path in ("runs", "curves", "about"):
        get(path)
    written = write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "end" in written


def test_a_selection_of_a_run_with_any_name_is_sent(folder: Path, tmp_path: Path) -> None:
    name = 'прогон "1"'
    shutil.copytree(folder, tmp_path / name)
    client = TestClient(create_app(Page(tmp_path), "open sesame"))
    client.get("/?token=open+sesame")
    answer = client.get("/api/export", params={"run": name, "format": "jsonl"})
    assert answer.status_code == 200 and answer.text
    header = answer.headers["content-disposition"]
    assert 'filename="______ _1__rollouts.jsonl"' in header
    assert f"filename*=UTF-8''{quote(name + '_rollouts.jsonl', safe='')}" in header


def test_a_rollouts_pictures_are_served_by_digest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shown = {b"\x89PNG rest": "image/png", b"\xff\xd8\xff rest": "image/jpeg"}
    seen = [
        Picture(data, hashlib.sha256(data).hexdigest(), 2, (1, 2, 4)) for data in (*shown, b"text")
    ]
    record = Record(lines=run / "buffer/experience_buffer.jsonl")
    record._write([experience(3, 9, n, 5.0, pictures=tuple(seen)) for n in (0, 1)])
    record.close()
    assert len([*(run / "buffer/pictures").iterdir()]) == 3  # once, however many show it
    client = TestClient(create_app(Page(run), "key"), headers={"authorization": "Bearer key"})
    row = client.get("/api/rollout?run=run&kind=train&eid=3/9/0/0").json()
    assert row["pictures"] == [each.digest for each in seen]
    for each in seen[:2]:
        answer = client.get(f"/api/picture?run=run&digest={each.digest}")
        assert (answer.status_code, answer.content) == (200, each.data)
        assert answer.headers["content-type"] == shown[each.data]
        assert answer.headers["x-content-type-options"] == "nosniff"
    for digest, said in (
        (seen[2].digest, "in a format that browsers do not show"),
        ("0" * 64, "is stored"),
        ("../experience_buffer.jsonl", "is stored"),
    ):
        answer = client.get("/api/picture", params={"run": "run", "digest": digest})
        assert answer.status_code == 400 and said in answer.json()["error"]


def test_a_note_is_taken_as_json_of_this_page_alone(client: TestClient) -> None:
    note = {"run": "run", "text": "good", "hidden": False}
    assert client.post("/api/note", json=note).status_code == 200
    (run,) = client.get("/api/runs").json()
    assert run["note"] == "good"
    assert client.post("/api/note", data={"run": "run", "text": "x"}).status_code == 415
    for wrong, code in (
        ({"text": 3}, 400),
        ({"run": "../run"}, 400),
        ({"text": "x" * 3000}, 400),
        ({"text": "x" * 30000}, 413),
    ):
        answer = client.post("/api/note", json=note | wrong)
        assert answer.status_code == code and answer.json()["error"]
    assert client.get("/api/note").status_code == 405
    assert client.get("/api/runs").json()[0]["note"] == "good"

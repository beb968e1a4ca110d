"""The data set of the games, and what is no game: needs no ALFWorld."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trireme.ext.alfworld.data import main
from trireme.ext.alfworld.game import check_game

GAME = {"pddl_domain": "", "grammar": "", "pddl_problem": ""}


def games(root: Path, **splits: int) -> Path:
    for split, count in splits.items():
        for number in range(count):
            folder = root / "json_2.1.1" / split / f"task-{number}" / "trial_1"
            folder.mkdir(parents=True)
            (folder / "game.tw-pddl").write_text(json.dumps(GAME))
    return root


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_data_set_names_every_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = games(tmp_path / "data", train=5, valid_seen=2)
    monkeypatch.setenv("ALFWORLD_DATA", str(root))
    out = tmp_path / "out"
    main(["--local_dir", str(out)])
    assert "5 train games, 2 test games" in capsys.readouterr().out
    found = rows(out / "train.jsonl")
    assert len(found) == 5 and all(set(row) == {"game_file", "target"} for row in found)
    assert all(Path(row["game_file"]).is_absolute() for row in found)
    splits = json.loads((out / "dataset_dict.json").read_text())["splits"]
    assert splits["test"] == {"name": "test", "num_examples": 2}


def test_a_sample_is_that_of_its_seed(tmp_path: Path) -> None:
    root = games(tmp_path / "data", train=8, valid_seen=1)
    drawn = []
    for name, seed in (("a", "42"), ("b", "42"), ("c", "7")):
        sizes = ["--train_size", "3", "--seed", seed, "--local_dir", str(tmp_path / name)]
        main(["--game_data_path", str(root), *sizes])
        drawn.append(rows(tmp_path / name / "train.jsonl"))
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 3


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (None, "ALFWORLD_DATA is not set: set it to the folder that holds json_2.1.1"),
        ("nowhere", "there is no such folder; set it to"),
        ("empty", "has no json_2.1.*/train/*/*/game.tw-pddl; set it to"),
    ],
)
def test_a_missing_folder_says_what_to_do(
    folder: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    if folder:
        monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / folder))
    with pytest.raises(SystemExit) as ended:
        main(["--local_dir", str(tmp_path / "out")])
    assert message in str(ended.value)


def test_more_games_than_there_are(tmp_path: Path) -> None:
    root = games(tmp_path / "data", train=2, valid_seen=1)
    with pytest.raises(
        SystemExit, match=r"3 games were requested for split train, and .* has 2 in train"
    ):
        main(["--game_data_path", str(root), "--train_size", "3", "--local_dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("game.tw-pddl", None, "there is no such file"),
        ("game.json", json.dumps(GAME), "expected a name that ends in .tw-pddl"),
        ("game.tw-pddl", "{", "is not JSON"),
        ("game.tw-pddl", json.dumps({"grammar": ""}), "lacks pddl_domain, pddl_problem"),
        ("game.tw-pddl", "[]", "lacks pddl_domain, grammar, pddl_problem"),
    ],
)
def test_what_is_no_game_is_named(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        check_game(str(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)

"""Make games: makes valid ALFWorld games of our own household problems, if the public ones are
missing.

The domain, the grammar and the goals are the installed package's; rooms, things and their places
are drawn here. All six task types are made; `valid_unseen` has rooms of other furniture than the
other splits. The layout of the folders is the public one, so that the same loader reads both.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.ext.alfworld.game import engine
from trireme.files import write_text
from trireme.text import say

TASKS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
OPENABLE = ("Fridge", "Cabinet", "Microwave", "Drawer", "Safe", "Box")
FURNITURE = {
    "seen": ("Cabinet", "CounterTop", "DiningTable", "Drawer", "Shelf", "SideTable"),
    "unseen": ("Cabinet", "CoffeeTable", "Desk", "Drawer", "Dresser", "TVStand"),
}
FOODS = ("Apple", "Bread", "Egg", "Potato", "Tomato")
THINGS = ("Book", "CD", "CreditCard", "KeyChain", "Pen", "Pencil", "RemoteControl", "Watch")
CLEANABLE = ("Apple", "Egg", "Potato", "Tomato", "Mug", "Plate")
"""Things that can be cleaned; with FOODS and Mug: those that can also be heated and cooled."""


@dataclass(frozen=True)
class Room:
    """A room with its things, and the task. Ids are in the simulator's form, already mangled."""

    task: str
    target: str
    goal: str
    receptacles: tuple[tuple[str, str], ...]
    """(type, id)"""
    objects: tuple[tuple[str, str, str], ...]
    """(type, id, id of the receptacle around it)"""

    @property
    def toggle(self) -> str:
        """Return the lamp of the task, if it is one about light."""
        return "DeskLamp" if self.task == "look_at_obj_in_light" else ""


def draw_room(
    task: str,
    rooms: str,
    source: random.Random,
    *,
    extra: int = 4,
    furniture: tuple[int, int] = (4, 6),
) -> Room:
    """Draw a solvable household for a task: the target is never at its goal.

    `extra` other things are in it; `furniture` is the fewest and the most pieces of it.
    """
    places = list(source.choices(FURNITURE[rooms], k=source.randint(*furniture)))
    if "clean" in task:
        places.append("SinkBasin")
    if "heat" in task:
        places.append("Microwave")
    if "cool" in task:
        places.append("Fridge")
    receptacles = tuple(
        (kind, _mangled(kind, number, source)) for number, kind in enumerate(places)
    )
    usual = [item for item in receptacles if item[0] in FURNITURE[rooms]]
    goal = source.choice(usual)[0]
    elsewhere = [item for item in usual if item[0] != goal]
    if len(elsewhere) < 2:
        return draw_room(task, rooms, source, extra=extra, furniture=furniture)
    if "clean" in task:
        target = source.choice(CLEANABLE)
    elif "heat" in task or "cool" in task:
        target = source.choice(FOODS)
    else:
        target = source.choice(THINGS)
    # two of a kind are separate: the handcoded expert gets lost if they are together
    wanted = [(target, name) for _, name in source.sample(elsewhere, 1 + ("two" in task))]
    if task == "look_at_obj_in_light":
        tables = [item for item in usual if item[0] not in OPENABLE] or usual
        wanted.append(("DeskLamp", source.choice(tables)[1]))
    others = [kind for kind in (*FOODS, *THINGS, "Mug", "Plate") if kind != target]
    wanted += [(source.choice(others), source.choice(usual)[1]) for _ in range(extra)]
    objects = tuple(
        (kind, _mangled(kind, 40 + number, source), place)
        for number, (kind, place) in enumerate(wanted)
    )
    return Room(task, target, goal, receptacles, objects)


def pddl_problem(home: Room, goal: str) -> str:
    """Return the problem in the domain's words. `goal` ends it."""
    place_of = {
        name: f"loc_bar_{i}_bar_1_bar_0_bar_30" for i, (_, name) in enumerate(home.receptacles)
    }
    start = "loc_bar_99_bar_1_bar_0_bar_30"
    kinds = {kind for kind, _, _ in home.objects}
    room_kinds = {kind for kind, _ in home.receptacles}
    declared = ["agent1 - agent"]
    declared += [f"{kind}Type - otype" for kind in sorted(kinds)]
    declared += [
        f"{kind}Type - rtype" for kind in sorted(room_kinds | {"SinkBasin", "Microwave", "Fridge"})
    ]
    declared += [f"{name} - object" for _, name, _ in home.objects]
    declared += [f"{name} - receptacle" for _, name in home.receptacles]
    declared += [f"{place} - location" for place in (*place_of.values(), start)]
    facts = [f"(atLocation agent1 {start})", "(= (total-cost) 0)"]
    for kind, name in home.receptacles:
        facts += [
            f"(receptacleType {name} {kind}Type)",
            f"(receptacleAtLocation {name} {place_of[name]})",
        ]
        facts += [f"(openable {name})"] * (kind in OPENABLE)
    for room in sorted(room_kinds):
        facts += [f"(canContain {room}Type {kind}Type)" for kind in sorted(kinds)]
    for kind, name, place in home.objects:
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {place})"]
        facts.append(f"(objectAtLocation {name} {place_of[place]})")
        if kind == "DeskLamp":
            facts.append(f"(toggleable {name})")
            continue
        facts.append(f"(pickupable {name})")
        facts += [f"(cleanable {name})"] * (kind in CLEANABLE)
        edible = kind in FOODS or kind == "Mug"
        facts += [f"(heatable {name})", f"(coolable {name})"] * edible
    lines = "\n    ".join
    return (
        f"(define (problem household)\n(:domain alfred)\n(:objects\n    {lines(declared)}\n)\n"
        f"(:init\n    {lines(facts)}\n)\n{goal}"
    )


def make_games(
    out: Path,
    split: str,
    count: int,
    seed: int,
    tasks: Sequence[str] = TASKS,
    *,
    extra: int = 4,
    furniture: tuple[int, int] = (4, 6),
) -> list[Path]:
    """Make `count` games of a split, the task types in turn; returns their files. See
    `draw_room`. Raises ValueError if the split has games of another making.
    """
    package = Path(engine("alfworld").__file__).parent / "data"
    domain, grammar = (package / "alfred.pddl").read_text(), (package / "alfred.twl2").read_text()
    gdict = engine("alfworld.gen.goal_library").gdict
    rooms = "unseen" if split == "valid_unseen" else "seen"
    source = random.Random(f"alfworld {seed} {split}")
    homes: dict[Room, str] = {}
    """What is said of its task, by room."""
    while len(homes) < count:
        task = tasks[len(homes) % len(tasks)]
        home = draw_room(task, rooms, source, extra=extra, furniture=furniture)
        if home not in homes:
            words = {"obj": home.target, "recep": home.goal, "toggle": home.toggle, "mrecep": ""}
            lower = {key: value.lower() for key, value in words.items()}
            homes[home] = source.choice(gdict[task]["templates"]).format(**lower)
    top = out / "json_2.1.1" / split
    folders = [
        top / _name(home, number) / f"trial_T{seed:04d}{number:06d}"
        for number, home in enumerate(homes)
    ]
    _refuse_others(top, folders)
    for (home, said), folder in zip(homes.items(), folders, strict=True):
        words = {"obj": home.target, "recep": home.goal, "toggle": home.toggle, "mrecep": ""}
        goal = gdict[home.task]["pddl"].format(**words).replace(" # ", " - ")
        problem = pddl_problem(home, goal)
        folder.mkdir(parents=True, exist_ok=True)
        params = {
            "object_target": home.target,
            "parent_target": home.goal if home.toggle == "" else "",
            "mrecep_target": "",
            "toggle_target": home.toggle,
            "object_sliced": False,
        }
        game = {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN GOAL", said),
            "pddl_problem": problem,
            "solvable": True,
            "walkthrough": None,
        }
        facts = {"task_type": home.task, "pddl_params": params}
        facts["turk_annotations"] = {"anns": [{"task_desc": said}]}
        write_text(folder / "traj_data.json", json.dumps(facts, indent=1))
        write_text(folder / "initial_state.pddl", problem)
        write_text(folder / "game.tw-pddl", json.dumps(game))
    return [folder / "game.tw-pddl" for folder in folders]


def _name(home: Room, number: int) -> str:
    parent = home.goal if home.task != "look_at_obj_in_light" else home.toggle
    return f"{home.task}-{home.target}-None-{parent}-{300 + number}"


def _refuse_others(top: Path, folders: Sequence[Path]) -> None:
    """Raise ValueError for games in a split's folder that are not about to be made again."""
    others = {game.parent for game in top.glob("*/*/game.tw-pddl")} - set(folders)
    if others:
        raise ValueError(
            f"{top} has {len(others)} other games, {min(others).relative_to(top)} for example, and "
            "a data set would mix them with the new ones: remove them, or name another folder"
        )


def _mangled(kind: str, number: int, source: random.Random) -> str:
    """Return an id in the simulator's form, in the characters that PDDL allows."""
    x, z, row = source.randint(0, 99), source.randint(0, 99), number % 9
    at = f"_plus_{number:02d}_dot_{x:02d}_bar__plus_00_dot_90_bar__minus_0{row}_dot_{z:02d}"
    return f"Sink_bar_{at}_bar_SinkBasin" if kind == "SinkBasin" else f"{kind}_bar_{at}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make games of all three splits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder that becomes $ALFWORLD_DATA")
    parser.add_argument("--train", type=int, default=300)
    parser.add_argument("--test", type=int, default=60, help="games of each of the two test splits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    options = parser.parse_args(arguments)
    if min(options.train, options.test) < 0:
        parser.error(f"--train {options.train}, --test {options.test}: expected no negative number")
    for split, count in (
        ("train", options.train),
        ("valid_seen", options.test),
        ("valid_unseen", options.test),
    ):
        try:
            made = make_games(options.out, split, count, options.seed, options.tasks)
        except ValueError as error:
            parser.error(str(error))
        say(f"{len(made)} games in {options.out / 'json_2.1.1' / split}")


if __name__ == "__main__":
    main()

"""The shop's pages, buttons and edge cases, with the texts written out."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("Stemmer", reason="PyStemmer is not installed: make test-extras runs these")
pytest.importorskip("rapidfuzz", reason="rapidfuzz is not installed: make test-extras runs these")

from tests.model.fake import make
from trireme.ext.webshop import catalogue
from trireme.ext.webshop.catalogue import (
    Goal,
    Product,
    chosen_goals,
    human_goals,
    load_products,
    synthetic_goals,
)
from trireme.ext.webshop.env import Shop, WebShopEnv, num_goals, open_shop
from trireme.ext.webshop.make_catalogue import make_catalogue
from trireme.ext.webshop.reward import simple_nouns
from trireme.ext.webshop.workflow import WebShopWorkflow
from trireme.task import Task
from trireme.workflows.workflow import resolve

TEXT = "i need a red lamp, and price lower than 30.00 dollars"
ITEMS = [
    {
        "asin": "B01",
        "name": "Alder Table Lamp",
        "full_description": "A lamp for the table.",
        "small_description": ["Easy to clean.", "Long lasting."],
        "pricing": "$10.99",
        "customization_options": {
            "Color": [{"value": "Red"}, {"value": " light/blue "}],
            "Size": None,
            "Note": [{"value": 'the "big" one'}],
        },
        "category": "home",
        "query": " Table Lamps ",
        "product_category": "Home › Light › Lamps",
    },
    {"asin": "B02", "name": "Brimo Desk Lamp", "small_description": "Red.", "pricing": None,
     "customization_options": "", "category": "home", "query": "desk lamps",
     "product_category": "Home › Light"},
    {"asin": "B02", "name": "again"},
    {"asin": "nan", "name": "none"},
    {"asin": "B0123456789", "name": "too long"},
    *({"asin": f"C{i:02}", "name": f"Castel Rug {i}", "pricing": "$9.99 - $19.99",
       "category": "rugs", "query": "rugs", "product_category": "Home › Rugs"} for i in range(12)),
]  # fmt: skip
ABOUT = {"B01": {"attributes": ["easy to clean"], "instruction": "i need a lamp",
                 "instruction_attributes": ["easy to clean"]}}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    human = {
        "B01": [
            {"instruction": "i need a red lamp.", "instruction_attributes": ["easy to clean"],
             "instruction_options": ["red"]},
            {"instruction": "nothing", "instruction_attributes": []},
        ]
    }  # fmt: skip
    for name, held in (
        ("items_shuffle_9.json", ITEMS), ("items_ins_v2_9.json", ABOUT),
        ("items_human_ins.json", human),
    ):  # fmt: skip
        (tmp_path / name).write_text(json.dumps(held))
    return tmp_path


@pytest.fixture
def env(folder: Path) -> WebShopEnv:
    products = load_products(folder / "items_shuffle_9.json", folder / "items_ins_v2_9.json")
    goal = Goal("B01", "home", "table lamps", "Alder Table Lamp", "Home › Light › Lamps", TEXT,
                ("easy to clean",), 30.0, ("red",))  # fmt: skip
    made = WebShopEnv(Shop(products, [goal], simple_nouns))
    made.reset(session=0)
    return made


HEAD = f"Instruction:\n{TEXT}\n[button] Back to Search [button_]\n"


def test_products_are_read_by_the_rules_of_the_original(folder: Path) -> None:
    products = load_products(folder / "items_shuffle_9.json", folder / "items_ins_v2_9.json")
    first, second, *rugs = products
    assert [p.asin for p in products[:2]] == ["B01", "B02"] and len(rugs) == 12
    assert first.options == {"color": ("red", "light | blue"), "note": ('the "big" one',)}
    assert first.query == "table lamps" and first.price_tag == "$10.99" and first.price == 10.99
    assert second.bullets == ("Red.",) and second.attributes == ("DUMMY_ATTR",)
    assert (second.price_tag, second.price) == ("$100.0", 100.0)
    assert rugs[0].price_tag == "$9.99 to $19.99" and 9.99 <= rugs[0].price <= 19.99


def test_goals_are_those_of_their_seed_and_the_global_state_is_left_alone(folder: Path) -> None:
    random.seed(1)
    before = random.getstate()
    products = load_products(folder / "items_shuffle_9.json", folder / "items_ins_v2_9.json")
    (goal,) = human_goals(products, folder / "items_human_ins.json", seed=1)
    assert [goal] == human_goals(products, folder / "items_human_ins.json", seed=1)
    assert random.getstate() == before
    assert goal.instruction_text.startswith("i need a red lamp, and price lower than ")
    assert goal.price_upper in (30.0, 40.0, 50.0) and goal.goal_options == ("red",)
    goals = synthetic_goals(products)
    assert {tuple(g.goal_options.values()) for g in goals} == {  # type: ignore[union-attr]
        ("red", 'the "big" one'), ("light | blue", 'the "big" one'),
    }  # fmt: skip
    assert all(g.weight == 0.5 for g in goals)  # the attribute is in two goals
    texts = [g.instruction_text for g in goals]
    assert any(t.startswith("i need a lamp with color: red, and note: the") for t in texts)
    assert len({g.price_upper for g in goals}) == 1  # one limit a product


def test_goals_are_the_original_s_after_the_same_seed(folder: Path) -> None:
    # the original draws from the global source: a price for each range, and then the limits
    random.seed(5)
    prices = [random.uniform(9.99, 19.99) for _ in range(12)]
    limit = max(random.sample([20, 30, 40, 50], 2))
    shop = open_shop(str(folder), seed=5)
    assert [p.price for p in shop.products[2:]] == prices
    assert shop.goals[0].instruction_text.endswith(f"lower than {limit}.00 dollars")


def test_goals_are_shuffled_kept_and_drawn_as_the_original_does() -> None:
    goals = [Goal("B", "", "", str(i), "", "", (), 1.0, (), float(i)) for i in range(9)]
    order = list(range(9))
    random.seed(233)
    random.shuffle(order)
    assert [int(g.name) for g in chosen_goals(goals)] == order
    even = chosen_goals(goals, lambda number, goal: number % 2 == 0)
    assert [int(g.name) for g in even] == order[::2]
    steps = [0.0]  # the original's own way, with the global source after its shuffle
    for number in order:
        steps.append(steps[-1] + number)
    drawn: list[int] = []
    while len(drawn) < 4:
        place = random.uniform(0, steps[-1])
        number = min(sum(step <= place for step in steps), len(steps) - 2)
        drawn += [number] if number not in drawn else []
    assert [int(g.name) for g in chosen_goals(goals, limit_goals=4)] == [order[n] for n in drawn]
    assert len(chosen_goals(goals, limit_goals=99)) == 9


def test_a_shop_may_have_fewer_products_and_goals(folder: Path) -> None:
    assert [p.asin for p in open_shop(str(folder), num_products=3).products] == ["B01", "B02"]
    assert len(open_shop(str(folder), human=False).goals) == 2
    assert len(open_shop(str(folder), human=False, limit_goals=1).goals) == 1
    with pytest.raises(ValueError, match="limit_goals=0 leave no goal"):
        open_shop(str(folder), limit_goals=0)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"human": False}, {"human": False, "limit_goals": 1}, {"limit_goals": 99}),
        *({"num_products": 3}, {"human": False, "num_products": 1}),
    ],
)
def test_goals_are_counted_without_opening_the_shop(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"human_goals" if key == "human" else key: value for key, value in options.items()}
    args["data"] = str(folder)
    goals = len(open_shop(str(folder), **options).goals)
    assert num_goals(str(folder), **options) == goals
    monkeypatch.setattr(catalogue, "_product", None)  # which would take the most time
    num_goals.cache_clear()
    WebShopWorkflow.examine(Task({"prompt": goals - 1}, workflow_args=args))
    with pytest.raises(ValueError, match=f"the shop has {goals} goals: expected a session from 0"):
        WebShopWorkflow.examine(Task({"prompt": goals}, workflow_args=args))


def test_a_shop_that_cannot_be_opened_has_no_count(folder: Path) -> None:
    for options in ({"limit_goals": 0}, {"num_products": 0}, {"nouns": "no_such_model"}):
        said = []
        for look in (open_shop, num_goals):
            with pytest.raises(ValueError) as raised:
                look(str(folder), **options)
            said.append(str(raised.value).replace("leaves", "leave")[-40:])
        assert said[0] == said[1]


def test_the_first_page_and_the_results(env: WebShopEnv) -> None:
    assert env.reset(session=0)[0] == (
        f"WebShop\nInstruction: \n{TEXT}\n[button] Search [button_]\n"
    )
    assert env.get_available_actions() == {"has_search_bar": True, "clickables": ["search"]}
    seen, reward, done, _ = env.step("search[Lamp]")
    assert seen == (
        f"{HEAD}Page 1 (Total results: 2)\n[button] Next > [button_]\n"
        "\n[button] B02 [button_]\nBrimo Desk Lamp\n$100.0\n"
        "\n[button] B01 [button_]\nAlder Table Lamp\n$10.99\n"
    )
    assert (reward, done) == (0, False)
    assert env.get_available_actions() == {
        "has_search_bar": False,
        "clickables": ["back to search", "next >", "b02", "b01"],
    }


def test_pages_of_ten_that_go_on_past_the_end(env: WebShopEnv) -> None:
    assert "Page 1 (Total results: 12)" in env.step("search[rug]")[0]
    second = env.step("click[Next >]")[0]
    assert "Page 2 (Total results: 12)\n[button] < Prev [button_]\n[button] Next >" in second
    assert second.count("Castel Rug") == 2
    third = env.step("click[next >]")[0]
    assert third == (
        f"{HEAD}Page 3 (Total results: 12)\n[button] < Prev [button_]\n[button] Next > [button_]\n"
    )
    assert env.step("click[< prev]")[0] == second


def test_an_item_its_options_and_its_pages(env: WebShopEnv) -> None:
    env.step("search[lamp]")
    item = env.step("click[b01]")[0]
    prev = "[button] < Prev [button_]\n"
    tail = (
        "Alder Table Lamp\nPrice: $10.99\nRating: N.A.\n[button] Description [button_]\n"
        "[button] Features [button_]\n[button] Reviews [button_]\n[button] Buy Now [button_]\n"
    )
    assert item == (
        f"{HEAD}{prev}color\n  [button] red [button_]\n  [button] light | blue [button_]\n"
        f'note\n  [button] the "big" one [button_]\n{tail}'
    )
    assert env.get_available_actions()["clickables"] == [
        "back to search", "< prev", "description", "features", "reviews", "buy now",
        "red", "light | blue", 'the "big" one',
    ]  # fmt: skip
    chosen = env.step("click[red]")[0]
    assert chosen.startswith("You have clicked red.\nInstruction:")
    assert "  [clicked button] red [clicked button_]\n" in chosen
    other = env.step("click[light | blue]")[0]
    assert "You have clicked light | blue." in other and "[button] red [button_]" in other
    # a value with quotes counts, and never shows
    assert "clicked the" not in env.step('click[the "big" one]')[0]
    assert env.session.options == {"color": "light | blue", "note": 'the "big" one'}
    assert env.step("click[description]")[0] == f"{HEAD}{prev}A lamp for the table.\n"
    assert env.get_available_actions()["clickables"] == ["back to search", "< prev"]
    assert env.step("click[< prev]")[0] == f"You have clicked light | blue.\n{item}".replace(
        "[button] light | blue [button_]", "[clicked button] light | blue [clicked button_]"
    )
    assert env.step("click[features]")[0] == f"{HEAD}{prev} Easy to clean.\n Long lasting.\n"
    env.step("click[< prev]")
    assert env.step("click[reviews]")[0] == HEAD + prev
    env.step("click[< prev]")
    results = env.step("click[< prev]")[0]
    assert env.session.options == {} and "[clicked button] B01 [clicked button_]" in results
    assert "clicked" not in (env.step("click[back to search]")[0], env.step("search[lamp]")[0])[1]


@pytest.mark.parametrize(
    "action",
    ["search", "search[]", "click[]", "Search[lamp]", "click[search]", "click[nothing]",
     "search[lamp][x]", "hello", "", "buy[now]"],
)  # fmt: skip
def test_what_is_no_action_changes_nothing(action: str, env: WebShopEnv) -> None:
    before = env.reset(session=0)[0]
    assert env.step(action) == (before, 0, False, None)


def test_actions_are_read_as_the_original_reads_them(env: WebShopEnv) -> None:
    assert "Total results: 2" in env.step("search[LAMP] and more")[0]
    assert "Total results: 0" in env.step("search[ ]")[0]
    env.step("search[lamp]")
    env.step("click[b01]")
    env.step("click[red]")
    assert "Total results: 12" in env.step("search[rug]")[0]  # from any page; options are gone
    assert env.session.options == {}
    assert "Total results: 12" in env.step("search[<c> rugs]")[0]
    assert "Total results: 1)" in env.step("search[<q> desk lamps ]")[0]
    assert "Total results: 1)" in env.step("search[<a> easy to clean]")[0]
    assert "Total results: 14" in env.step("search[<r>]")[0]
    drawn = [env.step(action)[0] for action in ("click[next >]", "click[< prev]", "search[<r>]")]
    assert len({*drawn}) == 3  # every page is drawn anew


def test_a_button_goes_before_an_option_of_its_name(env: WebShopEnv) -> None:
    odd = Product("C99", "Odd", "It is odd.", (), "$1.0", 1.0,
                  {"size": ("features", "next >", "", "red"), "color": ("red",)},
                  (), "", "", "")  # fmt: skip
    shop = WebShopEnv(Shop([*env.shop.products, odd], env.shop.goals))
    shop.reset(session=0)
    shop.step("search[odd]")
    page = shop.step("click[c99]")[0]
    assert (
        "size\n  [button] features [button_]\n  [button] next > [button_]\n  [button] red" in page
    )
    assert shop.get_available_actions()["clickables"] == [
        "back to search", "< prev", "description", "features", "reviews", "buy now",
        "next >", "", "red",
    ]  # fmt: skip
    shop.step("click[next >]")
    shop.step("click[red]")
    assert shop.session.options == {"size": "next >", "color": "red"}  # the last option has it
    assert shop.step("click[features]")[0] == HEAD + "[button] < Prev [button_]\n"


def test_the_page_of_attributes_is_there_where_it_is_asked_for(env: WebShopEnv) -> None:
    shown = WebShopEnv(env.shop, show_attrs=True)
    shown.reset(session=0)
    shown.step("search[lamp]")
    page = shown.step("click[b01]")[0]
    assert "[button] Reviews [button_]\n[button] Attributes [button_]\n[button] Buy Now" in page
    assert shown.step("click[attributes]")[0] == (
        f"{HEAD}[button] < Prev [button_]\n easy to clean\n"
        "home\ntable lamps\nHome › Light › Lamps\n"
    )
    env.step("search[lamp]")
    env.step("click[b01]")
    assert "attributes" not in env.get_available_actions()["clickables"]


def test_a_purchase_pays_once_and_ends_the_session(env: WebShopEnv) -> None:
    for action in ("search[lamp]", "click[b01]", "click[red]"):
        assert env.step(action)[1:3] == (0, False)
    seen, reward, done, _ = env.step("click[buy now]")
    assert (reward, done) == (1.0, True)
    assert seen == (
        "Thank you for shopping with us!\nYour code: \nNone\n (Paste it in your MTurk interface.)\n"
        'Purchased\nasin\nB01\noptions\n{"color": "red"}\n'
        "attrs\nNone\ncategory\nNone\nquery\nNone\nproduct category\nNone\n"
        "Target\nasin\noptions\nattrs\nprice upper\ninstuction text\n"
        "category\nproduct category\nquery\nGoal \nNone\nReward\n"
        "Your score (min 0.0, max 1.0)\n1.0\nReward Details \nNone\n"
    )
    assert env.session.reward_info == {
        "r_type": 1.0, "query_match": True, "category_match": True, "title_score": 1.0,
        "r_att": 1.0, "w_att": 1 / 3, "r_option": 1.0, "w_option": 1 / 3, "r_price": True,
        "w_price": 1 / 3,
    }  # fmt: skip
    assert env.get_available_actions() == {"has_search_bar": False, "clickables": []}
    assert env.step("search[lamp]") == (seen, 0, False, None)
    assert "Search" in env.reset(session=0)[0]


def test_the_page_after_a_purchase_escapes_what_html_would_read(env: WebShopEnv) -> None:
    odd = Product("C99", "Odd", "", (), "$1.0", 1.0, {"for": ("men's & <boys>",)}, (), "", "", "")
    shop = WebShopEnv(Shop([odd], env.shop.goals), observation_mode="html")
    shop.reset(session=0)
    for action in ("search[odd]", "click[c99]", "click[men's & <boys>]", "click[buy now]"):
        seen, reward, done, _ = shop.step(action)
    assert r'{"for": "men\u0027s \u0026 \u003cboys\u003e"}' in Parsed(seen).texts
    assert (reward, done) == (0.0, True)  # another kind of product


def test_options_with_signs_of_html_can_be_clicked(env: WebShopEnv) -> None:
    odd = Product("C99", "<b>Odd</b>", "", (), "$1.0", 1.0, {"for": ("a & b",)}, (), "", "", "")
    shop = WebShopEnv(Shop([odd], env.shop.goals), observation_mode="html")
    shop.reset(session=0)
    shop.step("search[odd]")
    found = Parsed(shop.step("click[c99]")[0])
    assert "<b>Odd</b>" in found.texts and list(found.options) == ["a & b"]


def test_text_mode_and_earlier_pages(env: WebShopEnv) -> None:
    plain = WebShopEnv(env.shop, observation_mode="text", num_prev_obs=1, num_prev_actions=1)
    first = plain.reset(session=0)[0]
    assert first == f"WebShop [SEP] Instruction: [SEP] {TEXT} [SEP] Search"
    seen = plain.step("search[desk]")[0]
    assert seen.startswith(f"{first} [SEP] search[desk] [SEP] Instruction: [SEP] {TEXT}")
    with pytest.raises(ValueError, match="'image': expected text, text_rich, html, url"):
        WebShopEnv(env.shop, observation_mode="image")  # type: ignore[arg-type]


def test_addresses_are_the_original_s(env: WebShopEnv) -> None:
    shop = WebShopEnv(env.shop, observation_mode="url", session_prefix="x")
    at, shown = "http://127.0.0.1:3000", []
    shown.append(shop.reset(session=0)[0])
    for action in (
        "search[Table lamp]", "click[next >]", "click[< prev]", "click[b01]", "click[red]",
        "click[features]", "click[< prev]", "click[buy now]",
    ):  # fmt: skip
        shown.append(shop.step(action)[0])
    item = f"{at}/item_page/x0/B01/table+lamp/1"
    assert shown == [
        f"{at}/x0",
        f"{at}/search_results/x0/table+lamp/1",
        f"{at}/search_results/x0/table+lamp/2",
        f"{at}/search_results/x0/table+lamp/1",
        item + "/{}",
        item + '/{"color": "red"}',
        f"{at}/item_sub_page/x0/B01/table+lamp/1/Features/{{'color': 'red'}}",
        item + '/{"color": "red"}',
        f"{at}/done/x0/B01/{{'color': 'red'}}",
    ]


def test_an_option_in_quotes_in_the_query_shows_as_clicked(env: WebShopEnv) -> None:
    env.step('search["red" lamp]')
    assert env.step("click[b01]")[0].startswith("You have clicked red.\n")  # it is in the address
    assert env.session.options == {}


class Parsed(HTMLParser):
    """Texts and things to click, read from a page as the original reads its own."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.clickables: dict[str, None] = {}
        self.options: dict[str, None] = {}
        self.ids: set[str] = set()
        self._tags: list[dict[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        have = dict(attrs)
        self.ids |= {have["id"] or ""} if "id" in have else set()
        if tag == "input" and have["type"] == "radio":
            self.options[have["value"] or ""] = None
        if tag not in ("input", "br"):
            self._tags.append({"tag": tag, **have})

    def handle_endtag(self, tag: str) -> None:
        assert self._tags.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        if not self._tags or self._tags[-1]["tag"] == "title" or not data.strip():
            return
        self.texts.append(data)
        if self._tags[-1].get("class") in ("btn", "product-link"):
            self.clickables[data.lower()] = None


def test_pages_of_html_say_the_same(env: WebShopEnv) -> None:
    shop = WebShopEnv(env.shop, observation_mode="html", show_attrs=True)
    said = WebShopEnv(env.shop, observation_mode="text", show_attrs=True)
    pages = [(shop.reset(session=0)[0], said.reset(session=0)[0])]
    clickables = [shop.get_available_actions()]
    for action in (
        "search[lamp]", "click[b01]", 'click[the "big" one]', "click[features]", "click[< prev]",
        "click[attributes]", "click[< prev]", "click[buy now]",
    ):  # fmt: skip
        pages.append((shop.step(action)[0], said.step(action)[0]))
        assert shop.state["html"] == pages[-1][0]
        clickables.append(shop.get_available_actions())
    for (page, text), can in zip(pages, clickables, strict=True):
        found = Parsed(page)
        assert " [SEP] ".join(t.strip() for t in found.texts) == text
        assert list(found.clickables | found.options) == can["clickables"]
        assert ("search_input" in found.ids) == can["has_search_bar"]
    assert shop.instruction_text == f"Instruction: {TEXT}"
    assert shop.state["url"].startswith("http://127.0.0.1:3000/done/0/B01/")
    shop.reset(session=0, instruction_text="buy")
    assert shop.state["instruction_text"] == "buy" and TEXT in shop.state["html"]


def test_sessions(env: WebShopEnv) -> None:
    with pytest.raises(IndexError, match="session 1: the shop has 1 goals"):
        env.reset(session=1)
    assert env.reset(session="anna")[0] == env.reset()[0]  # only one goal to draw
    assert "0" in env.shop.sessions and "anna" in env.shop.sessions
    assert env.reset(session=-1)[0] == env.reset(session=0)[0]  # from the end


def test_a_session_keeps_its_goal_and_forgets_the_rest(env: WebShopEnv) -> None:
    goals = [replace(env.shop.goals[0], instruction_text=f"goal {i}") for i in range(30)]
    one, other = (WebShopEnv(Shop(env.shop.products, goals, seed=2)) for _ in range(2))
    first = one.reset(session="anna")[0]
    one.step("search[lamp]")
    one.step("click[b01]")
    assert one.reset(session="anna")[0] == first == other.reset(session="anna")[0]
    assert one.session.options == {} and one.session.visited == set()
    drawn = {one.reset()[0] for _ in range(200)}
    assert len(drawn) == 29 and not any("goal 0\n" in page for page in drawn)
    prefixed = WebShopEnv(one.shop, session_prefix="x", session=3)
    assert "goal 3\n" in prefixed.reset()[0] and "x3" in one.shop.sessions


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (None, "WEBSHOP_DATA is not set: set it to the folder with items_shuffle"),
        ("nowhere", "there is no such folder; set it to"),
        ("empty", r"it has no items_shuffle\*.json; set it to"),
    ],
)
def test_a_missing_folder_says_what_to_do(
    make_it: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        open_shop(str(tmp_path / make_it) if make_it else None)


def test_a_file_that_is_wrong_is_named(folder: Path) -> None:
    (folder / "bad.json").write_text("[{}]")
    with pytest.raises(ValueError, match=r"bad.json: product 0 has no 'asin' or no 'name'"):
        load_products(folder / "bad.json", folder / "items_ins_v2_9.json")
    with pytest.raises(ValueError, match=r"items_shuffle_9.json: expected a dict, found list"):
        load_products(folder / "bad.json", folder / "items_shuffle_9.json")


def test_a_made_catalogue_is_read_by_the_same_loader_and_can_be_bought_right(
    tmp_path: Path,
) -> None:
    make_catalogue(tmp_path, 60, seed=4)
    shop = open_shop(str(tmp_path))
    assert len(shop.products) == len(shop.goals) == 60
    perfect = 0
    for number, goal in enumerate(shop.goals):
        env = WebShopEnv(shop)
        env.reset(session=number)
        env.step(f"search[{goal.name}]")
        env.step(f"click[{goal.asin}]")
        for value in goal.goal_options:
            env.step(f"click[{value}]")
        reward, done = env.step("click[buy now]")[1:3]
        assert done and reward > 0
        perfect += reward == 1.0
    assert perfect >= 54  # a drawn price limit may lie below the drawn price of a range


def test_the_workflow_shops(tmp_path: Path) -> None:
    make_catalogue(tmp_path, 40, seed=4)
    goal = open_shop(str(tmp_path)).goals[3]
    actions = ["click[next >]", f"search[{goal.name}]", "search[x]", f"click[{goal.asin}]"]
    actions += [f"click[{value}]" for value in goal.goal_options] + ["click[buy now]"]
    replies = iter([f"<think>so</think><action>{action}</action>" for action in actions])

    async def main() -> Any:
        task = Task({"prompt": 3}, workflow_args={"data": str(tmp_path)})
        spec = resolve("webshop_workflow")
        return await spec.call(task, make(replies, max_model_len=16000), 1, 0)

    (e,) = asyncio.run(main())
    assert e.reward == 1.0 and e.metrics["actual_env_steps"] == len(actions)
    said = [m["content"] for m in e.messages or [] if m["role"] == "user"]
    assert said[1].startswith("Observation: There is nothing called 'next >' here.")
    assert said[3] == "Observation: This page has no search bar."


def test_the_workflow_hands_its_arguments_to_the_shop(folder: Path) -> None:
    actions = ["search[lamp]", "click[b01]", "click[attributes]"]
    replies = iter([f"<action>{action}</action>" for action in actions])

    async def main() -> Any:
        args = {"data": str(folder), "num_products": 3, "nouns": "simple", "show_attrs": True,
                "human_goals": False, "limit_goals": 1, "observation_mode": "text",
                "max_env_steps": 3}  # fmt: skip
        task = Task({"prompt": 0}, workflow_args=args)
        return await resolve("webshop_workflow").call(
            task, make(replies, max_model_len=16000), 1, 0
        )

    (e,) = asyncio.run(main())
    said = [m["content"] for m in e.messages or [] if m["role"] == "user"]
    assert said[0].startswith("Observation: WebShop [SEP] Instruction: [SEP] i need a lamp with")
    assert "Page 1 (Total results: 2)" in said[1] and "[SEP] Attributes [SEP]" in said[2]
    assert e.reward == -0.1  # nothing was bought


def test_a_misspelt_option_of_the_workflow_is_refused() -> None:
    spec = resolve("webshop_workflow")
    args = {"original": "auto", "num_products": 100, "observation_mode": "text", "nouns": "simple"}
    spec.refuse_unused(Task({"prompt": 0}, workflow_args=args))
    for wrong in ({"human_goal": False}, {"observation_mode": "rich"}, {"max_env_steps": "many"}):
        with pytest.raises(ValueError, match=f"workflow_args.*{next(iter(wrong))}"):
            spec.refuse_unused(Task({"prompt": 0}, workflow_args=wrong))


def test_a_shop_without_products_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    examine = resolve("webshop_workflow").examine
    assert examine is not None
    with pytest.raises(ValueError, match=r"WEBSHOP_DATA is not set: set it"):
        examine(Task({"prompt": 0}))
    task = Task({"prompt": 0}, workflow_args={"data": str(tmp_path)})
    with pytest.raises(ValueError, match="it has no items_shuffle"):
        examine(task)
    make_catalogue(tmp_path, 3, 0)
    examine(task)
    for number in (3, -1):
        with pytest.raises(ValueError, match=rf"is {number}, and the shop has 3 goals: .* 0 to 2"):
            examine(Task({"prompt": number}, workflow_args={"data": str(tmp_path)}))


def test_the_prompt_has_the_number_of_actions_of_the_yaml() -> None:
    def prompt_of(row: dict[str, Any], **args: Any) -> str:
        task = Task(
            {"prompt": 0, **row}, format_args={"system_prompt_key": "system"}, workflow_args=args
        )
        return resolve("webshop_workflow").code(task=task, model=None).system_prompt

    assert "within 15 actions" in prompt_of({})
    assert "within 40 actions" in prompt_of({}, max_env_steps=40)
    assert prompt_of({"system": "Buy within 15 actions."}, max_env_steps=40).endswith("15 actions.")

"""Picture ids: they follow from the picture, and carry no other one's."""

from __future__ import annotations

import hashlib
import json

import pytest

from trireme.batch import flatten, of_tokens
from trireme.experience import Experience
from trireme.pictures import (
    BEGIN,
    MOST_KNOWN,
    MOST_TOKENS,
    KnownPictures,
    Picture,
    album,
    as_json_messages,
    first_of,
    images_of,
    placed,
    shown,
    tagged,
    with_images,
    with_placeholders,
)
from trireme.serialize import decode, encode, experience_of_wire, experience_to_wire


def made(name: str, tokens: int = 3) -> Picture:
    data = name.encode()
    return Picture(data, hashlib.sha256(data).hexdigest(), tokens, (1, 2, 2 * tokens))


def test_ids_follow_from_the_digest_and_fit_64_bits() -> None:
    ids = list(made("a").ids)
    assert ids == list(made("a").ids) and not set(ids) & set(made("b").ids)
    highest = Picture(b"", "f" * 64, MOST_TOKENS, (1, 1, 1))
    assert ids[0] >= BEGIN and highest.ids[-1] < 2**63
    assert {first_of(token) for token in highest.ids} == {highest.first}


def test_two_pictures_with_one_number_are_refused() -> None:
    one, other = (Picture(b"", "ab" * 6 + end * 52, 2, (1, 2, 4)) for end in "01")
    assert one.first == other.first
    with pytest.raises(ValueError, match="would have the same token ids"):
        album([one, other])


def test_a_picture_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 16385 tokens: expected 1 to 16384"):
        made("a", MOST_TOKENS + 1)


def test_pictures_are_placed_and_taken_out_again() -> None:
    a, b = made("a"), made("b", 2)
    ids = placed([5, 9, 6, 9, 7], [a, b], 9)
    assert ids == [5, *a.ids, 6, *b.ids, 7]
    assert with_placeholders(ids, 9) == [5, 9, 6, 9, 7]
    assert with_placeholders([*a.ids, *a.ids, *b.ids], 9) == [9, 9, 9]
    assert with_placeholders([*a.ids][1:], 9) == [9]  # cut in its middle
    assert list(shown(ids, album([a, b]))) == [a.first, b.first]
    with pytest.raises(ValueError, match="did not come with it"):
        shown(ids, album([a]))
    with pytest.raises(ValueError, match="has 1 pictures, and its text has 2 places"):
        placed([5, 9, 9], [a], 9)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("What?", "iit"),
        ("<image>What?", "iit"),
        ("This <image> and that <image>", "titi"),
        ("<image><image>", "ii"),
    ],
)
def test_images_take_the_places_of_their_tags(text: str, kinds: str) -> None:
    images = ["one", "two"]
    [message] = with_images(tagged([{"role": "user", "content": text}], images), images)
    parts = message["content"]
    assert "".join(part["type"][0] for part in parts) == kinds
    assert [part["image"] for part in parts if part["type"] == "image"] == images


def test_more_tags_than_images_are_refused() -> None:
    chat = [{"role": "user", "content": "<image><image>"}]
    for function in (tagged, with_images):
        with pytest.raises(ValueError, match=r"2 tags <image>, and (its row )?1 pictures"):
            function(chat, ["one"])


def test_images_go_to_the_messages_that_have_tags_and_the_rest_to_the_first_of_the_user() -> None:
    chat = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "And <image>?"},
    ]
    images = ["one", "two"]
    seen = with_images(tagged(chat, images), images)
    assert [m["content"] if isinstance(m["content"], str) else "i" for m in seen] == [
        *("Look.", "i", "Red.", "i")
    ]
    assert seen[1]["content"][0]["image"] == "one" and seen[3]["content"][1]["image"] == "two"
    # an image of a later turn does not move those of earlier ones
    more = with_images(tagged(chat, images), [*images, "three"])
    assert more == seen


def test_parts_without_a_source_are_filled_from_the_row() -> None:
    """As rows of TRL and Hugging Face have them."""
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    chat = [{"role": "user", "content": parts}]
    images = ["one", "two", "three"]
    [seen] = with_images(tagged(chat, images[:2]), images[:2])
    assert [part.get("image") for part in seen["content"]] == ["one", None, "two"]
    [seen] = with_images(tagged(chat, images), images)  # the surplus comes first
    assert [part.get("image") for part in seen["content"]] == ["one", "two", None, "three"]
    with pytest.raises(ValueError, match="2 tags <image>, and its row 1 pictures"):
        tagged(chat, ["one"])
    with pytest.raises(ValueError, match="no message of the user shows them"):
        tagged([{"role": "system", "content": "Look."}], ["one"])


def test_images_of_a_row() -> None:
    row = {"images": ["a", "b"], "image": None, "photo": "c"}
    assert images_of(row, None) == ["a", "b"] and images_of(row, "photo") == ["c"]
    assert images_of({"images": []}, None) == images_of({}, None) == []


def test_experiences_keep_their_pictures_once_in_bytes() -> None:
    a = made("a" * 1000)
    rows = [Experience([1, *a.ids, 2, 3], prompt_length=5, pictures=[a]) for _ in range(4)]
    data = encode(rows)
    assert data.count(b"a" * 1000) == 1
    again = decode(data)
    assert [e.tokens.tolist() for e in again] == [e.tokens.tolist() for e in rows]
    assert all(e.pictures == (a,) for e in again)
    text = decode(encode([Experience([1, 2], prompt_length=1)]))[0]
    assert text.pictures == ()


def test_experiences_keep_their_pictures_in_json() -> None:
    a = made("a")
    sent = Experience([1, *a.ids, 2], prompt_length=4, pictures=[a])
    wire = json.loads(json.dumps(experience_to_wire(sent)))
    received = experience_of_wire(wire)
    assert received.pictures == (a,) and received.tokens.equal(sent.tokens)
    del wire["pictures"]  # of an earlier version's server
    assert experience_of_wire(wire).pictures == ()


def test_ids_that_are_neither_text_nor_picture_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected less than 2\*\*31"):
        encode([Experience([1, 2**40], prompt_length=1)])


def test_a_pictures_tokens_are_not_trained_and_not_without_it() -> None:
    a = made("a")
    tokens = [1, *a.ids, 2]
    with pytest.raises(ValueError, match="trains a token of a picture"):
        flatten([Experience(tokens, prompt_length=1, pictures=[a])])
    with pytest.raises(ValueError, match="a picture that is not among its `pictures`"):
        flatten([Experience(tokens, prompt_length=4)])
    batch = of_tokens([tokens], pictures=[a])
    assert batch.targets.tolist() == [2] and dict(batch.pictures) == {a.first: a}


def test_what_another_side_has_is_forgotten_past_a_number() -> None:
    known, all_of_them = KnownPictures(), [made(str(n)) for n in range(MOST_KNOWN + 2)]
    assert known.lacking([all_of_them[0]] * 2) == [all_of_them[0]]
    known.add(all_of_them)
    assert known.lacking(all_of_them) == all_of_them[:2]


def test_messages_name_pictures_by_digest() -> None:
    a = made("a")
    chat = [{"role": "user", "content": [{"type": "image", "image": a}]}]
    assert as_json_messages(chat)[0]["content"][0] == {
        **{"type": "image", "image": f"sha256:{a.digest}"}
    }

"""Mailbox: e-mails in an SQLite file, searched by words, and a generator of small ones.

The tables are those of ART-E's Enron database: `emails`, `recipients`, and the index `emails_fts`.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from trireme.envs.env import write_splits
from trireme.text import say

MOST = 10
"""E-mails that a search finds at most."""
_TABLES = """
CREATE TABLE emails (id INTEGER PRIMARY KEY, message_id TEXT UNIQUE, subject TEXT,
    from_address TEXT, date TEXT, body TEXT);
CREATE TABLE recipients (email_id INTEGER, recipient_address TEXT, recipient_type TEXT);
CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, content='emails', content_rowid='id');
CREATE INDEX recipients_of ON recipients (recipient_address, email_id);
"""
_OWNED = (
    "(e.from_address = ? OR EXISTS (SELECT 1 FROM recipients r"
    " WHERE r.email_id = e.id AND r.recipient_address = ?))"
)


@dataclass(frozen=True)
class Email:
    """One message."""

    message_id: str
    subject: str
    sender: str
    to: tuple[str, ...]
    date: str
    body: str


class Mailbox:
    """The mail that one person sent and received, from the file with everyone's."""

    def __init__(self, file: Path, owner: str) -> None:
        """Raises ValueError if the file is not a mailbox."""
        self._file, self._owner = file, owner
        if not file.is_file():
            raise ValueError(f"mailbox {file}: there is no such file")
        try:
            self._ask("SELECT e.id FROM emails e JOIN emails_fts f ON e.id = f.rowid LIMIT 1", ())
        except sqlite3.DatabaseError as error:
            raise ValueError(f"mailbox {file} has no e-mails as expected: {error}") from error

    def search(
        self, keywords: str | Sequence[str], sent_after: str | None, sent_before: str | None
    ) -> list[dict[str, Any]]:
        """Return id and snippet of e-mails with all the words, the newest first.

        Raises ValueError for keywords that are not words, or none, and for days in another form
        than YYYY-MM-DD.
        """
        given = keywords.split() if isinstance(keywords, str) else keywords
        if not isinstance(given, Sequence) or not all(isinstance(word, str) for word in given):
            raise ValueError(f"keywords is {keywords!r:.60}: expected a list of words")
        words = " ".join('"{}"'.format(word.replace('"', '""')) for word in given if word.strip())
        if not words:
            raise ValueError("expected at least one keyword")
        after, before = _day("sent_after", sent_after), _day("sent_before", sent_before)
        found = self._ask(
            "SELECT e.message_id, e.date, snippet(emails_fts, -1, '', '', ' ... ', 15)"
            " FROM emails e JOIN emails_fts ON e.id = emails_fts.rowid"
            f" WHERE emails_fts MATCH ? AND e.date >= ? AND e.date < ? AND {_OWNED}"
            " ORDER BY e.date DESC, e.id LIMIT ?",
            (words, after or "", before or "9999", self._owner, self._owner, MOST),
        )
        return [{"message_id": key, "date": day, "snippet": text} for key, day, text in found]

    def read(self, message_id: str) -> dict[str, Any] | None:
        """Return one e-mail; None if the owner has none with this id."""
        found = self._ask(
            "SELECT e.id, e.date, e.subject, e.from_address, e.body FROM emails e"
            f" WHERE e.message_id = ? AND {_OWNED}",
            (message_id, self._owner, self._owner),
        )
        if not found:
            return None
        [(key, *values)] = found
        query = "SELECT recipient_address FROM recipients WHERE email_id = ?"
        to = [address for (address,) in self._ask(query, (key,))]
        names = ("date", "subject", "from", "body")
        return {"message_id": message_id, "to": to, **dict(zip(names, values, strict=True))}

    def _ask(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        address = f"file:{self._file.absolute()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as base:
            return base.execute(query, values).fetchall()


def _day(name: str, text: str | None) -> str | None:
    """Return a day in the form of the e-mails' dates. Raises ValueError for another form: as text
    it would be before or after all of them.
    """
    try:
        return datetime.fromisoformat(text).date().isoformat() if text else None
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {text!r:.40}: expected a day as YYYY-MM-DD") from None


def write_mailbox(file: Path, emails: Iterable[Email]) -> None:
    """Write a new file with these e-mails."""
    partial = file.with_name(f"{file.name}.part")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(partial)) as base:
        base.executescript(_TABLES)
        for key, email in enumerate(emails, 1):
            row = (key, email.message_id, email.subject, email.sender, email.date, email.body)
            base.execute("INSERT INTO emails VALUES (?, ?, ?, ?, ?, ?)", row)
            base.executemany(
                "INSERT INTO recipients VALUES (?, ?, 'to')", [(key, to) for to in email.to]
            )
        base.execute("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")
        base.commit()
    partial.replace(file)


_PEOPLE = ("ann", "ben", "cleo", "dan", "eva", "finn", "gina", "hugo")
_THINGS = ("projector", "printer", "lease", "contract", "audit", "workshop", "server", "van")
_FACTS = {
    "price": ("What does the {thing} cost, according to {who}?", "The {thing} costs {n} euros."),
    "room": ("In which room is the {thing}, according to {who}?", "The {thing} is in room {n}."),
    "day": ("In how many days is the {thing} due, says {who}?", "The {thing} is due in {n} days."),
}


def make_mail(number: int, seed: int) -> tuple[list[Email], list[dict[str, Any]]]:
    """Make `number` e-mails, and a question for each: the columns of ART-E's questions. Raises
    ValueError for more than there are.
    """
    source = random.Random(f"mail {seed}")
    combined = [(t, w, f) for t in _THINGS for w in _PEOPLE for f in _FACTS]
    if not 0 < number <= len(combined):
        raise ValueError(f"{number} e-mails: expected from 1 to {len(combined)}")
    emails, rows = [], []
    for index, (thing, who, fact) in enumerate(source.sample(combined, number)):
        owner = source.choice([name for name in _PEOPLE if name != who])
        ask, say = _FACTS[fact]
        value = source.randint(10, 99)
        day = (date(2025, 1, 1) + timedelta(days=source.randrange(300))).isoformat()
        key, address = f"<{seed}.{index}@example.org>", f"{owner}@example.org"
        body = f"Hello {owner},\n{say.format(thing=thing, n=value)}\n{who}"
        sender = f"{who}@example.org"
        emails.append(Email(key, f"The {thing}", sender, (address,), f"{day} 09:00:00", body))
        rows.append(
            {
                "question": ask.format(thing=thing, who=who),
                "answer": str(value),
                "message_ids": json.dumps([key]),
                "inbox_address": address,
                "query_date": "2025-12-31",
            }
        )
    return emails, rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python -m trireme.ext.small_worlds.mailbox OUT`: writes mail.db, train.jsonl and
    test.jsonl.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--emails", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        emails, rows = make_mail(given.emails, given.seed)
    except ValueError as error:
        parser.error(f"--emails: {error}")
    size = len(rows) // 5
    write_splits(given.out, {"train": rows[size:], "test": rows[:size]})
    write_mailbox(given.out / "mail.db", emails)
    say(f"{len(emails)} e-mails, {len(rows) - size} questions to train, {size} to test")


if __name__ == "__main__":
    main()

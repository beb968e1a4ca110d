"""Email search: a question that the e-mails of one person answer, found by tools (as in ART-E).

The tools are `search_emails`, `read_email` and `return_final_answer`. Rows have a question (the
prompt), its answer (the truth), `message_ids` of the e-mails that hold it, and `inbox_address`.
Whether an answer is right says the first of `explorer.auxiliary_models`, or, without one, whether
its sources are exactly `message_ids`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trireme.experience import Experience
from trireme.ext.agents.command import options_of
from trireme.ext.external_model.asker import judged_right, refuse_no_truth
from trireme.ext.multi_turn.scheduled import samples
from trireme.ext.multi_turn.scheduler import RolloutInferRequest, RolloutResponseChoice, request_of
from trireme.ext.multi_turn.tool_calls import ToolCallScheduler, read_calls
from trireme.ext.multi_turn.turns import play
from trireme.ext.small_worlds.mailbox import Mailbox
from trireme.model.chat_tokens import conversation_of
from trireme.task import Task
from trireme.text import as_json
from trireme.workflows.classes import Workflow

SYSTEM_PROMPT = """You answer a question from the e-mails of {owner}, with tools. It is {today}. \
Search with a few keywords, read what looks right, and search with others if it is not. When you \
know the answer, call return_final_answer with the ids of the e-mails that say it. If you cannot \
find it, the answer is "I don't know", without sources. You have {turns} turns."""
FINAL, UNKNOWN = "return_final_answer", "i don't know"


class Settings(BaseModel):
    """`workflow_args`."""

    model_config = ConfigDict(extra="forbid")

    mailbox: str
    """The SQLite file with the e-mails."""
    max_turns: Annotated[int, Field(gt=0)] = 10
    """Most replies of the model."""
    tool_obs_char_limit: Annotated[int, Field(gt=0)] = 2000
    """Characters of a tool's result that the model sees."""


class EmailTools(ToolCallScheduler):
    """The tools over one mailbox, and what was done with them."""

    def __init__(self, mailbox: Mailbox, most: int) -> None:
        self.found: set[str] = set()
        self.read: set[str] = set()
        self.answer: str | None = None
        self.sources: list[str] = []
        super().__init__(tools=_tools(mailbox, most, self.found, self.read))

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        """At the final answer, and where no tool is called."""
        for call in read_calls(result).calls:
            given = call.arguments
            if call.name == FINAL and call.error is None and isinstance(given, Mapping):
                sources = given.get("sources") or []
                if isinstance(given.get("answer"), str) and isinstance(sources, list):
                    self.answer, self.sources = given["answer"], [str(one) for one in sources]
                    return True
        return super().check_finished(infer_request, result, current_turn)


class EmailSearchWorkflow(Workflow):
    """1 and more for a right answer, 0 for none, -1 for a wrong one, with parts for the way there.

    `reward_fn_args.llm_as_a_judge`: true or false; not given: whether there is an auxiliary model.
    """

    is_async = True
    examines_rows = True

    async def run(self) -> list[Experience]:
        """Let the model search, and judge its answer."""
        settings = options_of(self.task, Settings, "email_search_workflow")
        row, model = self.raw_task, self.model.model
        mailbox = Mailbox(Path(settings.mailbox).expanduser(), str(row["inbox_address"]))
        tools = EmailTools(mailbox, settings.tool_obs_char_limit)
        system = self.system_prompt or SYSTEM_PROMPT.format(
            owner=row["inbox_address"],
            today=row.get("query_date") or "unknown",
            turns=settings.max_turns,
        )
        uuid = model.rollout_name
        request = request_of({}, conversation_of(self.task, self.task.prompt, system), uuid)
        ended = await play(tools, request, model, max_turns=settings.max_turns)
        turns = int(ended[0].infos["num_turns"])
        right, correct = set(message_ids(self.task)), False
        if tools.answer is not None and not declined(tools.answer):
            correct = await self._correct(tools.answer, set(tools.sources) == right)
        reward = reward_of(tools, right, correct, turns / settings.max_turns)
        experiences = samples(model, ended, "default", uuid)
        for experience in experiences:
            experience.reward = reward
            experience.metrics |= {
                "answered": float(tools.answer is not None),
                "answer_correct": float(correct),
                "found_right_email": float(bool(right & tools.found)),
                "read_right_email": float(bool(right & tools.read)),
                "sources_correct": float(bool(right & set(tools.sources))),
            }
        return experiences

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for an option, and for a row or a mailbox that is not as expected."""
        settings = options_of(task, Settings, "email_search_workflow")
        if not task.raw_task.get("inbox_address"):
            raise ValueError(
                "email_search_workflow needs a column inbox_address: the row has "
                f"{', '.join(task.raw_task)}"
            )
        ids = message_ids(task)
        owner = str(task.raw_task["inbox_address"])
        mailbox = Mailbox(Path(settings.mailbox).expanduser(), owner)
        if not any(map(mailbox.read, ids)):
            raise ValueError(
                f"the row's message_ids are {', '.join(ids):.60}: the mailbox {settings.mailbox} "
                f"has no such e-mail of {owner} (column inbox_address)"
            )
        if unknown := set(task.reward_fn_args) - {"llm_as_a_judge"}:
            raise ValueError(
                f"email_search_workflow has no reward_fn_args.{min(unknown)}: it has llm_as_a_judge"
            )
        judged = task.reward_fn_args.get("llm_as_a_judge")
        if not isinstance(judged, bool | None):
            raise ValueError(
                f"reward_fn_args.llm_as_a_judge is {judged!r:.60}: expected true or false"
            )
        if judged:
            refuse_no_truth(task)
        if task.reward_fn is not None:
            raise ValueError("email_search_workflow judges answers by itself: name no reward")

    @classmethod
    def asks_a_model(cls, task: Task) -> bool:
        """Return whether the YAML requests a judge, which is one of `explorer.auxiliary_models`."""
        return task.reward_fn_args.get("llm_as_a_judge") is True

    async def _correct(self, answer: str, same_sources: bool) -> bool:
        """Return the judge's verdict, or without a judge whether the sources are the right ones."""
        models = self.auxiliary_model_wrappers
        asked = self.task.reward_fn_args.get("llm_as_a_judge")
        if not (bool(models) if asked is None else asked):
            return same_sources
        return await judged_right(self.task, answer, models)


def reward_of(tools: EmailTools, right: set[str], correct: bool, used: float) -> float:
    """ART-E's ladder: parts below 0.5 for the way, under them -1 for a wrong answer, 0 for none.

    A right answer has 1, 0.3 for its source, 0.1 shared by its sources, and 0.1 for turns that are
    left; `used` is the share of them that are not.
    """
    cited = right & set(tools.sources)
    if correct:
        shared = 0.1 / len(tools.sources) if tools.sources else 0.0
        return 1 + 0.3 * bool(cited) + shared + 0.1 * (1 - used)
    way = 0.1 * (bool(right & tools.found) + bool(right & tools.read) + bool(cited))
    wrong = tools.answer is not None and not declined(tools.answer)
    return way - 1 if wrong else way


def declined(answer: str) -> bool:
    """Return whether an answer is empty, or says that the model does not know."""
    return answer.replace("\u2019", "'").strip().rstrip(".").lower() in ("", UNKNOWN)


def message_ids(task: Task) -> list[str]:
    """Ids of the e-mails that hold the answer. Raises ValueError where there are none."""
    given = task.raw_task.get("message_ids")
    try:
        ids = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"the row's message_ids are {given!r:.60}: expected a list of ids")
    return [str(one) for one in ids]


def _tools(
    mailbox: Mailbox, most: int, found: set[str], read: set[str]
) -> list[Callable[..., Any]]:
    """Functions that the model calls; ids that it found and read are noted."""

    def search_emails(
        keywords: list[str], sent_after: str | None = None, sent_before: str | None = None
    ) -> str:
        """Searches the e-mails; gives at most ten ids with a snippet, the newest first.

        Args:
            keywords: Words that all have to be in the subject or the text.
            sent_after: Only e-mails from this day on, YYYY-MM-DD.
            sent_before: Only e-mails before this day, YYYY-MM-DD.
        """
        results = mailbox.search(keywords, sent_after, sent_before)
        found.update(result["message_id"] for result in results)
        return as_json(results)[:most]

    def read_email(message_id: str) -> str:
        """Shows one e-mail.

        Args:
            message_id: Its id, as a search gave it.
        """
        email = mailbox.read(message_id)
        if email is None:
            raise ValueError(f"there is no e-mail {message_id!r}")
        read.add(message_id)
        return as_json(email)[:most]

    def return_final_answer(answer: str, sources: list[str]) -> str:
        """Ends the search with an answer.

        Args:
            answer: The answer, or I don't know.
            sources: Ids of the e-mails that say it.
        """
        raise ValueError("expected an answer as text and sources as a list of ids")

    return [search_emails, read_email, return_final_answer]

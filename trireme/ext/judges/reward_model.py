"""Reward model: a classifier with one output scores whole conversations.

It is a model of transformers with a head for sequence classification. Each process loads it once,
with the first group that it scores, and runs it in a separate thread: on a GPU in bfloat16, on a
CPU in float32, where a score depends on the other rows of its batch by less than 1e-5.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from trireme.aio import OwnThread, call_user
from trireme.config.lookup import located, model_config, model_facts
from trireme.ext.judges.judge import seen_text
from trireme.registry import RM_PLUGINS
from trireme.rewards.orm import ORM, Value
from trireme.rewards.reward import number
from trireme.task import Task, with_objects
from trireme.text import joined
from trireme.usercode import Refused, UserCode, refuse_signature

_HEAD = "ForSequenceClassification"
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")
_UNLIMITED = 10**9
"""A tokenizer's `model_max_length` above this means that none is known."""
Messages = Sequence[Mapping[str, Any]]


class RewardModel(ORM):
    """Scores each conversation. One longer than `max_length` loses its beginning, and has the
    metric `reward_model_cut` 1.
    """

    takes_task = True

    def __init__(
        self,
        model_path: str,
        max_length: Annotated[int, Ge(1)] | None = None,
        batch_size: Annotated[int, Ge(1)] = 8,
        plugin: str | None = None,
        device: str | None = None,
    ) -> None:
        """`max_length` in tokens; none: as many as the model has positions. `plugin` names a
        function `(scores, task) -> scores`. `device`: none is the first GPU, else the CPU.

        Raises ValueError for a folder without a reward model.
        """
        refuse_model(model_path, max_length)
        self._plugin, self._plugin_name = _plugin_of(plugin), plugin
        self._path, self._scorer = model_path, scorer_of(model_path, device)
        self._max_length, self._batch_size = max_length, batch_size

    def examine(self) -> None:
        """Raise ValueError for a model of the hub that cannot score conversations."""
        if located(self._path, "models") is not None:
            return  # it was checked when this was made
        from transformers.utils.hub import cached_file

        whose = f"reward_model: model_path ({self._path})"
        try:
            path = cached_file(self._path, "config.json")
        except OSError as error:
            raise ValueError(
                f"{whose} is not a folder here, and cannot be downloaded: "
                f"{str(error).splitlines()[0]}"
            ) from error
        config = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        _refuse_config(whose, config, self._max_length)

    async def __call__(
        self, completions: list[str], *, task: Task | None = None, **kwargs: Any
    ) -> list[Any]:
        """Score each conversation. Raises RuntimeError if the model cannot score."""
        prompts = kwargs.get("prompts") or [None] * len(completions)
        rows = zip(kwargs["messages"], prompts, completions, strict=True)
        conversations = [messages or _conversation(prompt, text) for messages, prompt, text in rows]
        limits = self._max_length, self._batch_size
        scored = await self._scorer.thread.run(partial(self._scorer.scores, conversations, *limits))
        scores: Any = [score for score, _ in scored]
        if self._plugin is not None:
            whose = f"reward model plug-in '{self._plugin_name}'"
            with UserCode(whose, self._plugin) as _:
                scores = await call_user(self._plugin, scores, task)
                if not isinstance(scores, list | tuple) or len(scores) != len(scored):
                    raise Refused(
                        f"{whose} gave {scores!r:.60}: expected a list of {len(scored)} numbers, "
                        "one for each score"
                    )
                scores = [number(score, f"{whose} gave") for score in scores]
        cut = [{"reward_model_cut": float(was_cut)} for _, was_cut in scored]
        return [Value(score, noted) for score, noted in zip(scores, cut, strict=True)]


def refuse_model(model_path: str, max_length: int | None) -> None:
    """Raise ValueError if a model on this machine cannot score conversations: only config.json and
    the names of its other files are read.
    """
    whose = f"reward_model: model_path ({model_path})"
    try:
        facts = model_facts(model_path)
    except ValueError as error:
        raise ValueError(f"{whose} {error}") from error
    if facts.folder is None:
        return  # it has to be downloaded first
    if not any(any(facts.folder.glob(name)) for name in _TOKENIZERS):
        raise ValueError(
            f"{whose} contains no tokenizer: expected tokenizer.json, or similar, next to the "
            "weights"
        )
    _refuse_config(whose, model_config(model_path), max_length)


def _refuse_config(whose: str, config: Mapping[str, Any], max_length: int | None) -> None:
    architectures = [str(name) for name in config.get("architectures") or ()]
    if not any(name.endswith(_HEAD) for name in architectures):
        raise ValueError(
            f"{whose} has the architecture {', '.join(architectures) or 'none'}, which has no "
            f"score head: expected one that ends in {_HEAD}"
        )
    labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    if labels != 1:
        raise ValueError(f"{whose} has {labels} labels: expected 1, the score")
    text = config.get("text_config") or config
    positions = text.get("max_position_embeddings")
    if max_length and positions and max_length > positions:
        raise ValueError(
            f"{whose} has {positions} positions, and max_length is {max_length}: expected at most "
            f"{positions}"
        )


def _plugin_of(path: str | None) -> Callable[..., Any] | None:
    plugin = RM_PLUGINS.get(path)
    if plugin is None:
        return None
    if isinstance(plugin, type) or not callable(plugin):
        raise ValueError(
            f"reward model plug-in '{path}' is {type(plugin).__name__}: expected a function "
            "(scores, task) that returns the scores"
        )
    refuse_signature(f"reward model plug-in '{path}'", plugin, plugin, "(scores, task)")
    return plugin


class Scorer:
    """One reward model of this process. `scores` is called in its thread, and loads it."""

    def __init__(self, model_path: str, device: str | None) -> None:
        """Loads nothing yet; `device`: see RewardModel."""
        self.thread = OwnThread(f"reward-model-{Path(model_path).name}")
        self._path, self._device = model_path, device
        self._loaded: tuple[Any, Any] | None = None

    def scores(
        self, conversations: Sequence[Messages], max_length: int | None, batch_size: int
    ) -> list[tuple[float, bool]]:
        """Return the score of each, and whether its beginning was cut.

        Raises RuntimeError, naming the model, if it cannot be loaded or cannot score.
        """
        try:
            if self._loaded is None:
                self._loaded = _load(self._path, self._device)
            model, tokenizer = self._loaded
            limit = max_length or _positions(model, tokenizer)
            rows = _encoded(tokenizer, conversations, limit)
            scores: list[float] = []
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                scores += _score(model, tokenizer, [ids for ids, _ in batch])
        except Exception as error:  # of a template, of a GPU's memory: the caller needs whose it is
            reason = " ".join(str(error).split())
            raise RuntimeError(f"the reward model {self._path} cannot score: {reason}") from error
        return [(score, was_cut) for score, (_, was_cut) in zip(scores, rows, strict=True)]


_SCORERS: dict[tuple[str, str | None], Scorer] = {}
_LOCK = threading.Lock()


def scorer_of(model_path: str, device: str | None = None) -> Scorer:
    """Return the scorer of a model and device, one for the whole process."""
    with _LOCK:
        return _SCORERS.setdefault((model_path, device), Scorer(model_path, device))


def _load(path: str, device: str | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from trireme.engines.device import use_all_cores

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    use_all_cores()  # of this model's own thread
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any
    model, said = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(said["missing_keys"]):  # transformers initializes them at random
        raise ValueError(f"its files have no weights for {', '.join(missing)}")
    tokenizer.truncation_side = "left"  # the score is about the last messages
    return model.eval().requires_grad_(False).to(device), tokenizer


def _positions(model: Any, tokenizer: Any) -> int | None:
    """Return the most tokens that a model can read, if known."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = [n for n in (positions, tokenizer.model_max_length) if n and n < _UNLIMITED]
    return min(known, default=None)


def _encoded(
    tokenizer: Any, conversations: Sequence[Messages], limit: int | None
) -> list[tuple[list[int], bool]]:
    """Return the ids of each conversation, and whether its beginning was cut."""
    has_template = bool(tokenizer.chat_template)
    render = partial(tokenizer.apply_chat_template, tokenize=False) if has_template else _plain
    texts = [render([_as_template_wants(m) for m in one]) for one in conversations]
    texts = list(map(joined, texts))
    # a template writes the special tokens itself
    encode = partial(tokenizer, texts, add_special_tokens=not has_template, verbose=False)
    rows = encode()["input_ids"]
    if not all(rows):
        raise ValueError("a conversation has no text")
    cut = [limit is not None and len(ids) > limit for ids in rows]
    if any(cut):
        rows = encode(truncation=True, max_length=limit)["input_ids"]
    return list(zip(rows, cut, strict=True))


def _score(model: Any, tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    import torch

    config = model.config.get_text_config()
    own = pad = getattr(config, "pad_token_id", None)
    if pad is None:  # the head reads the last token that is no padding, so padding may end no row
        ends = {ids[-1] for ids in rows}
        pad = next(i for i in range(len(rows) + 1) if i not in ends)
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    config.pad_token_id = pad
    try:
        with torch.inference_mode():
            answer = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
    finally:
        config.pad_token_id = own
    return answer.logits[:, 0].float().tolist()


def _conversation(prompt: Any, completion: str) -> list[dict[str, Any]]:
    if isinstance(prompt, str) or prompt is None:
        prompt = [{"role": "user", "content": prompt or ""}]
    return [*prompt, {"role": "assistant", "content": completion}]


def _as_template_wants(message: Mapping[str, Any]) -> dict[str, Any]:
    return with_objects(message) | {"content": seen_text(message)}


def _plain(messages: Messages) -> str:
    return "\n".join(map(seen_text, messages))

"""Import paths of tasks, experiences, workflows and rewards; and Trinity's constants and marks."""

from enum import Enum
from typing import Any

CHECKPOINT_ROOT_DIR_ENV_VAR = "TRINITY_CHECKPOINT_ROOT_DIR"
MODEL_PATH_ENV_VAR = "TRINITY_MODEL_PATH"
TASKSET_PATH_ENV_VAR = "TRINITY_TASKSET_PATH"
BUFFER_PATH_ENV_VAR = "TRINITY_BUFFER_PATH"
PLUGIN_DIRS_ENV_VAR = "TRINITY_PLUGIN_DIRS"
LOG_DIR_ENV_VAR = "TRINITY_LOG_DIR"
LOG_LEVEL_ENV_VAR = "TRINITY_LOG_LEVEL"
EXPLORER_NAME = "explorer"
TRAINER_NAME = "trainer"


class SyncMethod(str, Enum):  # noqa: UP042 (printed as Trinity prints it)
    """How weights reach the explorer."""

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(str, Enum):  # noqa: UP042
    """Who decides when they do."""

    FIXED = "fixed"
    EXPLORER_DRIVEN = "explorer_driven"
    TRAINER_DRIVEN = "trainer_driven"
    FULLY_ASYNC = "fully_async"


class OpType(str, Enum):  # noqa: UP042
    """How an operator changes a reward by a number."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"


class PromptType(str, Enum):  # noqa: UP042
    """Whether a row is a conversation or plain text."""

    MESSAGES = "messages"
    PLAINTEXT = "plaintext"


class StorageType(str, Enum):  # noqa: UP042
    """Where rows and experiences are."""

    QUEUE = "queue"
    SQL = "sql"
    FILE = "file"


class RunningStatus(str, Enum):  # noqa: UP042
    """What a part of a run does."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"


def Experimental(thing: Any) -> Any:
    """Decorator: marks what may change."""
    thing._is_experimental = True
    return thing


def Deprecated(thing: Any) -> Any:
    """Decorator: marks what will go."""
    thing._is_deprecated = True
    return thing

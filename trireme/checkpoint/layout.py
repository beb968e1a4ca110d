"""Layout: names the place of each file in a job's folder.

buffer/   log/   monitor/   run/   profile/
log/NAME/   monitor/NAME/ (of one of several explorers)
global_step_N/.full_checkpoint, manifest.json, state/, actor/huggingface/, critic/
global_step_N/actor/{model,optim,extra_state}_world_size_W_rank_R.pt, actor/fsdp_config.json
global_step_N/actor/model.safetensors   (of one process, where huggingface/ has not all in float32)
global_step_N/actor/reference/model.safetensors   (where it follows the policy)
global_step_N/actor/lora_adapter/   (with LoRA: as peft reads it)
global_step_N/critic/model.safetensors, critic/{optim,extra_state}_world_size_W_rank_R.pt
explorer_meta.json   trainer_meta.json   stage_meta.json
latest_checkpointed_iteration.txt   latest_state_dict_iteration.txt
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trireme.files import Unreadable, alone, naming, out_of_the_way, read_text, usable

STEP_NAME = re.compile(r"^global_step_(\d+)$")


WEIGHTS = "model.safetensors"
"""The policy's weights if one process trained, and for other programs."""
FSDP_CONFIG = "fsdp_config.json"
LORA_ADAPTER = "lora_adapter"
"""Folder in `actor/` with the adapter as peft reads it."""
REFERENCE = f"reference/{WEIGHTS}"
"""The folder in `actor/` of a reference model that has moved. Engines load all files in `actor/`
itself."""
MANIFEST = "manifest.json"
RAW_COPY = "sqlite:///explorer_output.db"
"""The copy of what workflows return, in the buffer folder, where a YAML names no other."""
EVALUATED, FAILED, DATA_ROWS = "evaluation.jsonl", "failed.jsonl", "data_rows.jsonl"
"""The files in `buffer/` for people: evaluations, failures, and the trained rows of a data set."""


def rank_file(
    kind: Literal["model", "optim", "extra_state"], world: int | Literal["*"], rank: int
) -> str:
    """Return the name in `actor/` of a trainer rank's file."""
    return f"{kind}_world_size_{world}_rank_{rank}.pt"


def world_of(actor: Path) -> int:
    """Return the number of ranks that wrote a policy's files. Raises ValueError if none did."""
    for path in actor.glob("optim_world_size_*_rank_0.pt"):
        return int(path.name.split("_")[3])
    raise ValueError(f"{actor} has no optim_world_size_*_rank_0.pt: no checkpoint to resume from")


def step_in(path: Path) -> int | None:
    """Return the number in a `latest_*` file; None without a file, or without a number in it."""
    try:
        return int(read_text(path, 100))
    except (FileNotFoundError, ValueError):
        return None


@dataclass(frozen=True)
class JobFolder:
    """Every path of a job, by name; only `make` writes."""

    root: Path
    own: str = ""
    """The name of one of several explorers, whose logs and figures are meant."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))

    def make(self) -> None:
        """Make the folders that every run has. Raises OSError naming the one that it cannot
        make.
        """
        for folder in (self.buffer, self.log, self.monitor):
            with naming(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def one_trainer(self) -> AbstractContextManager[None]:
        """Lock out a second trainer, which would write the same checkpoints. Raises ValueError for
        it.
        """
        sentence = f"{self.root} has a run that trains in it: expected it to end, or another name"
        return alone(self.root / ".train.lock", sentence)

    @property
    def buffer(self) -> Path:
        """Copies of experiences, and databases."""
        return self.root / "buffer"

    @property
    def log(self) -> Path:
        """The logs, one per part."""
        return self.root / "log" / self.own

    @property
    def monitor(self) -> Path:
        """Metrics."""
        return self.root / "monitor" / self.own

    @property
    def profile(self) -> Path:
        """Traces of train steps."""
        return self.root / "profile"

    @property
    def starts(self) -> Path:
        """The list of all attempts; the configurations are next to it."""
        return self.root / "run" / "starts.json"

    @property
    def explorer_meta(self) -> Path:
        """The explorer's position."""
        return self.root / "explorer_meta.json"

    def state_of(self, explorer: str) -> Path:
        """The position of one of several explorers; for the one named `explorer`:
        `explorer_meta`.
        """
        return self.root / f"{explorer}_meta.json"

    @property
    def trainer_meta(self) -> Path:
        """The trainer's position."""
        return self.root / "trainer_meta.json"

    @property
    def stage_meta(self) -> Path:
        """The list of the finished stages."""
        return self.root / "stage_meta.json"

    @property
    def latest_checkpoint(self) -> Path:
        """The step of the newest checkpoint that a run can resume from."""
        return self.root / "latest_checkpointed_iteration.txt"

    @property
    def latest_weights(self) -> Path:
        """The step of the newest weights that an explorer can load."""
        return self.root / "latest_state_dict_iteration.txt"

    def step_dir(self, step: int) -> Path:
        """The folder of a train step."""
        return self.root / f"global_step_{step}"

    def actor_dir(self, step: int) -> Path:
        """The policy's files of a step."""
        return self.step_dir(step) / "actor"

    def critic_dir(self, step: int) -> Path:
        """The value model's files of a step, if the algorithm has one."""
        return self.step_dir(step) / "critic"

    def hf_dir(self, step: int) -> Path:
        """Configuration and tokenizer of a step, and its weights in the form for other programs."""
        return self.actor_dir(step) / "huggingface"

    def weights_dir(self, step: int) -> Path:
        """The folder with the step's safetensors: `actor` if it has the exactly trained ones, else
        `huggingface`, whose dtype may differ; `actor` if there are none.
        """
        actor, hf = self.actor_dir(step), self.hf_dir(step)
        exact = (actor / WEIGHTS).exists()
        return hf if not exact and any(hf.glob("*.safetensors")) else actor

    def steps(self) -> list[int]:
        """Steps that have a folder, full or not, in order."""
        if not self.root.is_dir():
            return []
        matches = (STEP_NAME.match(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest_weights_step(self) -> int | None:
        """Return the newest published weights that still exist; None before the first."""
        step = step_in(self.latest_weights)
        if step is None or any(self.weights_dir(step).glob("*.safetensors")):
            return step
        there = [s for s in self.steps() if any(self.weights_dir(s).glob("*.safetensors"))]
        return there[-1] if there else None

    def make_way(self, *pointers: Path) -> None:
        """Rename files that are in the way of the run's pointers. No run reads these, so they may
        hold anything.
        """
        for path in (self.latest_checkpoint, self.latest_weights):
            if usable(path) and step_in(path) is None:
                out_of_the_way(path, Unreadable(f"{path} holds no number"))
        for path in (self.trainer_meta, *pointers):
            usable(path)

    def is_full(self, step: int) -> bool:
        """Return whether a step's folder is a checkpoint to resume from, not only weights."""
        root = self.step_dir(step)
        return any(os.path.lexists(root / name) for name in (".full_checkpoint", MANIFEST))

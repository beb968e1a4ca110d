"""Configuration pages: every key, the ones to know first, and those for compatibility alone.

`python scripts/configuration_page.py` writes docs/configuration.md, docs/first_keys.md and
docs/migrate/compatibility_keys.md from the schema; a test checks that they are up to date.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from trireme.config.engine_kind import kind_named, kind_names
from trireme.config.options import kind_text, range_text, split, without_none
from trireme.config.schema import Config
from trireme.config.section import Mapped, Moved, NoEffect, Refused, Section, fate_of, section_in
from trireme.extensions import extensions
from trireme.registry import ENGINES

DOCS = Path(__file__).parents[1] / "docs"
_HEAD = """# Configuration

A run is one YAML file. `trireme check --config X.yaml` prints the derived values and every problem,
and starts nothing; `trireme run --config X.yaml trainer.grad_clip=0.5` changes a key on the command
line (list items too: `buffer.explorer_input.eval_tasksets[0].split=test`).
`${oc.env:NAME,default}` takes an environment variable.

**Paths.** A relative path of a plug-in, a data set or a model is resolved against the YAML's folder
first, then against the working directory; on the command line, in the opposite order.
`my_file:name` is a function in `my_file.py`, in either folder. Output goes to
`checkpoint_root_dir`, relative to the working directory.

**Stages** (`stages`) run one after the other. Each is merged over the global keys, key by key. Data
with a new `path` inherits neither storage type, format, split nor replay; a new
`algorithm_type` inherits no `*_fn` and no `*_args`. A stage starts from the model that the previous
stage produced.

[The keys to know first](first_keys.md) are the forty that most runs set.
[Compatibility keys](migrate/compatibility_keys.md), from other systems' files, are refused, mapped
or without effect. The column `note` names single values that are refused, what a key needs (Ray,
vLLM) to have an effect, and the [extension](extensions.md) that reads it, if only one does.

This page is generated from the schema by `python scripts/configuration_page.py`.
"""
_COMPATIBILITY = """# Compatibility keys

Keys of Trinity-RFT's and verl's configuration files that have no function of their own here:

- *refused*: any value other than the default stops the run before it starts, with a sentence;
- *read as*: the value is used for the other key, unless the file sets that one;
- *mapped*: the run does the same with the means of this machine, and `trireme check` says how;
- *no effect*: `trireme check` lists the key.

Every other key is in [configuration](../configuration.md). This page is generated from the schema
by `python scripts/configuration_page.py`.

| key | value | default | meaning | here |
|-|-|-|-|-|
"""
_FIRST = """# The keys to know first

A run sets some of these; every other key has a default that fits most runs. All keys are in
[configuration](configuration.md). This page is generated from the schema by
`python scripts/configuration_page.py`.

| key | value | default | meaning |
|-|-|-|-|
"""
_FIRST_KEYS = {
    "": "project name checkpoint_root_dir mode seed plugins continue_from_checkpoint",
    "model": "model_path max_prompt_tokens max_response_tokens max_model_len lora_configs",
    "algorithm": "algorithm_type repeat_times kl_loss_fn kl_loss_fn_args policy_loss_fn_args "
    "sample_strategy",
    "algorithm.optimizer": "lr lr_scheduler_type lr_warmup_steps",
    "buffer": "batch_size train_batch_size total_steps total_epochs",
    "buffer.explorer_input": "taskset eval_tasksets default_workflow_type default_reward_fn_type",
    "buffer.explorer_input.taskset": "path format rollout_args workflow_args",
    "explorer": "eval_interval max_timeout",
    "explorer.rollout_model": "engine_type engine_num",
    "synchronizer": "sync_style sync_interval",
    "trainer": "save_interval",
}
FIRST_KEYS = [
    f"{section}.{name}".lstrip(".")
    for section, names in _FIRST_KEYS.items()
    for name in names.split()
]
"""In the order of the page."""


def documents() -> dict[Path, str]:
    """Each page's path and text."""
    return {
        DOCS / "configuration.md": "\n".join([_HEAD, *_section(Config, "", set())]),
        DOCS / "first_keys.md": _FIRST + "".join(map(_first_row, FIRST_KEYS)),
        DOCS / "migrate" / "compatibility_keys.md": _COMPATIBILITY
        + "".join(_foreign(Config, "", set())),
    }


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _first_row(key: str) -> str:
    """A row of the keys to know first, found by its dotted path."""
    *path, last = key.split(".")
    section: type[Section] = Config
    for name in path:
        inner = section_in(section.model_fields[name].annotation)
        assert inner is not None, f"{key}: {name} is no section"
        section = inner
    _, *cells, _ = _cells(section, last, section.model_fields[last])
    return _row([f"`{key}`", *cells]) + "\n"


def _works(item: FieldInfo) -> bool:
    """Whether a key does something of its own here, for some of its values at least."""
    fate = fate_of(item)
    return fate is None or bool(fate.on) or bool(isinstance(fate, Refused) and fate.values)


def _foreign(section: type[Section], prefix: str, done: set[type]) -> Iterator[str]:
    """The rows of keys for compatibility alone, by their dotted paths; each section once."""
    done.add(section)
    for name, item in section.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        if not _works(item):
            _, *cells = _cells(section, name, item)
            yield _row([f"`{path}`", *cells]) + "\n"
        inner = section_in(item.annotation)
        if inner is not None and inner not in done:
            yield from _foreign(inner, path, done)


def _section(section: type[Section], prefix: str, done: set[type]) -> Iterator[str]:
    """One heading and table, then those of the sections inside; each section once."""
    done.add(section)
    working = {name: item for name, item in section.model_fields.items() if _works(item)}
    if working:
        yield f"## {f'`{prefix}`' if prefix else 'Top level'}\n"
        yield f"{inspect.getdoc(section)}\n"
        yield "| key | value | default | meaning | note |"
        yield "|-|-|-|-|-|"
        for name, item in working.items():
            cells = _cells(section, name, item)
            yield _row(cells)
        yield ""
    for name, item in section.model_fields.items():
        inner = section_in(item.annotation)
        if inner is not None and inner not in done:
            yield from _section(inner, f"{prefix}.{name}" if prefix else name, done)


def _cells(section: type[Section], name: str, item: FieldInfo) -> tuple[str, ...]:
    kind = item.annotation
    is_section = section_in(kind) is not None and get_origin(without_none(kind)) is not list
    value = "a section" if is_section else kind_text(kind)
    held = getattr(section(), name)
    shown = "" if isinstance(held, Section) or held in (None, "", [], {}) else f"`{_yaml(held)}`"
    return (
        f"`{name}`",
        f"{value} {range_text([*item.metadata, *split(item.annotation)[1]])}".strip(),
        shown,
        sentences(section)[name],
        "; ".join(filter(None, (_here(name, item), _owner(section, name)))),
    )


_NAMED = {
    "cluster.launcher": "launcher",
    "explorer.rollout_model.engine_type": "engine",
}
"""Keys whose values are names that extensions add."""


def _owner(section: type[Section], name: str) -> str:
    """The extension that adds a key, or those of its values that extensions add."""
    if kind := _NAMED.get(f"{section.place}.{name}"):
        names = [f"`{n}`" for e in extensions().values() for n in e.names.get(kind, {})]
        return f"of extensions: {', '.join(names)}" * bool(names)
    declared = section.joined.get(name)
    if declared is None:
        return ""
    owners = {e.name for e in extensions().values() if declared.__module__.startswith(e.package)}
    return f"extension `{owners.pop()}`"


_WITHOUT = {
    "": "",
    "spread": "without Ray",
    "auxiliary": "but for auxiliary models",
}


def _here(name: str, item: FieldInfo) -> str:
    """What this version does with a key."""
    fate = fate_of(item)
    if fate is None:
        return ""
    ours = [kind for kind in kind_names() if kind in ENGINES.built_in()]
    takers = [kind for kind in ours if name in kind_named(kind).keys]
    without = _WITHOUT | {"engine": f"without {' or '.join(takers)}"}
    if isinstance(fate, Refused) and fate.values:
        return "refused: " + ", ".join(sorted(fate.values))
    if isinstance(fate, Moved):
        return f"read as `{fate.to.removeprefix('.')}` {without[fate.on]}".strip()
    word = {Refused: "refused", Mapped: "mapped", NoEffect: "no effect"}[type(fate)]
    return f"{word} {without[fate.on]}".strip()


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def sentences(section: type[Section]) -> dict[str, str]:
    """Field name -> the docstring under it, also of the keys that extensions add."""
    tree = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(tree, ast.ClassDef)
    out = {name: sentences(declared)[name] for name, declared in section.joined.items()}
    for above, below in pairwise(tree.body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(above.target, ast.Name) and isinstance(below.value, ast.Constant)
            out[above.target.id] = str(below.value.value)
    return out


if __name__ == "__main__":
    for page, text in documents().items():
        page.write_text(text, encoding="utf-8")

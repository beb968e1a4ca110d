"""Load: reads a YAML file and command-line overrides into a Config, or says all that is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trireme.config.problem import ConfigError, Problem
from trireme.config.schema import Config
from trireme.config.typed import build, clean


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the file `path` with `overrides` (`a.b.c=value`) laid over it.

    `${oc.env:VAR,default}` and OmegaConf's other interpolations are resolved. Plug-ins, data and
    models by a relative path are looked for in the working directory, then beside the file.
    Raises ConfigError with every problem.
    """
    config, problems = read_config(path, overrides)
    if problems:
        raise ConfigError(problems, str(path))
    return config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """As `load_config`, but with what is wrong beside what is right; wrong keys hold their default.

    Raises ConfigError only for what is no YAML at all.
    """
    path = Path(path)
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError([Problem("", f"there is no configuration file {path}")]) from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([Problem("", f"{path} cannot be read as YAML: {reason}")]) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError([Problem("", f"{path} holds a list: expected sections with keys")])
    problems: list[Problem] = []
    for override in overrides:
        _override(tree, override, problems)
    values = clean(Config, _resolved(tree, "", problems), "", problems)
    _find_beside(values, path.parent)
    if "plugins" in values:
        values["plugins"] = [_beside(path, plugin, problems) for plugin in values["plugins"]]
    return build(Config, values), problems


def _override(tree: DictConfig, override: str, problems: list[Problem]) -> None:
    """Set one `a.b[0].c=value` in the tree; the value is read as YAML."""
    key, equals, text = override.partition("=")
    key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key.strip().removeprefix("--"))
    if not equals or not key:
        problems.append(Problem("", f"override {override!r}: expected key=value"))
        return
    head, bracket, _ = key.rpartition("[")
    try:
        read = OmegaConf.from_dotlist([f"value={text}"])
        value = OmegaConf.select(read, "value") if text.strip() else ""
        if bracket and not isinstance(OmegaConf.select(tree, head), ListConfig | DictConfig):
            problems.append(Problem(key, f"cannot be set: the file has no list {head}"))
            return
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, yaml.YAMLError, IndexError, TypeError, ValueError) as error:
        problems.append(Problem(key, f"cannot be set to {text!r}: {str(error).splitlines()[0]}"))


def _resolved(node: Any, key: str, problems: list[Problem]) -> Any:
    """Plain values of an OmegaConf tree; an interpolation that fails is noted and left out."""
    if not isinstance(node, DictConfig | ListConfig):
        return node
    is_list = isinstance(node, ListConfig)
    names: list[Any] = list(range(len(node)) if is_list else node.keys())
    out: dict[Any, Any] = {}
    for name in names:
        at = f"{key}[{name}]" if is_list else f"{key}.{name}" if key else str(name)
        try:
            out[name] = _resolved(node[name], at, problems)
        except OmegaConfBaseException as error:
            problems.append(Problem(at, _unresolved(str(error))))
    return list(out.values()) if is_list else out


def _unresolved(reason: str) -> str:
    """Why an interpolation has no value."""
    variable = re.search(r"Environment variable '(.+?)' not found", reason)
    if variable:
        return f"needs the environment variable {variable[1]}, which is not set"
    return f"cannot be resolved: {reason.splitlines()[0]}"


_PATHS = ("path", "model_path", "critic_model_path", "chat_template_path")


def _find_beside(values: Any, folder: Path) -> None:
    """Data and models that are not in the working directory, but beside the file, are those."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict | list):
            _find_beside(value, folder)
        elif name in _PATHS and value and "://" not in value:
            beside = folder / value
            if not Path(value).expanduser().exists() and beside.exists():
                values[name] = str(beside.resolve())


def _beside(config_path: Path, plugin: str, problems: list[Problem]) -> str:
    """A plugin's path: as given where it is there, else beside the configuration file."""
    for candidate in (Path(plugin).expanduser(), config_path.parent / plugin):
        if candidate.exists():
            return str(candidate.resolve())
    expected = f"a file or folder, here or in {config_path.parent}"
    problems.append(Problem("plugins", f"is {plugin!r}: expected {expected}"))
    return plugin

"""Hidden: replaces keys, tokens and passwords of a configuration or a command line by stars.

A value is hidden by its name (`api_key`, `DB_PASS`, all that lies under `secrets`), or by its form
(`sk-...`, a password in a URL), anywhere: rather too much than too little. The schema's own keys
that only sound secret (`max_tokens`, `prompt_key`) are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import yaml

from trireme.config.schema import Config
from trireme.config.section import Section
from trireme.text import as_json, hide_passwords

if TYPE_CHECKING:
    from trireme.config.plan import Plan

HIDDEN = "***"
_SECRET = re.compile(
    r"key|token|secret|passw|passphrase|passcode|pass(?![a-z])|pwd|auth(?!or(?!i[sz]))|cookie"
    r"|credential|bearer|private|signature|session_?id|jwt|dsn$|connection_?string",
    re.IGNORECASE,
)
"""Names of secrets."""
_SHOWN = re.compile(
    r"^(pad|eos|bos|unk|mask|sep|cls|image|video|audio|stop|end|start|special|thinking)_tokens?(_ids?)?$"
    r"|^(num|max|min|n|total|mean|new|avg)_\w*tokens$|^tokens$|tokeniz|keyword|keyboard|monkey"
    r"|(key|token|pass(word)?|secret|credentials?|cookies?|auth)_?(env|file|path|name|url)$"
    r"|^(truth|answer|question|solution|group|sort|primary|foreign)_key$|bypass|per_token"
    r"|token_(level|count|budget|mean|limit)|^authors?$|compass",
    re.IGNORECASE,
)
"""Names that only sound secret, of options outside the schema."""
_LOOKS = re.compile(
    r"\b(?:sk|pk|rk|hf|gh[oprsu]|github_pat|glpat|npm|pypi|xox[abeoprs]|wandb|nvapi|gsk|r8|tvly|lsv2"
    r"|dop_v1|shpat|local)[-_][A-Za-z0-9_-]{12,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{12,}|\bAIza[\w-]{20,}|\bSG\.[\w-]{8,}\.[\w-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}\.?[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
"""The forms of providers' keys."""
_HEADER = re.compile(
    r"\b((?:proxy-)?authorization|(?:set-)?cookie|x-[\w-]*(?:key|token|auth)[\w-]*)"
    r"([\"']?\s*[:=]\s*)[^\r\n]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_USER = re.compile(r"(\w://)([^\s/@:]+)(?=@)")
"""A user in a URL without a password: a token, in git's form."""
_GIVEN = re.compile(
    r"(?<![\w.-])(-{0,2}[A-Za-z_][\w.-]*)(=|\s*[\"']\s*[:=]\s*|:\s*(?=[\"']))"
    r"(\"(?:\\.|[^\"])*\"|'(?:\\.|[^'])*'|[^\s&;,\"'}\])]+)"
)
"""In a text: a name and its value, as in a shell's line, a query, a DSN, JSON or YAML."""
_FLAG = re.compile(r"(?<!\S)(--?[A-Za-z][\w.-]*)(\s+)(?!-)(\"[^\"]*\"|'[^']*'|\S+)")


def without_secrets(value: Any, key: str = "") -> Any:
    """Return `value` with stars in place of keys, tokens and passwords, by their names or forms."""
    if key and is_secret(key):
        return _stars(value)
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(inner, str) for inner in value):
            return hidden_words(value)
        return [without_secrets(inner, key) for inner in value]
    return _text(value) if isinstance(value, str) else value


def resolved(plan: Plan, model_path: str) -> dict[str, Any]:
    """Return the configuration of one stage, so that it runs alone and into the same folder."""
    values: dict[str, Any] = plan.config.model_dump()
    del values["stages"]
    if plan.colocated:
        values["mode"] = "colocate"
    if plan.stage_name is not None:
        values["name"] = f"{plan.root_dir.name}/{plan.stage_name}"
    values["model"]["model_path"] = model_path
    return without_secrets(values)


def hidden_words(words: Iterable[str]) -> list[str]:
    """Return a command line without secrets: `--api-key X`, `--api-key=X`, `a.b.api_key=X`,
    URLs.
    """
    out: list[str] = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        is_name = re.fullmatch(r"-{0,2}[\w.\[\]-]+", name) is not None
        if equals and is_name:
            out.append(f"{name}={_value(name, value)}")
        else:
            out.append(_value(before, word))
        before = word if re.fullmatch(r"--?[A-Za-z][\w.-]*", word) else ""
    return out


def is_secret(name: str) -> bool:
    """Return True if a name, such as `a.b.OPENAI_KEY`, belongs to a secret."""
    for part in re.split(r"[.\[\]]", name.lstrip("-")):
        plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part).replace("-", "_").lower()
        if _SECRET.search(plain) and plain not in _own() and not _SHOWN.search(plain):
            return True
    return False


@cache
def _own() -> frozenset[str]:
    """Return the schema's names, except for the secret one."""
    return frozenset(_names(Config, set())) - {"api_key"}


def _names(kind: Any, seen: set[Any]) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, Section) and kind not in seen:
        seen.add(kind)
        for name, field in kind.model_fields.items():
            yield name
            yield from _names(field.annotation, seen)
    for inner in get_args(kind):
        yield from _names(inner, seen)


def _stars(value: Any) -> Any:
    """Replace all texts and numbers by stars; an unset value stays unset."""
    if isinstance(value, Mapping):
        return {name: _stars(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_stars(inner) for inner in value]
    return value if value is None or value == "" or isinstance(value, bool) else HIDDEN


def _value(name: str, text: str) -> str:
    """Return a value of a command line; a list is parsed as the loader does it."""
    if name and is_secret(name):
        return _stars(text)
    if text.lstrip()[:1] in ("{", "["):
        try:
            read = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError):
            return _text(text)
        if (hidden := without_secrets(read)) != read:
            return as_json(hidden, default=str)
        return text
    return _text(text)


def _text(text: str) -> str:
    def given(match: re.Match[str]) -> str:
        name, joint, value = match.groups()
        if not is_secret(name):
            return match[0]
        quote = value[0] if value[0] in "\"'" else ""
        return f"{name}{joint}{quote}{HIDDEN}{quote}"

    text = _LOOKS.sub(HIDDEN, hide_passwords(text))
    if "@" in text:
        text = _USER.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _FLAG.sub(given, _GIVEN.sub(given, text))

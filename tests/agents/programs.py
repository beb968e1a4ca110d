"""The programs, and what has to be said to each so that it calls a tool and ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tests.agents.steered import ROOT, Script

PYTHON = Path(os.environ.get("TRIREME_AGENTS", ROOT / ".venv-agents")) / "bin/python"
SITE = next(PYTHON.parents[1].glob("lib/python*/site-packages"), PYTHON.parent)
NODE = ROOT / "tests/agents/node_modules/.bin"
EXAMPLES = ROOT / "examples/agents"
PRODUCT = {"a": 6, "b": 7}
CODE = "Thought: I multiply.\n<code>\n{}\n</code>"


def tool_call(name: str, arguments: Mapping[str, object]) -> str:
    """As hermes' family writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"I call it.\n<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True)
class Program:
    """One program, and its run in which the product of 6 and 7 is asked for."""

    name: str
    package: str
    protocol: str
    command: list[str]
    replies: Sequence[str | None]
    """Of its calls, in order; None, and after the last: what the model samples by itself."""
    env: dict[str, str] = field(default_factory=dict)
    skips: Callable[[str], bool] = lambda prompt: False
    """Which prompts are aside (a title, say), and do not use up a reply."""
    left: str | None = None
    """A file that its tool has to leave; None: it says what the model says last."""

    @property
    def variables(self) -> dict[str, str]:
        """`env`, and a proxy that leads nowhere: it has to do without another network."""
        return dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9") | self.env

    @property
    def version(self) -> str:
        """That of its package, as installed."""
        if self.command[0].startswith(str(NODE)):
            manifest = NODE.parent / self.package / "package.json"
            return json.loads(manifest.read_text())["version"]
        [found] = metadata.distributions(name=self.package, path=[str(SITE)])
        return found.version

    def script(self) -> Script:
        """The replies as a script."""
        left = list(self.replies)

        def say(prompt: str) -> str | None:
            return left.pop(0) if left and not self.skips(prompt) else None

        return say

    @property
    def installed(self) -> bool:
        """Whether it is there."""
        return Path(self.command[0]).exists()


def _sdk(name: str, package: str, protocol: str, replies: Sequence[str | None]) -> Program:
    command = [str(PYTHON), str(EXAMPLES / f"{name}.py")]
    return Program(name.removeprefix("with_"), package, protocol, command, replies)


CODEX = (
    'model_providers.trireme={name="trireme", base_url="{base_url}", '
    'env_key="OPENAI_API_KEY", wire_api="responses"}'
)
OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "model": "trireme/any",
    "small_model": "trireme/any",
    "share": "disabled",
    "autoupdate": False,
    "provider": {
        "trireme": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"any": {"tool_call": True, "limit": {"context": 32768, "output": 512}}},
        }
    },
}
SHELL = "echo 42 > made.txt"
PROGRAMS = [
    _sdk("with_openai", "openai", "chat", [tool_call("multiply", PRODUCT)]),
    _sdk("with_anthropic", "anthropic", "messages, streamed", [tool_call("multiply", PRODUCT)]),
    _sdk("with_openai_agents", "openai-agents", "responses", [tool_call("multiply", PRODUCT)]),
    _sdk("with_langgraph", "langgraph", "chat", [tool_call("multiply", PRODUCT)]),
    _sdk(
        "with_smolagents",
        "smolagents",
        "chat",
        [CODE.format("print(6 * 7)"), CODE.format("final_answer(42)")],
    ),
    Program(
        "mini-swe-agent",
        "mini-swe-agent",
        "chat",
        [
            *(str(PYTHON.parent / "mini"), "-t", "{prompt}", "-m", "openai/any", "-y"),
            *("--exit-immediately", "-o", "{workdir}/trajectory.json"),
        ],
        [
            tool_call("bash", {"command": SHELL}),
            tool_call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        ],
        env={
            "MSWEA_COST_TRACKING": "ignore_errors",  # nobody knows what our model costs
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": "{workdir}",
        },
        left="made.txt",
    ),
    Program(
        "opencode",
        "opencode-ai",
        "chat, streamed",
        [str(NODE / "opencode"), "run", "{prompt}"],
        [tool_call("bash", {"command": SHELL, "description": "Writes it"})],
        env={
            "HOME": "{workdir}",
            "XDG_DATA_HOME": "{workdir}/data",
            "XDG_CONFIG_HOME": "{workdir}/config",
            "XDG_CACHE_HOME": "{workdir}/cache",
            "XDG_STATE_HOME": "{workdir}/state",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE),
        },
        skips=lambda prompt: "title" in prompt[:400].lower(),
        left="made.txt",
    ),
    Program(
        "codex",
        "@openai/codex",
        "responses, streamed",
        [
            *(str(NODE / "codex"), "exec", "--skip-git-repo-check", "-m", "any"),
            *("--dangerously-bypass-approvals-and-sandbox", "-c", CODEX),
            *("-c", "model_provider=trireme", "{prompt}"),
        ],
        [tool_call("exec_command", {"cmd": SHELL})],
        env={"CODEX_HOME": "{workdir}"},
        left="made.txt",
    ),
]

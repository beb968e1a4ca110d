"""Task folders in a run that is killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_command import with_programs
from tests.e2e.test_exact import check_that_a_killed_run_ends_alike
from tests.ext.agents.test_command import ASK


def with_task_folders(folder: Path) -> dict[str, Any]:
    """The small job over task folders: an agent's program keeps the reply, test.sh judges it."""
    config = with_programs(folder)
    (folder / "agent.py").write_text(
        f"{ASK}\nwith open('reply.txt', 'w') as file: file.write(ask(sys.argv[1], max_tokens=6))\n"
    )
    inputs = config["buffer"]["explorer_input"]
    args = inputs["taskset"]["workflow_args"]
    args["command"][-1] = "{prompt}"
    for number in range(16):
        task = folder / "tasks" / f"task-{number}"
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "task.toml").write_text("[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n")
        (task / "instruction.md").write_text(f"Say {number} words.\n")
        (task / "environment" / "Dockerfile").write_text("FROM none\nWORKDIR /app\n")
        (task / "tests" / "test.sh").write_text(
            'sum=$(cksum < "$APP_DIR/reply.txt" | cut -d" " -f1)\n'
            'echo "0.$((sum % 17 + 10))" > "$LOGS_DIR/verifier/reward.txt"\n'
        )
    inputs["default_workflow_type"] = "harbor_workflow"
    own = {"command": args["command"], "no_sandbox": True}
    inputs["taskset"] = {"name": "t", "path": str(folder / "tasks"), "workflow_args": own}
    del inputs["eval_tasksets"]
    return config


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    check_that_a_killed_run_ends_alike(tmp_path, with_task_folders)

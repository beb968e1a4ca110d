"""What `trireme check` says of the first rows: their lengths, the first prompt, what is trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.e2e.job import small_config, write_jsonl
from trireme.cli.main import app
from trireme.cli.run import draft_of
from trireme.config import ConfigError
from trireme.demo.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_config(tmp_path_factory.mktemp("good"))


def checked(folder: Path, config: dict[str, Any], *overrides: str) -> tuple[int, str]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["check", "--config", str(path), *overrides])
    return done.exit_code, done.output


def test_the_lengths_of_prompts_and_the_end_of_the_first(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    code, output = checked(tmp_path, good)
    assert code == 0
    assert "sums: 16 encoded, 37 to 38 tokens" in output
    assert "What is 1 + 2? (0)<|im_end|> ⏎ <|im_start|>assistant" in output


def test_a_row_in_the_middle_whose_prompt_is_no_conversation_is_named(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    rows: list[dict[str, Any]] = [{"question": "1 + 1?", "answer": "2"}] * 4
    wrong = [{"from": "human", "value": "1 + 1?"}]
    explorer_input = "buffer.explorer_input"
    for place, said in ((2, "warning       no row was encoded: taskset sums: "), (0, "problem: ")):
        rows[place] = {"question": wrong, "answer": "2"}
        path = write_jsonl(tmp_path / f"rows_{place}.jsonl", rows)
        words = (f"{explorer_input}.taskset.path={path}", f"{explorer_input}.eval_tasksets=[]")
        output = checked(tmp_path, good, *words)[1]
        column = f"row {place}'s column 'question' (format.prompt_key): a message must be a dict"
        assert f"{said}{column} with 'role'" in output


def test_a_role_that_the_template_does_not_know_is_a_problem(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    """ShareGPT's went to the template as they are: a turn of `human`, whom no model knows."""
    rows: list[dict[str, Any]] = [{"question": "1 + 1?", "answer": "2"}] * 4
    rows[2] = {"question": [{"role": "human", "content": "1 + 1?"}], "answer": "2"}
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    explorer_input = "buffer.explorer_input"
    words = (f"{explorer_input}.taskset.path={path}", f"{explorer_input}.eval_tasksets=[]")
    code, output = checked(tmp_path, good, *words)
    assert code == 1
    assert f"row 2 ({path}, line 3): a message has the role 'human', which the chat" in output
    assert "template does not know: expected 'user'" in " ".join(output.split())
    for each, reply in (
        ("{% if m.role == 'human' %}{{ m.content }}{% endif %}\n", ""),
        ("{{ m.role }}: {{ m.content }}\n", "gpt: "),  # ShareGPT's own names, as they are
    ):
        template = f"{{% for m in messages %}}{each}{{% endfor %}}{reply}"
        knows = f'model.custom_chat_template="{template}"'
        assert checked(tmp_path, good, *words, knows)[0] == 0


def test_an_option_that_a_built_in_workflow_never_reads_is_noted_before_a_run(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    """It was reported at the first step alone."""
    taskset = "buffer.explorer_input.taskset"
    boxed = f"{taskset}.default_workflow_type=math_boxed_workflow"
    ours = f"{taskset}.default_reward_fn_type=math_boxed_reward"
    reads = f"{taskset}.workflow_args={{with_think: true, format_score_coef: 0.2}}"
    assert "has no effect" not in checked(tmp_path, good, boxed, ours, reads)[1]
    wrong = f"{taskset}.workflow_args={{with_thnk: true}}"
    code, output = checked(tmp_path, good, boxed, ours, wrong)
    said = "sums: no workflow reads workflow_args.with_thnk, so that it has no effect: did you mean"
    assert code == 0 and f"{said} 'with_think'?" in output
    # a reward of the user's may read it: that is known at the first step
    assert "has no effect" not in checked(tmp_path, good, boxed, wrong)[1]
    root = f"checkpoint_root_dir={tmp_path}/checkpoints"
    words = [boxed, ours, wrong, root, "buffer.total_steps=1"]
    done = CliRunner().invoke(app, ["run", "--config", str(tmp_path / "config.yaml"), *words])
    assert done.exit_code == 0, done.output
    assert done.output.count("so that it has no effect") == 1  # not again at step 1


def test_prompts_that_are_too_long(tmp_path: Path, good: dict[str, Any]) -> None:
    code, output = checked(tmp_path, good, "model.max_prompt_tokens=10")
    assert code == 1
    assert "problem: sums: 16 of 16 prompts have more than 10 tokens" in output
    held_out = "buffer.explorer_input.eval_tasksets=[]"
    code, output = checked(tmp_path, good, "model.max_prompt_tokens=37", held_out)
    assert code == 0
    assert "sums: 6 of 16 prompts have more than 37 tokens" in output


def test_a_run_refuses_or_notes_prompts_that_are_too_long_before_its_first_step(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(good))
    too_short = "model.max_prompt_tokens=10"
    with pytest.raises(ConfigError, match=r"max_prompt_tokens of at least 38, and"):
        draft_of(path, [too_short], [])
    overrides = ["model.max_prompt_tokens=37", "buffer.explorer_input.eval_tasksets=[]"]
    (plan,) = draft_of(path, overrides, []).plans
    assert [note for note in plan.notes if "prompts have" in note] == [
        "sums: 6 of 16 prompts have more than 37 tokens (model.max_prompt_tokens, below "
        "model.max_model_len), so that nothing is asked: the longest has 38"
    ]


def test_a_recorded_row_with_an_id_that_the_model_does_not_have(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    rows = [{"tokens": [5, 6, 7, 8], "prompt_length": 2}] * 3
    rows.append({"tokens": [5, 6, 10**6], "prompt_length": 2})
    store = "buffer.trainer_input.experience_buffer"
    path = write_jsonl(tmp_path / "recorded.jsonl", rows)
    words = ("algorithm.algorithm_type=sft", "mode=train", "buffer.train_batch_size=2")
    words += (f"{store}.path={path}",)
    code, output = checked(tmp_path, good, *words)
    assert code == 1
    assert "recorded.jsonl, line 4): column 'tokens' holds the id 1000000 (at 2): exp" in output
    words += (f"{store}.on_error=skip",)
    code, output = checked(tmp_path, good, *words)
    assert code == 0 and "3 encoded, 4 to 4 tokens" in output


def test_prompts_that_the_vocabulary_does_not_cover(tmp_path: Path, good: dict[str, Any]) -> None:
    model = make_tiny_model(tmp_path / "words", ["one two"], seed=0, initializer_range=0.02)
    code, output = checked(tmp_path, good, f"model.model_path={model}")
    unknown = next(line for line in output.splitlines() if "are unknown: the model's" in line)
    assert code == 0 and unknown.split()[:2] == ["warning", "sums:"]
    assert "are unknown" not in checked(tmp_path, good)[1]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("The answer is 3. Why?", ""),
        (None, ""),
        ("why " * 300, "with its teacher_prompt the teacher reads"),
        (["The answer is 3."], "teacher_prompt is ['The answer is 3.']: expected text"),
    ],
)
@pytest.mark.parametrize("workflow", ["on_policy_distill_workflow", "own_turns:own"])
def test_a_prompt_that_the_teacher_cannot_read_is_a_problem(
    tmp_path: Path,
    good: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    prompt: Any,
    problem: str,
    workflow: str,
) -> None:
    (tmp_path / "own_turns.py").write_text("async def own(task, model):\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    other = None if prompt is None else [] if isinstance(prompt, list) else "Why?"
    rows = [{"question": "1 + 1?", "answer": "2", "teacher_prompt": other},
            {"question": "1 + 2?", "answer": "3", "teacher_prompt": prompt}]  # fmt: skip
    explorer_input = "buffer.explorer_input"
    code, output = checked(
        *(tmp_path, good, "algorithm.algorithm_type=on_policy_distill"),
        'explorer.auxiliary_models=[{model_path: "${model.model_path}"}]',
        f"{explorer_input}.taskset.path={write_jsonl(tmp_path / 'rows.jsonl', rows)}",
        f"{explorer_input}.default_workflow_type={workflow}",
    )
    assert code == bool(problem), output
    assert problem in output and (f"rows.jsonl, line 2): {problem}" in output) == bool(problem)


def test_a_workflow_that_needs_its_model_is_left_to_the_run(
    tmp_path: Path, good: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_model.py").write_text(
        "from trireme.workflows.single_turn import SimpleWorkflow\n\n\n"
        "class NeedsModel(SimpleWorkflow):\n"
        "    def format_messages(self):\n"
        "        return [{'role': 'user', 'content': self.model.model_path}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "buffer.explorer_input.default_workflow_type=needs_model:NeedsModel"
    code, output = checked(tmp_path, good, own, "model.max_prompt_tokens=10")
    assert code == 0, output
    assert "prompts" not in output.replace("max_prompt", "")


def test_messages_of_a_workflow_that_are_none_are_told_with_its_line(
    tmp_path: Path, good: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gives_text.py").write_text(
        "from trireme.workflows.single_turn import SimpleWorkflow\n\n\n"
        "class GivesText(SimpleWorkflow):\n"
        "    def format_messages(self):\n"
        "        return self.task_desc\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "buffer.explorer_input.default_workflow_type=gives_text:GivesText"
    code, output = checked(tmp_path, good, own)
    assert code == 1 and output.count("chat takes a list of messages, not text") == 1
    start = "problem: format_messages of workflow 'gives_text:GivesText' did not return a "
    assert start in output and "Refused" not in output
    assert "gives_text.py:4: class GivesText(SimpleWorkflow)" in output


@pytest.mark.parametrize(
    "own", ["def run(self)", "async def run_async(self)", "async def ask(self)", ""]
)
def test_messages_that_a_workflow_s_own_run_reads_are_left_to_it(
    tmp_path: Path, good: dict[str, Any], monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    module = f"two_chats_{len(own)}"
    (tmp_path / f"{module}.py").write_text(
        "from trireme.workflows.single_turn import SimpleWorkflow\n\n\n"
        "class Asks(SimpleWorkflow):\n"
        f"    {own or 'def other(self)'}:\n"
        "        return []\n\n\n"
        "class TwoChats(Asks):\n"
        "    def format_messages(self):\n"
        "        return [[{'role': 'user', 'content': text}] for text in 'ab']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workflow = f"buffer.explorer_input.default_workflow_type={module}:TwoChats"
    code, output = checked(tmp_path, good, workflow)
    assert code == (not own), output
    assert ("did not return a conversation: a message must be a dict" in output) == (not own)


def test_a_template_that_refuses_a_prompt_is_told(tmp_path: Path, good: dict[str, Any]) -> None:
    refuses = "model.custom_chat_template=\"{{ raise_exception('no system role') }}\""
    code, output = checked(tmp_path, good, refuses)
    assert code == 0, output
    assert "no row was encoded: the chat template refuses a conversation" in output


def test_a_template_that_is_none_is_a_problem(tmp_path: Path, good: dict[str, Any]) -> None:
    code, output = checked(tmp_path, good, "model.custom_chat_template='{{ messages'")
    assert code == 1
    assert "problem: the chat template refuses a conversation of user: unexpected end" in output


def test_a_model_without_the_files_of_its_tokenizer_is_a_problem(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(good["model"]["model_path"], model)
    for file in model.glob("tokenizer*"):
        file.unlink()
    code, output = checked(tmp_path, good, f"model.model_path={model}")
    assert code == 1
    assert f"problem: model.model_path ({model}) encodes the prompts of sums as no token" in output


@pytest.mark.parametrize(
    ("template", "noted"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", True),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", False),
        (  # a prompt's end is marked, with and without add_generation_prompt
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}Answer:{% endif %}",
            False,
        ),
    ],
)
def test_a_template_that_hides_where_a_reply_begins_is_noted_before_a_run(
    tmp_path: Path, good: dict[str, Any], template: str, noted: bool
) -> None:
    path = tmp_path / "config.yaml"
    model = {**good["model"], "custom_chat_template": template}
    path.write_text(yaml.safe_dump({**good, "model": model}))
    (plan,) = draft_of(path, [], []).plans
    assert any("no generation prompt" in note for note in plan.notes) == noted


@pytest.mark.parametrize(
    ("end", "noted"),
    [
        ("<|im_end|>", False),
        ("<|eot_id|>", True),  # another family's, or the tokenizer lacks it
        ("</turn>", False),  # not known to be a token of any model
    ],
)
def test_a_mark_of_the_template_that_is_no_token_is_noted_before_a_run(
    tmp_path: Path, good: dict[str, Any], end: str, noted: bool
) -> None:
    path = tmp_path / "config.yaml"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}END{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    model = {**good["model"], "custom_chat_template": template.replace("END", end)}
    path.write_text(yaml.safe_dump({**good, "model": model}))
    (plan,) = draft_of(path, [], []).plans
    said = "the chat template writes <|eot_id|>, which the tokenizer encodes as 10 tokens"
    assert {note.startswith(said) for note in plan.notes if "chat template" in note} == (
        {True} if noted else set()
    )
    _, output = checked(tmp_path, {**good, "model": model})
    assert output.count(said) == noted  # once, for all tasksets


def test_the_first_row_that_is_trained(tmp_path: Path, good: dict[str, Any]) -> None:
    path = write_jsonl(tmp_path / "solved.jsonl", [{"prompt": "1 + 1?", "response": "2"}] * 3)
    config = {
        **{key: good[key] for key in ("project", "name", "checkpoint_root_dir")},
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
        "model": {"model_path": good["model"]["model_path"], "max_model_len": 128},
        "buffer": {
            "train_batch_size": 2,
            "trainer_input": {"experience_buffer": {"name": "solved", "path": str(path)}},
        },
    }
    code, output = checked(tmp_path, config)
    assert code == 0
    assert "3 encoded" in output and "assistant ⏎ [[2<|im_end|>]]" in output
    held_out = good["buffer"]["explorer_input"]["eval_tasksets"]
    measured = {**config, "buffer": {**config["buffer"]}}
    measured["buffer"]["explorer_input"] = {
        **good["buffer"]["explorer_input"], "taskset": {}, "eval_tasksets": held_out,
    }  # fmt: skip
    code, output = checked(tmp_path, measured, "model.max_prompt_tokens=10")
    assert code == 1 and "problem: held_out: 3 of 3 prompts have more than 10 tokens" in output
    code, output = checked(tmp_path, config, "model.max_model_len=16")
    assert code == 1 and "leave nothing to train within model.max_model_len (16)" in output
    silent = {"role": "assistant", "content": "2", "weight": 0}
    asked = {"role": "user", "content": "1 + 1?"}
    for weights in ([1, 0], [0, 0]):
        replies = [silent | {"weight": weight} for weight in weights]
        write_jsonl(path, [{"messages": [asked, reply]} for reply in replies])
        code, output = checked(tmp_path, config)
        number = "1" if any(weights) else "all"
        assert code == (not any(weights)) and "too long" not in output
        assert f"{number} of the first 2 rows train nothing: the weight of every reply" in output

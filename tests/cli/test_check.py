from io import StringIO

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from tests.config.made import config_of, values
from trireme.cli.check import check
from trireme.cli.main import app
from trireme.config import ConfigError, load_config
from trireme.launch.check import checked
from trireme.monitor.terminal import Terminal


def printed(path, *overrides):
    out = StringIO()
    code = check(path, overrides, Terminal(file=out, soft_wrap=True, width=80))
    return code, out.getvalue()


def test_a_plan_is_printed_by_topic(tmp_path):
    config_of(tmp_path, values(tmp_path))
    code, text = printed(
        tmp_path / "config.yaml", "cluster.gpu_per_node=2", "cluster.launcher=local"
    )
    assert code == 0
    assert "8 tasks x 4 rollouts = 32 rollouts" in text
    assert "256 tokens: prompt up to 192, response up to 64" in text
    assert "explore 4, train 4, 4 an epoch" in text
    assert "at most 32 requests at once" in text
    assert "explorer 0, trainer 0" in text or "explorer 1, trainer 1" in text
    assert f"{tmp_path}/out/p/n\n" in text
    assert "note: cluster asks for 2 GPUs" in text
    assert "no problems" in text


def test_an_interval_of_evaluations_is_printed_only_where_there_are_eval_tasksets(tmp_path):
    given = values(tmp_path)
    config_of(tmp_path, given)
    none = "evaluation    none: there are no eval_tasksets\n"
    assert none in printed(tmp_path / "config.yaml")[1]
    inputs = given["buffer"]["explorer_input"]
    inputs["eval_tasksets"] = [{**inputs["taskset"], "name": "held_out"}]
    config_of(tmp_path, given)
    text = printed(tmp_path / "config.yaml", "explorer.eval_interval=5")[1]
    assert "evaluation    every 5 explore steps\n" in text
    for mode in ("serve", "bench"):
        assert "evaluation  " not in printed(tmp_path / "config.yaml", f"mode={mode}")[1]


def test_a_folder_that_holds_a_run_says_so(tmp_path):
    config_of(tmp_path, values(tmp_path))  # four train steps
    job = tmp_path / "out/p/n"
    for step, full, said in (
        (1, False, f"{job}\n"),  # weights alone: no run goes on from them
        (3, True, f"{job} holds a run at step 3, which this one resumes\n"),
        (5, True, "at step 5, which this one resumes, of the 4 requested: nothing is left"),
    ):
        folder = job / f"global_step_{step}"
        folder.mkdir(parents=True)
        if full:
            (folder / "manifest.json").touch()
        assert said in printed(tmp_path / "config.yaml")[1]
    assert "holds a run" not in printed(tmp_path / "config.yaml", "name=other")[1]


def test_the_mode_is_the_one_that_was_asked_for(tmp_path):
    config_of(tmp_path, values(tmp_path))
    assert "n: grpo, both\n" in printed(tmp_path / "config.yaml")[1]
    assert "n: grpo, colocate\n" in printed(tmp_path / "config.yaml", "mode=colocate")[1]


def test_a_run_that_measures_has_no_steps(tmp_path):
    config_of(tmp_path, values(tmp_path))
    tasks = "buffer.explorer_input.eval_tasksets=[{path: tasks.jsonl}]"
    for override, said in (
        ("explorer.name=explorer", "measures the model and all checkpoints"),
        ("explorer.bench_on_latest_checkpoint=true", "measures the latest checkpoint"),
    ):
        text = printed(tmp_path / "config.yaml", "mode=bench", tasks, override)[1]
        assert f"steps         {said}\n" in text and "explore steps" not in text


@pytest.mark.extension("ray")
def test_a_plan_without_a_place_for_an_engine_is_printed_with_its_problem(tmp_path):
    config_of(tmp_path, values(tmp_path))
    requested = "explorer.rollout_model.engine_type=remote"
    code, text = printed(tmp_path / "config.yaml", requested, "cluster.launcher=local")
    assert code == 1 and "problem: explorer.rollout_model.base_urls is empty" in text
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    code, text = printed(
        tmp_path / "config.yaml", "algorithm.algorithm_type=sft", "mode=colocate",
        f"buffer.trainer_input.experience_buffer={{name: data, path: {tmp_path / 'data.jsonl'}}}",
        "cluster.launcher=ray", "cluster.gpu_per_node=2", "cluster.node_num=1",
    )  # fmt: skip
    assert code == 1 and "problem: mode is 'colocate'" in text and "runners" not in text


def test_problems_of_the_file_and_of_what_it_names_are_told_together(tmp_path):
    config_of(tmp_path, values(tmp_path))
    code, text = printed(tmp_path / "config.yaml", "trainer.grad_clp=1", "algorithm.repeat_times=1")
    assert code == 1
    assert "problem: trainer.grad_clp is not a known key" in text
    assert "problem: algorithm.repeat_times is 1" in text


def test_what_a_wrong_key_leaves_open_is_not_told_as_well(tmp_path):
    config_of(tmp_path, values(tmp_path))
    flat = "buffer.explorer_input.taskset.prompt_key=text"  # one that belongs into `format`
    for word in ("model.max_model_len=many", "model=tiny", "buffer.explorer_input.taskset=x", flat):
        code, text = printed(tmp_path / "config.yaml", word)
        assert code == 1
        assert text.count("problem:") == 1, text


def test_lengths_that_nobody_gave_have_no_numbers(tmp_path):
    config_of(tmp_path, values(tmp_path))
    code, text = printed(
        tmp_path / "config.yaml", "model.max_model_len=null", "model.max_prompt_tokens=null"
    )
    assert code == 1
    assert "lengths       not given\n" in text


def test_a_missing_file_is_a_problem(tmp_path):
    code, text = printed(tmp_path / "none.yaml")
    assert code == 1
    assert "there is no configuration file" in text


def test_what_is_wrong_with_parts_and_rows_is_told_too(tmp_path):
    config_of(tmp_path, values(tmp_path))
    code, text = printed(
        tmp_path / "config.yaml",
        "algorithm.policy_loss_fn_args={clip_rnge: 0.2}",
        "data_processor.experience_pipeline.operators=[{name: reward_filter, args: {min: 1}}]",
    )
    assert code == 1
    assert "policy_loss_fn 'ppo' has no option 'clip_rnge' (did you mean 'clip_range'?)" in text
    assert "operators[0] 'reward_filter' has no option 'min'" in text
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_nowhere_is_a_problem_where_the_hub_is_away(tmp_path, monkeypatch):
    config_of(tmp_path, values(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    code, text = printed(tmp_path / "config.yaml", "model.model_path=modle")
    assert code == 1
    problem = "problem: model.model_path (modle) is not on this machine, and "
    assert f"{problem}HF_HUB_OFFLINE is set; did you mean 'model'?\n" in text
    wanted = "HF_HUB_OFFLINE is set: expected a model's folder, or one downloaded before\n"
    assert wanted in printed(tmp_path / "config.yaml", "model.model_path=Shop/x")[1]
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 cannot be reached .*; did you mean 'mod"):
        checked(load_config(tmp_path / "config.yaml", ["model.model_path=modle"]))
    assert constants.HF_HUB_OFFLINE  # it is asked once


@pytest.mark.extension("external_model")
def test_a_model_of_someone_elses_has_to_answer(tmp_path):
    config_of(tmp_path, values(tmp_path))
    judge = "{engine_type: external, model_path: judge, base_urls: ['http://127.0.0.1:1/v1']}"
    code, text = printed(tmp_path / "config.yaml", f"explorer.auxiliary_models=[{judge}]")
    assert code == 1
    assert "explorer.auxiliary_models[0] (judge) at http://127.0.0.1:1/v1 does not answer" in text


def test_a_missing_file_is_told_with_the_script_that_may_make_it(tmp_path):
    """The sentence named the path alone, and the reader looked for the script in a README."""
    config_of(tmp_path, values(tmp_path))
    path, script = tmp_path / "config.yaml", tmp_path / "make_sums.py"
    script.touch()
    taskset = "buffer.explorer_input.taskset.path"
    code, text = printed(path, f"{taskset}={tmp_path}/sums_assets/train.jsonl")
    made = f"what is missing may be made by `python {script}`: run it first\n"
    assert code == 1 and text.endswith(f"problem: {made}")
    words = [f"--config={path}", f"{taskset}={tmp_path}/sums_assets/train.jsonl"]
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 2 and done.output.endswith(made)
    demo = f"{tmp_path}/arithmetic_assets/seed"
    for seed, flag in ((0, ""), (3, " --seed 3")):
        text = printed(path, f"{taskset}={demo}_{seed}/train.jsonl")[1]
        assert text.endswith(
            f"may be made by `python -m trireme.demo.prepare{flag}`: run it first\n"
        )
    # the demo's module does not make this one, and was named
    assert printed(path, f"{taskset}={demo}_0/pairs.jsonl")[1].endswith(f"problem: {made}")
    # mistyped, another run's checkpoint, and a problem of another kind
    (tmp_path / "train.jsonl").touch()
    for other in (f"{taskset}={tmp_path}/tarin.jsonl", "model.model_path=./c/global_step_2/actor"):
        assert "may be made by" not in printed(path, other)[1]
    assert "may be made by" not in printed(path, "buffer.batch_size=0")[1]

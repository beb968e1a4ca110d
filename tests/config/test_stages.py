import pytest
import yaml

from tests.config.made import SEEDS, config_of, values, write_rows
from trireme.config.stages import merge
from trireme.launch.check import draft, make_plans


def staged(tmp_path, stages, **sections):
    tree = values(tmp_path) | {"stages": stages}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return config_of(tmp_path, tree)


def warmup(tmp_path):
    """The `stages` of the GSM8K seed, with a data set that is there."""
    stages = yaml.safe_load((SEEDS / "stages.yaml").read_text())["stages"]
    data = write_rows(tmp_path / "sft.jsonl", 8)
    stages[0]["buffer"]["trainer_input"]["experience_buffer"]["path"] = str(data)
    return stages


def test_the_seeds_warmup_trains_first_and_explores_then(tmp_path):
    sft, rft = make_plans(staged(tmp_path, warmup(tmp_path)))
    assert (sft.mode, sft.config.algorithm.algorithm_type) == ("train", "sft")
    assert (sft.store.kind, sft.store.path) == ("file", str(tmp_path / "sft.jsonl"))
    assert (sft.steps.train, sft.steps.explore, sft.steps.train_batch_size) == (10, None, 128)
    assert sft.sync.method == "checkpoint"
    assert (rft.mode, rft.config.algorithm.algorithm_type) == ("both", "grpo")
    assert (rft.steps.explore, rft.steps.train_batch_size) == (4, 32)


def test_stages_lie_in_the_jobs_folder_and_hand_on_their_model(tmp_path):
    sft, rft = make_plans(staged(tmp_path, warmup(tmp_path)))
    job = tmp_path / "out" / "p" / "n"
    assert (sft.job_dir, rft.job_dir) == (job / "sft_warmup", job / "rft")
    assert (sft.model_from_stage, rft.model_from_stage) == (None, 0)


def test_a_stage_without_a_learning_rate_has_the_global_one(tmp_path):
    config = staged(
        tmp_path,
        warmup(tmp_path),
        algorithm={"optimizer": {"lr": 3e-4}, "policy_loss_fn_args": {"clip_range": 0.1}},
    )
    sft, rft = make_plans(config)
    assert sft.config.algorithm.optimizer.lr == rft.config.algorithm.optimizer.lr == 3e-4
    assert sft.config.algorithm.policy_loss_fn_args is None
    assert rft.config.algorithm.policy_loss_fn_args == {"clip_range": 0.1}


def test_stages_merge_onto_the_global_file_and_not_onto_each_other(tmp_path):
    stages = [
        {"stage_name": "a", "trainer": {"grad_clip": 0.1}, "buffer": {"batch_size": 4}},
        {"stage_name": "b", "trainer": {"save_interval": 7}},
    ]
    a, b = make_plans(staged(tmp_path, stages, trainer={"grad_clip": 0.5}))
    assert (a.config.trainer.grad_clip, b.config.trainer.grad_clip) == (0.1, 0.5)
    assert (a.steps.batch_size, b.steps.batch_size) == (4, 8)
    assert a.config.buffer.explorer_input == b.config.buffer.explorer_input


def test_a_stages_own_model_path_goes_before_the_last_stages(tmp_path):
    stages = [{"stage_name": "a"}, {"stage_name": "b", "model": {"model_path": "gpt2"}}]
    plans = draft(staged(tmp_path, stages)).plans
    assert [plan.model_from_stage for plan in plans] == [None, None]
    assert plans[1].model_path == "gpt2"


@pytest.mark.extension("sql")
def test_a_stage_that_trains_nothing_hands_on_no_model(tmp_path):
    stages = [{"stage_name": "a", "mode": "explore"}, {"stage_name": "b"}, {"stage_name": "c"}]
    plans = make_plans(staged(tmp_path, stages))
    assert [plan.model_from_stage for plan in plans] == [None, None, 1]


def test_other_data_inherit_no_format():
    base = {"path": "a", "format": {"prompt_key": "q"}, "storage_type": "queue", "name": "x"}
    assert merge(base, {"path": "b"}) == {"path": "b", "name": "x"}
    assert merge(base, {"path": "a", "name": "y"}) == base | {"name": "y"}


def test_another_algorithm_inherits_no_parts():
    base = {"algorithm_type": "grpo", "advantage_fn": "x", "kl_loss_fn_args": {}, "repeat_times": 4}
    assert merge(base, {"algorithm_type": "sft"}) == {"algorithm_type": "sft", "repeat_times": 4}
    assert merge(base, {"algorithm_type": "grpo"}) == base


def test_another_function_inherits_no_options():
    base = {"policy_loss_fn": "ppo", "policy_loss_fn_args": {"clip_range": 0.1}}
    assert merge(base, {"policy_loss_fn": "mine"}) == {"policy_loss_fn": "mine"}


def test_tasksets_replace_a_taskset():
    assert merge({"taskset": {"path": "a"}, "x": 1}, {"tasksets": []}) == {"x": 1, "tasksets": []}


def test_a_problem_of_one_stage_names_it_and_one_of_all_does_not(tmp_path):
    stages = warmup(tmp_path)
    del stages[0]["buffer"]["train_batch_size"]
    problems = draft(staged(tmp_path, stages, model={"model_path": "/no/model"})).problems
    texts = [str(problem) for problem in problems]
    assert sum("/no/model" in text for text in texts) == 1
    assert any(text.startswith("stage sft_warmup: buffer.train_batch_size") for text in texts)
    assert any(text.startswith("model.model_path") for text in texts)


def test_stages_have_names_of_their_own(tmp_path):
    with pytest.raises(ValueError, match="has 2 stages named 'a'"):
        make_plans(staged(tmp_path, [{"stage_name": "a"}, {"stage_name": "a"}]))

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.config.made import SEEDS, config_of, values, write_model
from trireme.cli.check import plan_rows
from trireme.config import ConfigError, load_config
from trireme.config.check import UNASKED_SAVE_INTERVAL
from trireme.launch.check import draft, make_plans


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 0)


def plan_of(tmp_path, *overrides, rows=32):
    return make_plans(config_of(tmp_path, values(tmp_path, rows), *overrides))[0]


def test_the_alfworld_seeds_numbers():
    (plan,), _, _ = draft(load_config(SEEDS / "alfworld.yaml"))
    assert (plan.lengths.max_model_len, plan.lengths.max_prompt_tokens) == (20480, 4096)
    assert plan.lengths.max_response_tokens == 16384
    assert (plan.steps.batch_size, plan.steps.repeat_times) == (16, 16)
    assert plan.steps.train_batch_size == 7680
    assert plan.engine.runners == 32
    assert plan.lengths.max_token_len == 16384
    assert (plan.sync.style, plan.sync.interval) == ("explorer_driven", 2)
    assert plan.sync.eval_interval == 100
    assert not plan.sync.share_tensors
    assert not plan.deterministic


@pytest.mark.extension("sql")
def test_the_alfworld_seed_lacks_nothing_but_its_data():
    problems = draft(load_config(SEEDS / "alfworld.yaml")).problems
    keys = {problem.key for problem in problems}
    taskset = "buffer.explorer_input.taskset"
    assert keys <= {f"{taskset}.path", f"{taskset}.default_workflow_type"}


@pytest.mark.extension("replay")
@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ("priority_fn_args.decay=fast", "decay is 'fast': expected a number"),
        (
            "priority_fn_args.speed=2",
            "priority_fn 'linear_decay' has no option 'speed'. It has: decay",
        ),
        ("priority_fn=newest", "priority_fn"),
    ],
)
def test_options_of_the_replay_are_checked(tmp_path, replay, message):
    key = "buffer.trainer_input.experience_buffer.replay_buffer"
    with pytest.raises(ConfigError, match=message):
        plan_of(tmp_path, f"{key}.enable=true", f"{key}.{replay}")


def test_the_gsm8k_seed_runs_as_it_stands(tmp_path, monkeypatch):
    tree = values(tmp_path, rows=300)
    monkeypatch.setenv("TRINITY_MODEL_PATH", tree["model"]["model_path"])
    monkeypatch.setenv("TRINITY_TASKSET_PATH", str(_hub_layout(tmp_path / "gsm8k", 300)))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "root"))
    (plan,) = make_plans(load_config(SEEDS / "gsm8k.yaml"))
    assert plan.steps.explore == plan.steps.train == plan.steps.per_epoch == 2
    assert plan.steps.train_batch_size == 1024
    assert plan.sync.share_tensors
    assert plan.deterministic
    assert plan.store.kind == "queue"
    assert plan.store.path == f"sqlite:///{plan.job_dir}/buffer/gsm8k.db"
    assert plan.places.gpus == {"explorer": 0, "trainer": 0}
    about_gpus = [note for note in plan.notes if "GPU" in note]
    assert about_gpus == [
        "cluster asks for 2 GPUs (1 node x 2: 1 for engines (1 x 1), 1 for the trainer) and this "
        "machine has none: the run is local, one process, on the CPU"
    ]


def _hub_layout(folder: Path, rows: int) -> Path:
    from tests.config.made import write_rows

    for split in ("train", "test"):
        write_rows(folder / "main" / f"{split}-00000-of-00001.jsonl", rows)
    return folder


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.max_model_len=100"], (100, 36, 64)),
        (["model.max_response_tokens=null", "model.max_model_len=101"], (101, 50, 51)),
        (["model.max_response_tokens=null", "model.max_prompt_tokens=30"], (256, 30, 226)),
        (["model.max_model_len=null", "model.max_prompt_tokens=30"], (94, 30, 64)),
        (["model.max_prompt_tokens=30"], (256, 30, 64)),
    ],
)
def test_lengths_follow_from_what_is_given(tmp_path, overrides, expected):
    found = plan_of(tmp_path, *overrides).lengths
    found = (found.max_model_len, found.max_prompt_tokens, found.max_response_tokens)
    assert found == expected


def test_the_shortest_response_is_shorter_than_the_longest(tmp_path):
    assert plan_of(tmp_path, "model.min_response_tokens=9").lengths.min_response_tokens == 9
    assert plan_of(tmp_path, "model.min_response_tokens=64").lengths.min_response_tokens == 63


def test_steps_follow_from_rows_and_epochs(tmp_path):
    plan = plan_of(tmp_path, "buffer.total_epochs=3", rows=20)
    assert plan.steps.per_epoch == 2
    assert plan.steps.explore == 7  # 60 rows in batches of 8
    assert plan_of(tmp_path, "buffer.total_steps=9", rows=20).steps.explore == 9


def test_train_steps_past_the_last_task_are_noted(tmp_path):
    def noted(*words):
        plan = plan_of(tmp_path, "trainer.total_steps=5", *words, rows=20)
        return [note for note in plan.notes if "total_steps (5)" in note]

    [note] = noted()
    assert "the tasks give 2, and the run ends there" in note and "total_epochs" in note
    for words in (["buffer.total_steps=5"], ["buffer.total_epochs=2"]):
        assert noted(*words) == []


def test_smaller_train_batches_make_more_train_steps(tmp_path):
    plan = plan_of(tmp_path, "buffer.train_batch_size=20", rows=16)
    assert plan.steps.explore == 2
    assert plan.steps.train == 4  # 64 experiences, the last batch smaller
    assert not plan.sync.share_tensors


def test_a_users_workflow_leaves_the_train_steps_open(tmp_path):
    text = "from trireme import workflow\n@workflow('of_a_plan')\nasync def f(task, model): ..."
    (tmp_path / "my_plan.py").write_text(text)
    plan = plan_of(
        tmp_path,
        "plugins=[my_plan.py]",
        "buffer.explorer_input.taskset.default_workflow_type=of_a_plan",
    )
    assert plan.steps.train is None
    assert plan.steps.schedule == 4


STORE = "buffer.trainer_input.experience_buffer"


@pytest.mark.extension("replay", "sql")
@pytest.mark.parametrize(
    ("override", "shared", "deterministic"),
    [
        ("trainer.grad_clip=1.0", True, True),
        ("synchronizer.sync_interval=2", False, False),
        ("synchronizer.sync_offset=1", False, False),
        ("synchronizer.sync_style=Dynamic_By_Trainer", False, False),
        ("synchronizer.sync_method=offline", False, False),
        ("model.lora_configs=[{lora_rank: 8}]", False, True),
        ("deterministic=false", True, False),
        ("buffer.train_batch_size=16", False, False),
        (f"{STORE}.storage_type=sql", True, True),
        (f"{STORE}.replay_buffer={{enable: true}}", True, True),
        (f"{STORE}.replay_buffer={{enable: true, reuse_cooldown_time: 1}}", False, False),
        (f"{STORE}={{storage_type: sql, replay_buffer: {{enable: true}}}}", False, False),
        ("explorer.dynamic_timeout.enable=true", True, False),
    ],
)
def test_tensors_are_shared_only_in_lock_step(tmp_path, override, shared, deterministic):
    plan = plan_of(tmp_path, override)
    assert (plan.sync.share_tensors, plan.deterministic) == (shared, deterministic)


@pytest.mark.extension("replay")
def test_a_replay_that_uses_groups_again_has_no_known_number_of_train_steps(tmp_path):
    once, again = "enable: true", "enable: true, reuse_cooldown_time: 1"
    plans = [plan_of(tmp_path, f"{STORE}.replay_buffer={{{keys}}}") for keys in (once, again)]
    assert [plan.steps.train for plan in plans] == [plans[0].steps.schedule, None]
    assert plans[1].counted == ("explorer", plans[1].steps.explore)
    rows = [dict(plan_rows(plan)) for plan in plans]
    assert all(row["buffer"].startswith("queue with replay, ") for row in rows)
    assert "train as long as there are experiences" in rows[1]["steps"]


@pytest.mark.parametrize(
    ("given", "style"),
    [
        ("fixed", "fixed"),
        ("dynamic_by_explorer", "explorer_driven"),
        ("EXPLORER_DRIVEN", "explorer_driven"),
        ("dynamic_by_trainer", "trainer_driven"),
        ("trainer_driven", "trainer_driven"),
        ("fully_async", "fully_async"),
    ],
)
def test_styles_have_two_names(tmp_path, given, style):
    assert plan_of(tmp_path, f"synchronizer.sync_style={given}").sync.style == style


@pytest.mark.extension("sql")
@pytest.mark.parametrize(
    ("mode", "given", "method"),
    [
        ("both", "online", "memory"),
        ("both", "offline", "checkpoint"),
        ("explore", "nccl", "checkpoint"),
        ("train", "memory", "checkpoint"),
    ],
)
def test_how_weights_travel_depends_on_the_mode(tmp_path, mode, given, method):
    overrides = [f"mode={mode}", f"synchronizer.sync_method={given}", "buffer.train_batch_size=32"]
    plan = plan_of(tmp_path, *overrides)
    assert plan.sync.method == method
    noted = [note for note in plan.notes if "sync_method" in note]
    assert bool(noted) == (given in ("online", "memory"))  # nccl is the default: nobody's wish


@pytest.mark.extension("remote")
def test_a_note_on_weights_says_how_they_travel_to_servers(tmp_path):
    remote = [
        "explorer.rollout_model.engine_type=remote",
        "explorer.rollout_model.base_urls=[http://h:1]",
    ]
    assert not [note for note in plan_of(tmp_path, *remote).notes if "sync_method" in note]
    (noted,) = [
        note
        for note in plan_of(tmp_path, *remote, "synchronizer.sync_method=online").notes
        if "sync_method" in note
    ]
    assert noted.endswith("(online): the trainer sends weights to the servers by HTTP")


@pytest.mark.extension("sql")
def test_two_processes_meet_in_sqlite(tmp_path):
    plan = plan_of(tmp_path, "mode=explore")
    assert plan.store.kind == "sql"
    assert plan.store.path == f"sqlite:///{plan.job_dir}/buffer/experience_buffer.db"


@pytest.mark.extension("sql")
def test_other_places_of_the_store_are_kept(tmp_path):
    key = "buffer.trainer_input.experience_buffer"
    there = plan_of(tmp_path, f"{key}.storage_type=sql", f"{key}.path=postgresql://host/db")
    assert there.store.path == "postgresql://host/db"
    absolute = plan_of(tmp_path, f"{key}.path=sqlite:////data/x.db")
    assert absolute.store.path == "sqlite:////data/x.db"
    copy = plan_of(tmp_path, f"{key}.storage_type=file", f"{key}.path=copy.jsonl")
    assert (copy.store.kind, copy.store.path) == ("queue", f"{copy.job_dir}/buffer/copy.jsonl")


def test_evaluation_falls_on_a_synchronised_step(tmp_path):
    def interval(evaluation, sync):
        keys = (f"explorer.eval_interval={evaluation}", f"synchronizer.sync_interval={sync}")
        return plan_of(tmp_path, *keys).sync.eval_interval

    assert [interval(50, 1), interval(50, 7), interval(3, 7)] == [50, 49, 7]


def test_a_job_begun_anew_gets_the_time_in_its_name(tmp_path):
    old = plan_of(tmp_path).job_dir
    assert old == tmp_path / "out" / "p" / "n"
    assert plan_of(tmp_path, "continue_from_checkpoint=false").job_dir == old
    old.mkdir(parents=True)
    (old / "log").mkdir()
    assert plan_of(tmp_path).job_dir == old
    anew = plan_of(tmp_path, "continue_from_checkpoint=false").job_dir
    assert anew.parent == old.parent
    assert anew.name.removeprefix("n_").isdigit()
    assert plan_of(tmp_path, "group=g").job_dir == tmp_path / "out" / "p" / "g" / "n"


def test_micro_batches_hold_two_sequences_and_at_least_1024_tokens(tmp_path):
    assert plan_of(tmp_path).lengths.max_token_len == 1024
    assert plan_of(tmp_path, "model.max_model_len=800").lengths.max_token_len == 1600
    assert plan_of(tmp_path, "trainer.max_token_len_per_gpu=300").lengths.max_token_len == 300


@pytest.mark.extension("vllm", "verl")
def test_keys_of_other_engines_are_listed_and_others_mapped(tmp_path):
    plan = plan_of(
        tmp_path,
        "explorer.rollout_model.engine_type=vllm",
        "explorer.rollout_model.engine_num=2",
        "explorer.rollout_model.enforce_eager=true",
        "explorer.rollout_model.enable_auto_tool_choice=true",
        "trainer.trainer_strategy=fsdp2",
    )
    notes = "\n".join(plan.notes)
    assert "engine_type (vllm): the embedded torch engine generates in its place" in notes
    assert "without effect here: explorer.rollout_model.enforce_eager=True" in notes
    assert "enable_auto_tool_choice (True): a reply's tool calls are read wherever" in notes
    assert "trainer.trainer_strategy (fsdp2): one process trains" in notes
    assert plan.engine.runners == 16


def test_the_configuration_is_not_changed_by_planning(tmp_path):
    config = config_of(tmp_path, values(tmp_path))
    before = repr(config)
    make_plans(config)
    assert repr(config) == before


@pytest.mark.parametrize(("gpus", "said"), [(1, "the trainer computes in float32"), (0, "a CPU")])
def test_float16_is_not_the_trainers(gpus, said, tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: gpus)
    notes = plan_of(tmp_path, "explorer.rollout_model.dtype=float16").notes
    assert any(f"rollout_model.dtype (float16): {said}" in note for note in notes)


def test_one_gpu_is_shared(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 1)
    plan = plan_of(tmp_path)
    assert (plan.device, plan.dtype) == ("cuda", "bfloat16")
    assert plan.places.gpus == {"explorer": 1, "trainer": 1}


@pytest.mark.extension("http")
@pytest.mark.extension("sql")
@pytest.mark.parametrize(
    ("overrides", "address", "says"),
    [
        ([], "127.0.0.1", "for this machine only"),
        (["explorer.rollout_model.api_key=secret"], "0.0.0.0", ""),
        (["explorer.listen_address=localhost"], "localhost", ""),
    ],
)
def test_a_server_without_a_key_is_on_loopback(tmp_path, overrides, address, says):
    config = config_of(tmp_path, values(tmp_path), "mode=serve", *overrides)
    [plan] = make_plans(config)
    assert plan.listen_address == address
    noted = [note for note in plan.notes if note.startswith("explorer.listen_address")]
    assert all(says in note for note in noted) and len(noted) == bool(says)
    assert (plan.store.kind, plan.sync.method) == ("sql", "checkpoint")


@pytest.mark.extension("http", "sql", "verl")
def test_a_server_needs_no_tasks_and_no_group_size(tmp_path):
    given = values(tmp_path)
    del given["buffer"]["explorer_input"]
    [plan] = make_plans(
        config_of(
            tmp_path,
            given,
            "mode=serve",
            "algorithm.repeat_times=1",
            "trainer.trainer_config={a: 1}",
        )
    )
    assert plan.mode == "serve"


@pytest.mark.extension("sql")
def test_total_steps_without_tasks_are_those_of_a_trainer_beside_a_server(tmp_path):
    """Beside an explorer, which has tasks, they are explore steps, and end no trainer."""
    steps = ("mode=train", "buffer.total_steps=20")
    [beside_an_explorer] = make_plans(config_of(tmp_path, values(tmp_path), *steps))
    assert beside_an_explorer.steps.train is None and beside_an_explorer.steps.schedule == 20
    given = values(tmp_path)
    del given["buffer"]["explorer_input"]
    for words, train in (((), 20), (("trainer.total_steps=7",), 7)):
        [plan] = make_plans(config_of(tmp_path, given, *steps, *words))
        assert plan.steps.train == plan.steps.schedule == train


@pytest.mark.parametrize(
    ("lora", "others", "rank"),
    [
        ("{lora_rank: 8}", [], 8),
        ("{lora_rank: 8, use_rslora: true}", [], 8),
        ("{lora_rank: 8, use_dora: true}", [], 0),
        ("{lora_rank: 8, target_modules: [lm_head, q_proj]}", [], 0),
        ("{lora_rank: 8, target_modules: [model.embed_tokens]}", [], 0),
        ("{lora_rank: 8, target_modules: [q_proj, layers.0.mlp.up_proj]}", [], 8),
        ("{lora_rank: 8, target_modules: '.*(lm_head|q_proj)'}", [], 0),
        ("{lora_rank: 8, target_modules: all-linear}", [], 8),
        ("{lora_rank: 8}", ["synchronizer.sync_method=checkpoint"], 0),
        ("{lora_rank: 1024}", [], 1024),  # an embedded engine has room for any
    ],
)
def test_an_adapter_is_pushed_alone_where_the_engine_can_hold_it(tmp_path, lora, others, rank):
    plan = plan_of(tmp_path, f"model.lora_configs=[{lora}]", *others)
    assert plan.sync.adapter_rank == rank and plan.has_adapter
    assert not plan.sync.share_base  # on a CPU merged weights decode faster


@pytest.mark.parametrize(
    ("facts", "rank"),
    [
        ({}, 8),
        ({"init_lora_weights": "gaussian"}, 8),
        ({"init_lora_weights": "pissa"}, 0),  # the trainer's base is not the engines' then
        ({"init_lora_weights": "olora"}, 0),
        ({"use_dora": True}, 0),
    ],
)
def test_an_adapter_begun_from_is_pushed_alone_where_it_left_the_base_as_it_is(
    tmp_path, facts, rank
):
    (folder := tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **facts}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    plan = plan_of(tmp_path, f"model.lora_configs=[{{path: {folder}}}]")
    assert plan.sync.adapter_rank == rank and plan.has_adapter


ADDS, MERGES = "explorer.rollout_model.enable_lora=true", "explorer.rollout_model.enable_lora=false"


@pytest.mark.parametrize(
    ("gpus", "lora", "others", "shares"),
    [
        (0, "{}", [], False),
        (0, "{}", [ADDS], True),
        (1, "{}", [], True),
        (1, "{}", [MERGES], False),
        (1, "{}", ["synchronizer.sync_style=fully_async"], True),
        (1, "{}", ["mode=colocate"], True),
        (1, "{}", ["explorer.rollout_model.dtype=float32"], True),
        (1, "{}", ["explorer.rollout_model.dtype=float16"], False),
        (1, "{use_dora: true}", [], False),
        (1, "{target_modules: [lm_head]}", [], False),
        (1, "{target_modules: '.*q_proj'}", [], False),
        (1, "{}", ["synchronizer.sync_method=checkpoint"], False),
        (1, "{}", ["mode=train", "explorer.rollout_model.engine_type=torch"], False),
    ],
)
def test_an_engine_reads_the_base_of_an_adapter_where_it_can_add_it(
    tmp_path, gpus, lora, others, shares, monkeypatch
):
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: gpus)
    given = (f"model.lora_configs=[{lora}]", "cluster.launcher=local", *others)
    (plan,), _, _ = draft(config_of(tmp_path, values(tmp_path), *given))
    assert plan.sync.share_base == shares and not plan.sync.share_tensors
    asked, _, _ = draft(config_of(tmp_path, values(tmp_path), *given, ADDS))
    said = [note for note in asked[0].notes if "enable_lora (true)" in note]
    vain = not asked[0].sync.share_base and plan.mode == "both"
    assert bool(said) == vain


def test_a_supervised_stage_shares_the_base_with_the_engine_that_evaluates_it(tmp_path):
    data = tmp_path / "sft.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    store = f"buffer.trainer_input.experience_buffer.path={data}"
    given = ("mode=train", "algorithm.algorithm_type=sft", "buffer.train_batch_size=1", store)
    given += ("model.lora_configs=[{lora_rank: 8}]",)
    shared, copied = plan_of(tmp_path, *given, ADDS), plan_of(tmp_path, *given)
    assert shared.sync.share_base and shared.sync.adapter_rank == 8
    assert not copied.sync.share_base and copied.sync.adapter_rank == 0


OPTIMIZER, BONUS = "algorithm.optimizer", "algorithm.entropy_loss_fn"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([f"{OPTIMIZER}.lr=0"], "algorithm.optimizer.lr (0): no weight of the policy moves"),
        (
            ["algorithm.algorithm_type=ppo", "algorithm.critic.optimizer.lr=0"],
            "algorithm.critic.optimizer.lr (0): no weight of the value model moves",
        ),
        (
            ["algorithm.algorithm_type=ppo", "algorithm.critic.warmup_steps=4"],
            "algorithm.critic.warmup_steps (4): the value model alone learns in all 4 train steps, "
            "and the policy in none",
        ),
        (
            [f"{OPTIMIZER}.lr=0.1", f"{OPTIMIZER}.lr_warmup_steps=40"],
            "algorithm.optimizer.lr_warmup_steps (40): after 4 optimizer steps the learning rate "
            "is 0.01, and not lr (0.1)",
        ),
        (
            [
                *("algorithm.algorithm_type=ppo", "algorithm.critic.warmup_steps=1"),
                *(f"{OPTIMIZER}.lr=0.1", f"{OPTIMIZER}.lr_warmup_steps=4"),
            ],
            "algorithm.optimizer.lr_warmup_steps (4): after 3 optimizer steps the learning rate "
            "is 0.075, and not lr (0.1)",
        ),
        (
            ["trainer.save_interval=5"],
            "trainer.save_interval (5): of 4 train steps none is saved but the last",
        ),
        (
            ["explorer.eval_interval=3"],
            "explorer.eval_interval (3): there are no eval_tasksets in buffer.explorer_input, and "
            "nothing is evaluated",
        ),
        (
            ["buffer.explorer_input.taskset.format.tools_key=my_tools"],
            "buffer.explorer_input.taskset.format (tools_key=my_tools): read for data to learn "
            "from; for tasks, only a workflow of your own can",
        ),
        (
            ["synchronizer.sync_interval=4"],
            "synchronizer.sync_interval (4): all 4 explore steps are sampled by the first weights",
        ),
        (
            ["synchronizer.sync_interval=3", "trainer.total_steps=2"],
            "synchronizer.sync_interval (3): all 2 explore steps that are trained are sampled by "
            "the first weights",
        ),
        (
            ["synchronizer.sync_interval=1", "synchronizer.sync_offset=2", "trainer.total_steps=2"],
            "synchronizer.sync_interval (1), sync_offset (2): all 2 explore steps that are trained "
            "wait for no new weights",
        ),
        (
            [
                "synchronizer.sync_style=dynamic_by_explorer",
                "synchronizer.sync_interval=2",
                "synchronizer.sync_offset=2",
            ],
            "synchronizer.sync_interval (2), sync_offset (2): all 4 explore steps are sampled by "
            "the first weights",
        ),
        pytest.param(
            ["trainer.callbacks=[a:B, c]", "mode=explore"],
            "trainer.callbacks (a:B, c): nothing trains in mode explore, and none is called",
            marks=pytest.mark.extension("sql"),
        ),
        (
            ["algorithm.kl_loss_fn=none", "algorithm.kl_loss_fn_args={kl_coef: 0.1}"],
            "algorithm.kl_loss_fn_args: without effect, since kl_loss_fn is none",
        ),
        (
            [
                "algorithm.entropy_loss_fn=none",
                "algorithm.entropy_loss_fn_args={entropy_coef: 0.1}",
            ],
            "algorithm.entropy_loss_fn_args: without effect, since entropy_loss_fn is none",
        ),
    ],
)
def test_what_changes_nothing_is_noted(tmp_path, overrides, told):
    steps = ["buffer.total_steps=4", "trainer.total_steps=4"]
    assert told not in plan_of(tmp_path, *steps).notes
    assert plan_of(tmp_path, *steps, *overrides).notes.count(told) == 1


def test_replay_notes_that_blocks_are_not_compiled(tmp_path):
    write_model(tmp_path / "mixture", num_experts=8)
    given = [f"model.model_path={tmp_path}/mixture", "trainer.use_torch_compile=true"]
    replay = "algorithm.enable_router_replay=true"
    note = "trainer.use_torch_compile (true): blocks with experts are not compiled"
    for more, count in (([], 0), ([replay], 1)):
        notes = plan_of(tmp_path, *given, *more).notes
        assert len([each for each in notes if each.startswith(note)]) == count


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("both", 0),
        pytest.param("explore", 0, marks=pytest.mark.extension("sql")),
        pytest.param("train", 1, marks=pytest.mark.extension("sql")),
    ],
)
def test_experts_that_no_engine_of_the_stage_records_are_noted(tmp_path, mode, count):
    write_model(tmp_path / "mixture", num_experts=8)
    given = [f"mode={mode}", f"model.model_path={tmp_path}/mixture"]
    key = "explorer.rollout_model.enable_return_routed_experts"
    notes = plan_of(tmp_path, *given, f"{key}=true").notes
    told = f"{key} (true): this stage has no engine that records experts for a trainer"
    assert notes.count(told) == count


@pytest.mark.parametrize(
    ("given", "noted"),
    [
        pytest.param(["policy_loss_fn=geo_mean"], True, marks=pytest.mark.extension("more_losses")),
        pytest.param(
            ["policy_loss_fn=geo_mean", "loss_agg_mode=seq-mean-token-mean"],
            False,
            marks=pytest.mark.extension("more_losses"),
        ),
        (["algorithm_type=gspo", "loss_agg_mode=token-mean"], True),
        (["algorithm_type=gspo"], False),
        ([], False),
    ],
)
def test_a_loss_of_samples_that_is_averaged_by_their_length_is_noted(tmp_path, given, noted):
    keys = [f"algorithm.{key}" for key in given]
    notes = [n for n in plan_of(tmp_path, *keys).notes if "loss of whole samples" in n]
    begin = "algorithm.loss_agg_mode (token-mean): policy_loss_fn '"
    assert [note.startswith(begin) for note in notes] == [True] * noted


@pytest.mark.extension("sql")
def test_what_changes_something_is_not_noted(tmp_path):
    steps = ["buffer.total_steps=4", "trainer.total_steps=4"]
    plain = plan_of(tmp_path, *steps).notes
    useful = ["trainer.save_interval=4", "synchronizer.sync_interval=3", f"{OPTIMIZER}.lr=0.1"]
    assert plan_of(tmp_path, *steps, *useful, f"{OPTIMIZER}.lr_warmup_steps=4").notes == plain
    by_rlhf = plan_of(tmp_path, *steps, f"trainer.save_interval={UNASKED_SAVE_INTERVAL}")
    assert by_rlhf.notes == plain
    for comes in ("sync_interval=4", "sync_offset=3", "sync_style=fully_async"):
        ahead = plan_of(tmp_path, "buffer.total_steps=9", f"synchronizer.{comes}").notes
        assert not any("weights" in note for note in ahead)
    explores = [*steps, "mode=explore", f"{OPTIMIZER}.lr=0", "trainer.save_interval=9"]
    assert not any("lr (0)" in note for note in plan_of(tmp_path, *explores).notes)


def test_a_save_interval_of_the_whole_file_is_not_noted_of_its_short_stages(tmp_path):
    tree: dict[str, Any] = values(tmp_path) | {"trainer": {"save_interval": 100}}
    short = {"stage_name": "one", "trainer": {"total_steps": 2}}
    itself = {"stage_name": "one", "trainer": {"total_steps": 2, "save_interval": 50}}
    task = tree["buffer"]["explorer_input"]["taskset"]
    evaluates = {"explorer_input": {"eval_tasksets": [task]}}
    other = {"stage_name": "two"}
    bench = {**other, "mode": "bench", "buffer": evaluates}
    for stages, told in (([short, other], []), ([itself, other], [50]), ([short, bench], [100])):
        plans = make_plans(config_of(tmp_path, tree | {"stages": stages}))
        notes = [note for plan in plans for note in plan.notes if "none is saved" in note]
        expected = "trainer.save_interval ({}): of 2 train steps none is saved but the last"
        assert notes == [expected.format(interval) for interval in told]


def test_an_interval_of_the_whole_file_is_noted_where_no_stage_evaluates(tmp_path):
    tree: dict[str, Any] = values(tmp_path) | {"explorer": {"eval_interval": 1}}
    task = tree["buffer"]["explorer_input"]["taskset"]
    evaluates = {"buffer": {"explorer_input": {"eval_tasksets": [task]}}}
    for first, count in ((evaluates, 0), ({}, 2)):
        stages = [{"stage_name": "one", **first}, {"stage_name": "two"}]
        plans = make_plans(config_of(tmp_path, tree | {"stages": stages}))
        notes = [note for plan in plans for note in plan.notes]
        assert sum("nothing is evaluated" in note for note in notes) == count

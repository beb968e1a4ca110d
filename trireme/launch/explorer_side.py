"""Explorer side: the half of a run that tries tasks, with its runners and their sampling settings.

It receives an engine, a buffer and a synchronizer, in this process or another: it does not know
where its trainer runs. `launch/modes.py` runs the two together.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from trireme.buffer.buffer import Puts
from trireme.checkpoint.layout import EVALUATED, FAILED
from trireme.checkpoint.manifest import prove
from trireme.config import Plan
from trireme.config.lookup import located, weight_files
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.engine import Engine, Sampling, ServedEngine, with_options
from trireme.explorer.explorer import Explorer, ExplorerSettings
from trireme.explorer.runner import Key, Runner, TimeLimit, batch_order
from trireme.explorer.scheduler import OverRollout, Scheduler
from trireme.launch.copies import FAILED_BYTES
from trireme.launch.data import Text
from trireme.launch.engines import (
    Auxiliary,
    AuxiliaryModel,
    make_auxiliary,
    refuse_other_vocabulary,
)
from trireme.launch.results import StageResult
from trireme.launch.stage import Stage
from trireme.log import get_logger
from trireme.model.address import Addresses
from trireme.model.model import Model
from trireme.registry import MODELS
from trireme.sync.checkpoint import PolledSync
from trireme.sync.synchronizer import ExplorerSync
from trireme.task import Task

logger = get_logger("explorer")

UNLIMITED = 2**31
"""A limit in tokens for an API, which has its own limits."""


class ExplorerSide:
    """The explorer of one plan; its trainer is here, in an actor, or another command."""

    def __init__(
        self, stage: Stage, engine: Engine, buffer: Puts | None, sync: ExplorerSync
    ) -> None:
        """Without a `buffer` it only evaluates."""
        plan, config = stage.plan, stage.plan.config.explorer
        self.stage = stage
        self.engine = engine
        self.models = make_auxiliary(plan, stage.device)
        teacher = stage.recipe.needs_teacher and buffer is not None
        if teacher:
            first = self.models[0]
            assert isinstance(first, Auxiliary), "check refuses one that scores no given tokens"
            theirs, ours = first.chat.tokenizer, stage.text.tokenizer
            refuse_other_vocabulary(first.model_path, theirs, ours)
        settings = ExplorerSettings(
            name=plan.explorer_name or "explorer",
            eval_interval=plan.sync.eval_interval,
            eval_on_startup=config.eval_on_startup,
            eval_prefix="bench" if plan.mode == "bench" else "eval",
            max_failures=config.max_failures,
            max_pending=_max_pending(plan),
            notes=plan.notes,
        )
        self.explorer = Explorer(
            taskset=stage.taskset,
            eval_tasksets=stage.eval_tasksets,
            scheduler=make_scheduler(
                plan,
                stage.model_path,
                engine,
                stage.text,
                stage.barrier,
                greedy_run=stage.recipe.greedy_run,
                teacher=teacher,
                auxiliary=self.models,
            ),
            pipeline=stage.pipeline(),
            buffer=buffer,
            sync=sync,
            settings=settings,
            emit=stage.emit,
            folder=stage.folder if plan.mode == "explore" else None,
        )
        self.explore = self.explorer.explore
        self.pull_last: Callable[[], Awaitable[None]] | None = None
        """Loads the last weights of another command's trainer, for the evaluation at the end."""
        # several explorers would write the same files, and bench would overwrite the run's
        # evaluations
        if not plan.explorer_name and plan.mode != "bench":
            stage.copy(EVALUATED)
            stage.copy(FAILED, most=FAILED_BYTES)
        if stage.resumed is not None and plan.mode == "both":
            state = stage.resumed.run_state
            self.explorer.load_state(state["explorer"], state["buffer"].get("waiting"))

    async def load(self, step: int) -> None:
        """Load a checkpoint's weights into the engine, and verify them."""
        prove(weights := self.stage.folder.weights_dir(step))
        await self.engine.update_weights(weights, step)

    async def evaluate(self, step: int = 0) -> None:
        """Run all evaluation tasksets: at the explorer's own step, by which the earlier evaluations
        are numbered, or at train step `step` if it has explored nothing.
        """
        if self.pull_last is not None and self.explorer.eval_tasksets:
            await self.pull_last()
        await self.explorer.evaluate_last(self.explorer.step or step)

    async def result(self) -> StageResult:
        """Return the explorer's result."""
        result, explorer = self.stage.result(), self.explorer
        result.first, result.first_examples = explorer.first_evaluation, explorer.first_examples
        if explorer.last_evaluation is not explorer.first_evaluation:
            result.last, result.last_examples = explorer.last_evaluation, explorer.last_examples
        result.steps = explorer.step
        result.phases |= explorer.seconds
        return result

    async def close(self) -> None:
        """End the runners and the auxiliary models."""
        await self.explorer.close()
        for model in self.models:
            if isinstance(model, Auxiliary):
                await model.engine.close()


def _max_pending(plan: Plan) -> int:
    """Return the default limit of concurrent explore steps: as many as the runners can work on, so
    that slow environments leave no runner idle, but at least two.
    """
    if plan.sync.style not in ("trainer_driven", "fully_async"):
        return 1 << 30
    return max(2, plan.engine.runners // max(plan.steps.batch_size, 1))


async def lone_explorer(stage: Stage, engine: Engine) -> ExplorerSide:
    """Make the explorer of a mode without a trainer; to explore, the engine first loads the newest
    weights of the command that trains.
    """
    sync, explores = polled_sync(stage, engine), stage.plan.mode == "explore"
    if explores:
        await load_newest(stage, engine, sync)
    side = ExplorerSide(stage, engine, stage.buffer if explores else None, sync)
    side.pull_last = sync.pull_last if explores else None
    return side


async def load_newest(stage: Stage, engine: Engine, sync: PolledSync) -> None:
    """Load the newest weights of the command that trains, or the model's own before its first."""
    if not stage.folder.latest_weights_step():
        await load_own(stage, engine)
    await sync.load_latest()


async def load_own(stage: Stage, engine: Engine) -> None:
    """Load the model's own weights into a user's servers that have those of an earlier run; engines
    that a run starts have them.
    """
    if not stage.plan.on_users_servers or not any(await cast("ServedEngine", engine).versions()):
        return
    folder = located(stage.model_path, "models")
    if folder is None or not weight_files(folder):
        logger.warning(
            "the weights of %s are not on this machine: the rollout servers generate with those "
            "that they have, which may be an earlier run's",
            stage.model_path,
        )
        return
    await engine.update_weights(folder, 0)


def polled_sync(stage: Stage, engine: Engine) -> PolledSync:
    """Make the synchronizer of an explorer whose trainer is another command."""
    plan = stage.plan
    sync = PolledSync(
        engine,
        stage.folder,
        style=plan.sync.style,
        interval=plan.sync.interval,
        offset=plan.sync.offset,
        timeout=plan.config.synchronizer.sync_timeout,
        dtype=plan.dtype,
        old_report=stage.old_report,
        store=lambda: stage.buffer,  # made after the weights are loaded
    )
    if (servers := engine.servers) is not None:  # restarted servers get their weights through it
        sync.persist, servers.renew = servers.persist, sync.renew
    return sync


def make_scheduler(
    plan: Plan,
    model_path: str,
    engine: Engine,
    text: Text,
    barrier: RolloutBarrier | None,
    *,
    greedy_run: bool = False,
    teacher: bool = False,
    auxiliary: Sequence[AuxiliaryModel] = (),
    max_retries: int | None = None,
) -> Scheduler:
    """Make the scheduler with the plan's number of runners, each of which makes a Model per
    attempt.

    With `greedy_run` run 0 of every training task is greedy. `auxiliary` are models that workflows
    may call; with `teacher` the first of them scores the sampled tokens. `max_retries` overrides
    the plan's.
    """
    if plan.api is not None:  # an API has its own limits, in its own tokens
        most = {"max_model_len": UNLIMITED, "max_prompt_tokens": UNLIMITED - 1}
        plan = replace(plan, lengths=replace(plan.lengths, **most))
    model_type: type[Model] = MODELS.get(engine.traits.model)
    model_type.attune(text.chat)
    remembered = [({}, sampling_of(plan, {}))]
    addresses = Addresses(engine, text.chat, model_path, plan.lengths.max_model_len)

    def make_further(task: Task) -> list[Any]:
        key = (batch_order(task), task.task_id, -1)
        return [other.model(key) for other in auxiliary]

    def make_model(task: Task, key: Key) -> Model:
        # validated again only if the options changed: that takes as long as the rest of this
        if remembered[0][0] != task.rollout_args:
            args = copy.deepcopy(dict(task.rollout_args))
            remembered[0] = args, sampling_of(plan, args)
        sampling = remembered[0][1]
        if greedy_run and key[2] == 0 and not task.is_eval:
            sampling = replace(sampling, temperature=0.0)
        return model_type(
            engine,
            text.chat,
            key=key,
            sampling=sampling,
            max_model_len=plan.lengths.max_model_len,
            max_prompt_tokens=plan.lengths.max_prompt_tokens,
            enable_prompt_truncation=plan.config.model.enable_prompt_truncation,
            model_path=model_path,
            auxiliary=[other.model(key) for other in auxiliary],
            gateway=addresses.address,
        )

    explorer = plan.config.explorer
    dynamic = explorer.dynamic_timeout
    limit = TimeLimit(
        explorer.max_timeout,
        ratio=dynamic.ratio if dynamic.enable else None,
        warmup=plan.steps.batch_size * max(dynamic.warmup_min_steps, 1),
    )
    runners = [
        Runner(
            make_model,
            engine,
            limit=limit,
            max_retries=explorer.max_retry_times if max_retries is None else max_retries,
            overlap=explorer.concurrent_mode != "sequential",
            barrier=barrier,
            index=index,
            explorer=plan.explorer_name,
            teacher=teacher,
        )
        for index in range(plan.engine.runners)
    ]
    over = explorer.over_rollout
    return Scheduler(
        runners,
        max_repeats_per_runner=explorer.max_repeat_times_per_runner,
        over_rollout=OverRollout(over.ratio, over.wait_after_min, over.return_partial_tasks)
        if over.ratio
        else None,
        report_interval=explorer.runner_state_report_interval,
        further=make_further if auxiliary else None,
        close_last=addresses.close,
        num_explore_steps=explore_steps(plan),
    )


def explore_steps(plan: Plan) -> int | None:
    """Return how many explore steps a run has; None: not known. Of a stage that reads a file the
    evaluations count train steps, and so do these.
    """
    return plan.steps.train if plan.store.kind == "file" else plan.steps.explore_needed


def sampling_of(plan: Plan, args: Mapping[str, Any]) -> Sampling:
    """Return a task's sampling settings: its `rollout_args` over the model section's defaults."""
    model = plan.config.model

    def given(name: str, default: Any) -> Any:
        value = args.get(name)
        return default if value is None else value

    options = {
        "max_tokens": given("max_tokens", plan.lengths.max_response_tokens),
        "min_tokens": given("min_tokens", plan.lengths.min_response_tokens),
        "temperature": given("temperature", model.temperature),
        "top_p": given("top_p", model.top_p),
        "top_k": given("top_k", model.top_k),
        "min_p": given("min_p", 0.0),
        "repetition_penalty": given("repetition_penalty", model.repetition_penalty),
        "stop": given("stop", ()),
        "stop_token_ids": given("stop_token_ids", ()),
        "ignore_eos": plan.config.explorer.rollout_model.ignore_eos,
        "logprobs": given("logprobs", model.logprobs),
    }
    return with_options(Sampling(), options)

"""Check: `trireme check`: prints the plan of a configuration, and all its problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from trireme.checkpoint.layout import JobFolder
from trireme.cli.arguments import Given
from trireme.cli.makers import in_full
from trireme.config import ConfigError, Plan
from trireme.config.memory import in_gib
from trireme.config.plan import unmet
from trireme.config.stages import used_tasksets
from trireme.log import hide_passwords
from trireme.monitor.terminal import Terminal

if TYPE_CHECKING:
    from trireme.config.placement import Places
    from trireme.config.sizes import Steps
    from trireme.config.sync import SyncPlan
    from trireme.launch.complete import Completed

_WIDTH = 14


def check(
    config: Path,
    overrides: Sequence[str] = (),
    console: Terminal | None = None,
    *,
    strict: bool = False,
    flags: Given | None = None,
) -> int:
    """Print every Plan of the file and every problem; the exit code is 1 if there is one. `flags`
    have set keys, and are named in their problems.

    `strict`: another engine or device than the YAML asks for is a problem.
    """
    console = console or Terminal(soft_wrap=True)
    with console.status(f"checking {config}"):  # the line is shown before torch is imported
        from trireme.launch.check import examine
        from trireme.launch.complete import complete
        from trireme.launch.parts import merge_problems

        try:
            plans, problems, parts = examine(config, overrides)
        except ConfigError as error:
            plans, problems, parts = [], list(error.problems), []
    for plan in plans:
        show_plan(plan, console)
    if strict:
        problems += dict.fromkeys(one for plan in plans for one in unmet(plan))
    completed = []
    if not problems:
        completed, no_hub = complete(plans, parts)
        if no_hub:
            console.print(Text(f"note: {no_hub}: only this machine is looked at", "dim"))
        stages = [made.stage for made in parts]
        problems = merge_problems(stages, [one.problems for one in completed])
    sentences = [str(problem) for problem in in_full(problems, config=config, flags=flags)]
    if not sentences:
        sentences = show_first_rows(plans, completed, console)
    show_problems(sentences, console)
    return 1 if sentences else 0


def show_plan(plan: Plan, console: Terminal) -> None:
    """Print one stage: its derived values by topic, then the settings that were mapped onto this
    machine.
    """
    title = plan.config.name if plan.stage_name is None else f"stage {plan.stage_name}"
    mode = "colocate" if plan.colocated else plan.mode
    console.print(Text(f"{title}: {plan.config.algorithm.algorithm_type}, {mode}", "bold"))
    for topic, value in plan_rows(plan):
        console.print(Text.assemble((f"{topic:<{_WIDTH}}", "cyan"), hide_passwords(value)))
    for note in plan.notes:
        console.print(Text(hide_passwords(f"note: {note}"), "dim"))
    console.print()


def show_first_rows(
    plans: Sequence[Plan], completed: Sequence[Completed], console: Terminal
) -> list[str]:
    """Print the lengths of the rows, and the asked or trained text of the first; returns their
    problems.
    """
    from trireme.cli.first_rows import first_rows, unread

    problems: list[str] = []
    for plan, done in zip(plans, completed, strict=True):
        try:
            lines, row_problems = first_rows(plan, done)
        except (ValueError, OSError) as error:  # for example, no tokenizer next to the model
            lines, row_problems = [unread(str(error))], []
        problems += row_problems
        if lines and plan.stage_name is not None:
            console.print(Text(f"stage {plan.stage_name}", "bold"))
        for topic, value in lines:
            style = "yellow" if topic == "warning" else "cyan"
            console.print(Text.assemble((f"{topic:<{_WIDTH}}", style), value))
    return problems


def show_problems(problems: Sequence[str], console: Terminal) -> None:
    """Print one line per problem, or that there is none."""
    for problem in problems:
        console.print(Text(hide_passwords(f"problem: {problem}"), "red"))
    if not problems:
        console.print(Text("no problems", "green"))


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return a Plan's values by topic, as text."""
    explores = plan.mode in ("both", "explore")
    trains = plan.mode in ("both", "train")
    rows = [("model", _model(plan)), ("lengths", _lengths(plan))]
    if explores:
        rows.append(("explore step", _explore_step(plan.steps)))
    if trains:
        rows.append(("train step", _train_step(plan.steps, plan.lengths.max_token_len)))
    if plan.memory.needs:
        again = "; activations are computed again" * plan.memory.gradient_checkpointing
        where = "in each trainer process" if plan.device == "cpu" else "on each trainer GPU"
        share = plan.memory.engine_share
        turns = "" if share is None else f"; while it works, the engine has {share:g} of it"
        rows.append(("memory", f"{in_gib(plan.memory.needs)} {where}{again}{turns}"))
    known = explores or trains
    rows.append(("steps", _steps(plan, explores, trains) if known else plan.until))
    if plan.mode != "train":
        engine = ", ".join(plan.engine.urls) or _engines(plan)
        engine = f"the API at {plan.api.base_url}" if plan.api else engine
        at_once = min(plan.engine.runners, plan.steps.batch_size) * plan.steps.repeat_times
        engines = max(plan.places.num_engines, len(plan.engine.urls))
        if engines:  # a plan with problems may have none
            each = -(-at_once // engines)
            requests = f"at most {each} requests at once{' an engine' * (each < at_once)}"
            rows.append(("runners", f"{plan.engine.runners} on {engine}: {requests}"))
    if explores:
        rows += [("evaluation", _evaluation(plan)), ("sync", _sync(plan.sync))]
    if trains or explores:
        replays = plan.config.buffer.trainer_input.experience_buffer.replay_buffer.enable
        kind = f"{plan.store.kind}{' with replay' * replays}"
        rows.append(("buffer", f"{kind}, {plan.store.path}"))
    gpus = ", ".join(f"{role} {count}" for role, count in plan.places.gpus.items())
    if plan.places.spread:
        rows.append(("places", _places(plan.places, plan.sync.takes_turns)))
    rows += [
        ("GPUs", f"{gpus} ({plan.device}, {plan.dtype})"),
        ("seed", f"{plan.seed}{_exactness(plan)}"),
        ("folder", f"{plan.job_dir}{_held(plan) if trains else ''}"),
    ]
    return rows


def _held(plan: Plan) -> str:
    """Describe the earlier attempt in the folder, which the run continues."""
    folder = JobFolder(plan.job_dir)
    step = max((step for step in folder.steps() if folder.is_full(step)), default=None)
    if step is None:
        return ""
    from trireme.launch.resume import continued  # takes long, and a new run does not need it

    most = continued(plan).steps.train
    past = most is not None and step >= most
    left = f", of the {most} requested: nothing is left to do" if past else ""
    return f" holds a run at step {step}, which this one resumes{left}"


def _exactness(plan: Plan) -> str:
    """Describe the effect of equal seeds, and the difference of engine and trainer if both read the
    same tensors. That a GPU gives equal bytes has not been shown.
    """
    if not plan.deterministic:
        return ""
    if plan.device != "cpu":
        return ", sums in a fixed order"
    shares = plan.sync.share_tensors or plan.sync.share_base
    near = "; engine and trainer within 1e-4 nats a token" if shares else ""
    return f", byte-equal runs{near}"


def _model(plan: Plan) -> str:
    if plan.api is not None:
        return f"{plan.api.name}, behind an API"
    if plan.model_from_stage is None:
        return plan.model_path
    return f"as stage {plan.model_from_stage + 1} leaves it (at first {plan.model_path})"


def _lengths(plan: Plan) -> str:
    model, lengths = plan.config.model, plan.lengths
    if model.max_model_len is None and None in (model.max_prompt_tokens, model.max_response_tokens):
        return "not given"
    shortest = lengths.min_response_tokens
    least = f", response at least {shortest}" if shortest else ""
    return (
        f"{lengths.max_model_len} tokens: prompt up to {lengths.max_prompt_tokens}, response up to "
        f"{lengths.max_response_tokens}{least}"
    )


def _engines(plan: Plan) -> str:
    kind, count = plan.engine.kind, plan.places.num_engines
    if plan.places.spread or plan.engine.hosts:
        return f"{count} {kind} engine{'s' * (count > 1)}"
    return f"the embedded {kind} engine"


def _places(places: Places, takes_turns: bool) -> str:
    taken = places.num_engines * places.engine_size
    engines = f"{taken} for engines ({places.num_engines} x {places.engine_size})"
    trainer = f"{places.trainer_ranks} for the trainer"
    other = f"{places.auxiliary} for auxiliary models"
    processes = [engines] * bool(taken) + [other] * bool(places.auxiliary)
    processes += [trainer] * bool(places.trainer_ranks)
    nodes = f"{places.nodes} node{'s' * (places.nodes > 1)}"
    if takes_turns:
        processes = ["on each a rank of the trainer and an engine, which take turns"]
    return f"{places.total} on {nodes}: {', '.join(processes)}"


def _explore_step(steps: Steps) -> str:
    tasks, each = steps.batch_size, steps.repeat_times
    return f"{tasks} tasks x {each} rollouts = {tasks * each} rollouts"


def _train_step(steps: Steps, max_token_len: int) -> str:
    micro = f"micro-batches of up to {max_token_len} tokens"
    size = f"{steps.train_batch_size} experiences"
    if steps.whole:
        size = "what an explore step left"
    elif steps.own_batch < steps.train_batch_size:
        size += f" ({steps.train_batch_size - steps.own_batch} of them an expert's)"
    return f"{size}, {micro}"


def _evaluation(plan: Plan) -> str:
    if not any(taskset.is_eval for taskset in used_tasksets(plan.config)):
        return "none: there are no eval_tasksets"
    return f"every {plan.sync.eval_interval} explore steps"


def _steps(plan: Plan, explores: bool, trains: bool) -> str:
    steps, parts = plan.steps, []
    if explores:
        parts.append(f"explore {steps.explore or plan.until}")
    if trains:
        counted = explores and steps.explore
        ends = "as long as there are experiences" if counted else plan.until
        parts.append(f"train {steps.train or ends}")
    if steps.per_epoch is not None:
        parts.append(f"{steps.per_epoch} an epoch")
    return ", ".join(parts)


def _sync(sync: SyncPlan) -> str:
    how = "tensors are shared" if sync.share_tensors else f"by {sync.method}"
    if sync.takes_turns and sync.method == "memory":
        how = "each rank lends its engine a bucket at a time"
    how += ", the adapter alone" if sync.adapter_rank else ""
    how += ", to an engine over the trainer's base" if sync.share_base else ""
    ahead = f", explorer {sync.offset} ahead" if sync.offset else ""
    beat = "every step" if sync.interval == 1 else f"every {sync.interval} steps"
    return f"{sync.style}, {beat}{ahead}, {how}"

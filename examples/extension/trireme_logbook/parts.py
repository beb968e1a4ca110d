"""An engine, a store, a listener and a command, by names in `ext.toml`."""

import json
from pathlib import Path

import typer

from trireme.buffer.queue import QueueBuffer, QueueStore
from trireme.config import Problem
from trireme.config.engine_kind import KEY, EngineChoice
from trireme.engines.torch.kind import TorchKind
from trireme.launch.listeners import RunListener
from trireme.monitor.events import Ended, StepDone


class LoggedKind(TorchKind):
    """`engine_type: logged` is the embedded engine; each reply is a line of a file."""

    name = "logged"
    keys = ("extra_engine_args",)

    def examine(self, request):
        given = request.config.explorer.rollout_model.extra_engine_args
        missing = [] if given.get("file") else [Problem(KEY, "has no extra_engine_args.file")]
        return EngineChoice("logged", problems=missing)

    def options(self, plan):
        return dict(plan.config.explorer.rollout_model.extra_engine_args)

    async def make(self, spec, tokenizer, device, **options):
        engine = await super().make(spec, tokenizer, device, **options)
        generate = engine.generate

        async def logged(ids, sampling, **call):
            replies = await generate(ids, sampling, **call)
            with open(spec.options["file"], "a") as file:
                file.writelines(json.dumps(reply.text) + "\n" for reply in replies)
            return replies

        engine.generate = logged
        return engine


class BestFirst(QueueBuffer):
    async def put(self, experiences):
        await super().put(sorted(experiences, key=lambda one: -(one.reward or 0.0)))


class BestFirstStore(QueueStore):
    """`storage_type: best_first` is a queue whose steps begin with the best rewards."""

    def make(self, parts):
        made = super().make(parts)
        limits = {"capacity": made.capacity, "max_read_timeout": made.max_read_timeout}
        return BestFirst(made.name, **limits, record=made.record)


class Tally(RunListener):
    """Counts the steps of a run's parts, and writes them into the job's folder at its end."""

    name = "the tally"

    def listen(self, stage):
        self.file, self.steps = Path(stage.plan.job_dir, "tally.json"), {}
        stage.stream.subscribe(self)

    def hear(self, event):
        if isinstance(event, StepDone):
            self.steps[event.part] = event.step
        elif isinstance(event, Ended):
            self.file.write_text(json.dumps(self.steps))


def tally(job: Path) -> None:
    """Show how many steps a run has done."""
    typer.echo((job / "tally.json").read_text())

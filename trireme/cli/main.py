"""Command line: declares every `trireme` command with its options and help texts.

What they do is imported when they are called, so that `--help` is there at once.
"""

from __future__ import annotations

import gc
import io
import logging
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from trireme.cli.arguments import (
    AsyncEngine,
    EngineType,
    EvalConfig,
    GymEnv,
    Keys,
    Ks,
    ModelLength,
    OpenBrowser,
    OptionalConfig,
    PageFile,
    PageHost,
    PageKey,
    PagePort,
    PluginDirs,
    ServerKey,
    ServerKeyFile,
    TaskFiles,
    Thinking,
    ToolCallParser,
    WithEngineFlags,
    Words,
    switch,
)
from trireme.cli.flags import WithFlags, yaml_and_keys
from trireme.cli.rlhf import WithAllFlags
from trireme.launch import GC_THRESHOLDS
from trireme.log import LEVELS, Lines
from trireme.text import say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

FLAGS_HELP = (
    "ms-swift's flags work too: --multi_turn_scheduler, --max_turns, --loss_scale, "
    "--reward_funcs A B, --external_plugins FILE, --vllm_server_base_url URL and others: "
    "docs/ms_swift.md"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import trireme

        typer.echo(f"trireme {trireme.__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune language models by reinforcement learning from agents' experience."""


@app.command(cls=WithFlags, epilog=FLAGS_HELP)
def run(
    ctx: typer.Context,
    words: Words = None,
    config: OptionalConfig = None,
    plugin_dir: PluginDirs = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Afterwards, spend RL's time on more SFT and compare.")
    ] = False,
) -> None:
    """Run an experiment, or the built-in demo."""
    import trireme

    config, keys = yaml_and_keys(config, words, ctx.obj)
    # before the other imports, which take seconds
    what = config or "the demo: a tiny model learns word problems, on this machine's cores"
    say(f"trireme {trireme.__version__}: {what}", flush=True)
    from trireme.cli.run import run as command

    raise typer.Exit(command(config, keys, plugin_dir or [], compare=compare))


@app.command(cls=WithAllFlags, epilog=FLAGS_HELP)
def rlhf(ctx: typer.Context, words: Keys = None, plugin_dir: PluginDirs = None) -> None:
    """Run GRPO, DPO or KTO from ms-swift's flags; print the YAML they stand for."""
    from trireme.cli.rlhf import yaml_of
    from trireme.cli.run import run as command

    path = yaml_of(ctx.obj, words or [])
    say(f"# {path}: the same run is `trireme run {path}`\n{path.read_text()}", flush=True)
    raise typer.Exit(command(path, [], plugin_dir or []))


@app.command(cls=WithFlags, epilog=FLAGS_HELP)
def check(
    ctx: typer.Context,
    words: Words = None,
    config: OptionalConfig = None,
    plugin_dir: PluginDirs = None,
) -> None:
    """Print a YAML's derived values and problems; start nothing."""
    from trireme.cli.check import check as command
    from trireme.cli.run import add_plugin_dirs

    config, keys = yaml_and_keys(config, words, ctx.obj)
    if config is None:
        raise typer.BadParameter("expected a YAML: trireme check my.yaml")
    add_plugin_dirs(plugin_dir or [])
    raise typer.Exit(command(config, keys))


@app.command()
def chat(
    place: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of a run, a checkpoint or a model.")
    ],
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="The sampling temperature; 0 is greedy.")
    ] = 0.0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="The most tokens of a reply.")
    ] = 512,
) -> None:
    """Chat with a trained model in the terminal."""
    from trireme.cli.chat import chat as command

    raise typer.Exit(command(place, system=system, temperature=temperature, max_tokens=max_tokens))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")] = Path("my_project"),
) -> None:
    """Write a starter project that runs as it is.

    It has a workflow, a reward, a YAML, data, a test and a tiny model.
    """
    from trireme.cli.init import init as command

    raise typer.Exit(command(folder))


@app.command()
def debug(
    words: Words = None,
    config: OptionalConfig = None,
    task: Annotated[int, typer.Option(min=0, help="The row of the taskset.")] = 0,
    rollouts: Annotated[int, typer.Option(min=1, help="The number of rollouts.")] = 1,
    reply: Annotated[
        list[str] | None,
        typer.Option(
            "--reply",
            help="A reply to use in place of the model's; one per call. No weights are loaded.",
        ),
    ] = None,
    plugin_dir: PluginDirs = None,
) -> None:
    """Run one task, and print each token and whether it is trained."""
    from trireme.cli.debug import debug as command

    config, keys = yaml_and_keys(config, words, {})
    if config is None:
        raise typer.BadParameter("expected a YAML: trireme debug my.yaml")
    options = {"task": task, "rollouts": rollouts, "replies": reply or []}
    raise typer.Exit(command(config, keys, plugin_dir or [], **options))


@app.command(name="eval")
def eval_command(
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            "-m",
            help="The folder of a model, a run or a checkpoint, an id, a rollout server's address, "
            "or NAME@URL for an OpenAI API; may be repeated.",
        ),
    ],
    words: Words = None,
    config: EvalConfig = None,
    tasks: TaskFiles = None,
    workflow: Annotated[str | None, typer.Option(help="With --tasks.")] = None,
    reward: Annotated[str | None, typer.Option(help="With --tasks.")] = None,
    prompt_key: Annotated[str, typer.Option("--prompt-key", help="With --tasks.")] = "question",
    response_key: Annotated[str, typer.Option("--response-key", help="With --tasks.")] = "answer",
    rollouts: Annotated[
        int | None,
        typer.Option("--rollouts", "-n", min=1, help="Of each task; by default the YAML's."),
    ] = None,
    k: Ks = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    success: Annotated[float, typer.Option(help="The least value that passes.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="A JSON file.")] = None,
    plugin_dir: PluginDirs = None,
) -> None:
    """Measure models on task sets, and compare them.

    It prints means and pass@k with intervals of 95 % confidence, and of several models the
    difference of each to the first over the same tasks.
    """
    from trireme.cli.eval import EvalOptions, evaluate_models
    from trireme.cli.run import add_plugin_dirs

    config, keys = yaml_and_keys(config, words, {})
    if (config is None) == (not tasks):
        raise typer.BadParameter("expected a YAML with eval_tasksets, or --tasks, and not both")
    add_plugin_dirs(plugin_dir or [])
    options = EvalOptions(
        model, config, keys, tasks or (), workflow, reward, prompt_key, response_key,
        rollouts, k or (), temperature, max_tokens, success, out,
    )  # fmt: skip
    raise typer.Exit(evaluate_models(options))


@app.command()
def convert(
    checkpoint_dir: Annotated[
        list[Path],
        typer.Option(
            "--checkpoint-dir", "-c", help="A run's folder, or a checkpoint in it; may be repeated."
        ),
    ],
    base_model_dir: Annotated[
        Path | None,
        typer.Option(
            "--base-model-dir", "-b", help="The folder of config.json, if the checkpoint has none."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16, float32, or auto (as stored). By default shards become "
            "bfloat16, and a model.safetensors keeps its type."
        ),
    ] = None,
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", help="The largest size of a file, in 10^9 bytes.")
    ] = 5.0,
) -> None:
    """Export checkpoints for transformers.

    It reads this trainer's checkpoints, FSDP shards, and Megatron's.
    """
    from trireme.cli.convert import convert as command

    raise typer.Exit(command(checkpoint_dir, base_model_dir, dtype, max_shard_gb))


@app.command(cls=WithEngineFlags)
def rollout(
    ctx: typer.Context,
    model: Annotated[str, typer.Option("--model", help="A model's folder, or its id.")],
    host: Annotated[str, typer.Option(help="Beyond loopback a key is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_key: ServerKey = None,
    api_key_file: ServerKeyFile = None,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = "torch",
    engine_python: Annotated[
        str | None,
        typer.Option("--engine-python", help="The Python interpreter of an environment with vLLM."),
    ] = None,
    dtype: EngineType = "auto",
    max_model_len: ModelLength = None,
    tool_call_parser: ToolCallParser = None,
    use_async_engine: AsyncEngine = "true",
    enable_thinking: Thinking = None,
    multi_turn_scheduler: Annotated[
        str | None, typer.Option("--multi_turn_scheduler", help="A registered name, or a path.")
    ] = None,
    gym_env: GymEnv = None,
    max_turns: Annotated[
        int | None,
        typer.Option("--max_turns", "--multi_turns", min=0, help="The most turns; 0: no limit."),
    ] = None,
    external_plugins: Annotated[
        list[Path] | None, typer.Option("--external_plugins", help="Python files to load first.")
    ] = None,
    plugins: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Further files of --external_plugins."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of sampling.")] = 42,
    max_requests: Annotated[int, typer.Option("--max-requests", min=1, help="At once.")] = 4096,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor_parallel_size", "--vllm_tensor_parallel_size", min=1)
    ] = 1,
    data_parallel_size: Annotated[
        int, typer.Option("--data_parallel_size", "--vllm_data_parallel_size", min=1)
    ] = 1,
) -> None:
    """Serve a model to trainers and agents, and as an OpenAI API."""
    from trireme.cli.rollout import RolloutOptions
    from trireme.cli.rollout import rollout as command

    options = RolloutOptions(
        model=model,
        host=host,
        port=port,
        api_key=api_key,
        api_key_file=api_key_file,
        engine=engine,
        engine_python=engine_python,
        dtype=dtype,
        max_model_len=max_model_len,
        tool_call_parser=tool_call_parser,
        use_async_engine=switch("use_async_engine", use_async_engine) is True,
        enable_thinking=switch("enable_thinking", enable_thinking),
        gym_env=gym_env,
        engine_options=ctx.obj,
        multi_turn_scheduler=multi_turn_scheduler,
        max_turns=max_turns,
        external_plugins=[*(external_plugins or []), *(plugins or [])],
        seed=seed,
        max_requests=max_requests,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
    )
    raise typer.Exit(command(options))


@app.command()
def algorithms(plugin_dir: PluginDirs = None) -> None:
    """List the algorithms and their parts; --plugin-dir adds yours."""
    from trireme.cli.listing import algorithms as command

    raise typer.Exit(command(plugin_dir or []))


@app.command()
def workflows(plugin_dir: PluginDirs = None) -> None:
    """List the workflows and rewards; --plugin-dir adds yours."""
    from trireme.cli.listing import workflows as command

    raise typer.Exit(command(plugin_dir or []))


@app.command()
def log(
    folder: Annotated[
        Path | None, typer.Argument(help="The job's folder, as by --log-dir.", show_default=False)
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", "-d", help="The job's folder, or its log folder.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The YAML of the run, instead of --log-dir."),
    ] = None,
    keyword: Annotated[
        str, typer.Option("--keyword", "-k", help="Only lines with this text.")
    ] = "",
    level: Annotated[
        str, typer.Option("--level", "-l", help=f"The lowest level: {', '.join(LEVELS)}.")
    ] = "DEBUG",
    last: Annotated[int, typer.Option("--last", "-n", help="Only the last N lines; 0: all.")] = 0,
    pattern: Annotated[
        str, typer.Option("--pattern", "-p", help="The files to read, such as 'explorer*'.")
    ] = "*",
    no_color: Annotated[bool, typer.Option("--no-color", help="Plain text.")] = False,
) -> None:
    """Show the logs of a run's parts in order of time."""
    from trireme.cli.log import log as command

    if folder is not None and log_dir is not None:
        raise typer.BadParameter(f"{folder} and --log-dir {log_dir}: expected one of them")
    raise typer.Exit(
        command(folder or log_dir, config, keyword=keyword, level=level, last=last, pattern=pattern,
                color=not no_color)
    )  # fmt: skip


@app.command()
def view(
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [N] [KEY=VALUE]...",
            help="The folder of a run or of several. To print samples, also a store, their number "
            "N, and keys of the YAML to override.",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print samples in the terminal.")] = False,
    html: PageFile = None,
    host: PageHost = "127.0.0.1",
    port: PagePort = None,
    api_key_file: PageKey = None,
    open_browser: OpenBrowser = True,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="A run's YAML: print its data set, or what it has stored."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="A database (sqlite:///x.db, x.db) or a .jsonl of a run."),
    ] = None,
    table: Annotated[
        str | None, typer.Option("--table", help="The database's table; by default its first.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="The tokenizer of stored experiences; by default that of the run's model.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Only experiences of this explore step.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Print samples: the default.")] = True,
    raw: Annotated[bool, typer.Option("--raw", help="With the chat template's marks.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colour; [[trained]].")] = False,
) -> None:
    """Open a local page over runs; with --plain, print samples.

    An option about samples (--step, --best, --config, a number ...) implies --plain.
    """
    from trireme.cli.view import Wanted, open_page
    from trireme.cli.view import view as command

    words = rest or []
    places = [word for word in words if not word.isdigit() and "=" not in word]
    asks = (config, url, table, tokenizer, step)
    said = plain or best or worst or raw or no_color
    printed = said or any(ask is not None for ask in asks) or len(words) > len(places)
    if not printed and len(places) <= 1 and Path(places[0] if places else "checkpoints").is_dir():
        root = Path(places[0] if places else "checkpoints")
        raise typer.Exit(open_page(root, host, port, api_key_file, html, open_browser=open_browser))
    if html is not None:
        raise typer.BadParameter("--html: expected a run's folder, and nothing that prints")
    if len(places) > 1 or (places and (config or url)):
        raise typer.BadParameter(f"{places[-1]}: expected one place: a folder, --config or --url")
    if places and not Path(places[0]).is_dir():
        if not Path(places[0]).exists():
            raise typer.BadParameter(
                f"{places[0]}: expected a number, KEY=VALUE, or a run's folder, and there is none"
            )
        url = places.pop()
    if best and worst:
        raise typer.BadParameter("--best and --worst: expected one of them")
    numbers = [int(word) for word in words if word.isdigit()]
    order = "best" if best else "worst" if worst else "newest"
    raise typer.Exit(
        command(
            config,
            url,
            folder=Path(places[0]) if places else None,
            overrides=[word for word in words if "=" in word],
            table=table,
            tokenizer=tokenizer,
            wanted=Wanted(numbers[0] if numbers else 3, step, order, raw),
            color=not no_color,
        )
    )


def main() -> None:
    """Entry point of `trireme` and `trinity`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character must not end a run of hours
    # What a command imports are so many objects that looking at all of them, several times, would
    # take a sixth of the time of `check`.
    gc.set_threshold(*GC_THRESHOLDS)
    if logging.lastResort is not None:  # what libraries log, and our files do not take
        logging.lastResort.setFormatter(Lines())
    try:
        app()
    except Exception:  # an error of ours
        say(traceback.format_exc(), end="", file=sys.stderr)
        sys.exit(1)
    finally:
        gc.freeze()  # else the interpreter collects all of them once more as it ends

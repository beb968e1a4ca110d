"""The commands `trireme view`, `list` and `compare`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

PageFile = Annotated[
    Path | None, typer.Option("--html", help="Write the page and its data to one file, and exit.")
]
PageHost = Annotated[
    str, typer.Option("--host", help="The address to bind to; beyond loopback a key is required.")
]
PagePort = Annotated[
    int | None,
    typer.Option("--port", min=0, max=65535, help="By default 6600, or a free one; 0: a free one."),
]
PageKey = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="A file with the page's key, instead of TRIREME_API_KEY."),
]
OpenBrowser = Annotated[
    bool, typer.Option("--open/--no-open", help="Open the browser, on a machine with a desktop.")
]


def view(
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [N] [KEY=VALUE]...",
            help="The folder of one run or several. To print samples, also a store, the number N "
            "of samples, and keys of the YAML to override.",
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
    raw: Annotated[
        bool,
        typer.Option("--raw", help="With the chat template's special tokens in place of roles."),
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colour; trained tokens are in [[ ]].")
    ] = False,
) -> None:
    """Open a local page over runs; with --plain, print samples.

    An option about samples (--step, --best, --config, a number ...) implies --plain.
    """
    from trireme.ext.page.runs import near_run
    from trireme.ext.page.samples import Wanted, open_page
    from trireme.ext.page.samples import view as command

    words = rest or []
    keys = [word for word in words if "=" in word and not os.path.exists(word)]
    others = [word for word in words if word not in keys]
    places = [word for word in others if not word.isdigit()]
    if not places and config is None and url is None:  # a run may have a number for its name
        places = [word for word in others if Path(word).is_dir()][:1]
    numbers = [word for word in others if word.isdigit()]
    if places and places[0] in numbers:
        numbers.remove(places[0])
    if len(numbers) > 1 or numbers == ["0"]:
        raise typer.BadParameter(f"{' '.join(numbers)}: expected one number of samples, at least 1")
    asks = (config, url, table, tokenizer, step)
    said = plain or best or worst or raw or no_color
    printed = said or any(ask is not None for ask in asks) or len(words) > len(places)
    if not printed and len(places) <= 1 and Path(places[0] if places else "checkpoints").is_dir():
        root = Path(places[0] if places else "checkpoints")
        raise typer.Exit(open_page(root, host, port, api_key_file, html, open_browser=open_browser))
    if html is not None:
        raise typer.BadParameter(
            "--html: expected a run's folder, and no option that prints samples"
        )
    if len(places) > 1 or (places and (config or url)):
        raise typer.BadParameter(f"{places[-1]}: expected one place: a folder, --config or --url")
    if places and not Path(places[0]).is_dir():
        if not Path(places[0]).exists():
            raise typer.BadParameter(
                f"{places[0]}: expected a number, KEY=VALUE, or a run's folder, and there is no "
                f"such folder{near_run(places[0])}"
            )
        url = places.pop()
    if numbers and not (places or config or url):
        raise typer.BadParameter(
            f"{numbers[0]} is a number of samples, since no folder here has this name: expected a "
            f"run's folder too, --config (its YAML), or --url (a store){near_run(numbers[0])}"
        )
    if best and worst:
        raise typer.BadParameter("--best and --worst: expected one of them")
    order = "best" if best else "worst" if worst else "newest"
    raise typer.Exit(
        command(
            config,
            url,
            folder=Path(places[0]) if places else None,
            overrides=keys,
            table=table,
            tokenizer=tokenizer,
            wanted=Wanted(int(numbers[0]) if numbers else 3, step, order, raw),
            color=not no_color,
        )
    )


def list_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of one run or several.")
    ] = Path("checkpoints"),
    hidden: Annotated[
        bool, typer.Option("--all", help="With the runs that were hidden on the page.")
    ] = False,
    find: Annotated[
        str,
        typer.Option(
            "--find",
            help="Only runs with these words in their name, state, note or settings; '#word' is a "
            "tag in a note.",
        ),
    ] = "",
) -> None:
    """List runs: their state, figures, and the settings in which they differ."""
    from trireme.ext.page.listing import list_runs as command

    raise typer.Exit(command(folder, hidden=hidden, find=find))


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Runs' folders, or their names in `trireme list`."),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", help="The folder below which runs have these names.")
    ] = Path("checkpoints"),
) -> None:
    """Compare runs: their figures, and the settings in which they differ."""
    from trireme.ext.page.listing import compare as command

    if len(runs) < 2:
        raise typer.BadParameter(f"one run is given, {runs[0]}: expected two or more")
    raise typer.Exit(command(runs, folder))

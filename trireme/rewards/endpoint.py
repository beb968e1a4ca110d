"""Endpoint: whether anybody answers at the address of a model that is not ours."""

from __future__ import annotations

_HELLO_S = 10.0


def refuse_silent(who: str, url: str) -> None:
    """Raise ValueError, naming `who` is asked there, where nothing answers."""
    import httpx

    try:  # what it answers does not matter: not every endpoint lists its models
        httpx.get(f"{url.rstrip('/')}/models", timeout=_HELLO_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"{who} at {url} does not answer ({error}): expected an OpenAI-compatible endpoint "
            "there"
        ) from error

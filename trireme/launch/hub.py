"""Hub: says why nothing can be downloaded, where a model or data set has to be."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from trireme.config import Plan
from trireme.config.lookup import located, near_model
from trireme.launch.parts import Parts


def without_hub(plans: Sequence[Plan], parts: Sequence[Parts]) -> str:
    """Return the reason why nothing can be downloaded, if something must be: a missing model is
    then a problem.

    If the hub does not answer, this process does not ask it again: each attempt costs a minute of
    retries.
    """
    if not any("will be downloaded" in note for plan in plans for note in plan.notes):
        return ""
    if not (away := _hub_is_away()):
        return ""
    for plan, made in zip(plans, parts, strict=True):
        path = plan.model_path
        if plan.places.spread or plan.api or plan.model_from_stage is not None:
            continue  # another machine may have the model
        if located(path, "models") is None:
            text = f"({path}) is not on this machine, and {away}{near_model(path)}"
            made.findings.problem("model.model_path", text)
    return away


def _hub_is_away() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return ""  # only the proxy can resolve the host
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=5).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True  # the variable was read at import
        return f"{hub.hostname} cannot be reached ({error})"
    return ""

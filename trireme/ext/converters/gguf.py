"""GGUF: writes a llama.cpp file (GGUF) as a model folder that transformers and Trireme load.

transformers reads and dequantizes the tensors, builds the tokenizer and takes over the chat
template; the package gguf parses the file. The weights are then those of a plain model: a folder
without `quantization_config`, complete under its name or not there at all.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trireme.files import whole_folder, write_json

MAGIC = b"GGUF"
ORIGIN = "origin.json"
"""The file of a folder that says which GGUF it was made from."""
ABOUT = ("name", "license", "license.link", "url", "source.url", "repo_url")
"""The metadata of a file that `ORIGIN` repeats, where it has them."""


def convert_gguf(file: Path, folder: Path, dtype: str | None = None) -> str:
    """Write `folder` from a GGUF file and return what it holds, in one line.

    `dtype`: of the weights in the folder, float32 by default. Raises ValueError in one sentence if
    the file cannot be read, and writes nothing then.
    """
    _refuse_unusable(file, folder)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    chosen = getattr(torch, "float32" if dtype in (None, "auto") else dtype)
    named: dict[str, Any] = {"gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(str(file.parent), **named)
        read = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=chosen, **named)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **named)
    except Exception as error:  # a damaged file ends in errors of any kind
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{file}: transformers cannot read it: {reason}") from error
    # transformers saves no model that it calls quantized, though all its tensors are dequantized
    config = type(config).from_dict({**config.to_dict(), "dtype": chosen})
    for one in (config, *_sub_configs(config)):
        one.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(read)(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    with whole_folder(folder) as writing:
        plain.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        write_json(writing / ORIGIN, _origin(file))
    template = "with" if tokenizer.chat_template else "without"
    return (
        f"{type(plain).__name__}, {plain.num_parameters():,} weights in {str(chosen)[6:]}, "
        f"{len(tokenizer):,} tokens, {template} a chat template"
    )


def _refuse_unusable(file: Path, folder: Path) -> None:
    """Raise ValueError if the file is no GGUF, the folder is taken, or the package is missing."""
    if not file.is_file():
        raise ValueError(f"--gguf {file} is no file")
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"--gguf {file} does not begin with GGUF: expected a llama.cpp file")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: expected the name of a new folder")
    if find_spec("gguf") is None:
        raise ValueError("--gguf needs the package gguf: pip install 'trireme-rl[gguf]'")


def _sub_configs(config: Any) -> list[Any]:
    return [one for one in vars(config).values() if hasattr(one, "model_type")]


def _origin(file: Path) -> dict[str, str]:
    """Describe the file: its name, SHA-256, and what it says about its origin and licence."""
    from gguf import GGUFReader

    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    fields = GGUFReader(file).fields
    about = {
        name: str(fields[key].contents()) for name in ABOUT if (key := f"general.{name}") in fields
    }
    return {"file": file.name, "sha256": digest.hexdigest(), **about}

"""An adapter that is written for vLLM is what peft would have written."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.engines.test_adapter import ROWS, WITHIN, adapted, folder
from trireme.engines.adapter import A, layers_of
from trireme.ext.vllm.adapter_files import write_adapter
from trireme.trainer.source import PartSource

__all__ = ["folder"]  # a fixture


def test_peft_reads_what_is_written_for_vllm(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend = adapted(folder, rslora=True)
    adapter = PartSource(backend, "adapter").weights()
    stem, a, b = next(layers_of(adapter))  # a layer of a rank of its own
    adapter[stem + A] = torch.cat((a, torch.zeros(2, a.shape[1])))
    adapter[adapter_b := stem + ".lora_B.weight"] = torch.cat((b, torch.zeros(len(b), 2)), 1)
    assert adapter_b in adapter
    write_adapter(tmp_path, adapter)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(ROWS[:1])
    peft = PeftModel.from_pretrained(plain, str(tmp_path))
    logits = peft(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(folder)
    merged.load_state_dict(backend.weights(), strict=False)
    assert torch.allclose(logits, merged(ids).logits, atol=WITHIN)

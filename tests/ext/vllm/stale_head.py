"""A vLLM worker that does what vLLM does after a reload, and no more: a tied head stays old.

Runs in vLLM's environment: an engine takes it by `extra_engine_args.worker_extension_cls`.
"""

from __future__ import annotations

from trireme.ext.vllm.worker import TriremeWorker


class StaleHead(TriremeWorker):
    def trireme_mend(self) -> None:
        pass

"""Swift dialect: makes the modules that ms-swift's plug-ins import available without ms-swift."""

from __future__ import annotations

from trireme.config.dialect import Dialect

_TRL = {
    **dict.fromkeys(
        ("device", "use_cpu"),
        "no key: a GPU is used where there is one, and none with CUDA_VISIBLE_DEVICES=",
    ),
    "beta": "algorithm.kl_loss_fn_args.kl_coef",
    "epsilon": "algorithm.policy_loss_fn_args.clip_range",
    "epsilon_high": "algorithm.policy_loss_fn_args.clip_range_high",
    "loss_type": "algorithm.loss_agg_mode",
    "max_prompt_length": "model.max_prompt_tokens",
    "run_name": "name",
}
"""Arguments of TRL that are no flags, or flags that become several keys."""


class Swift(Dialect):
    """The dialect of ms-swift, whose keys are flags: cli/flags.py."""

    def replacement(self, name: str) -> str:
        """Return the key of a flag's name; most of them are TRL's arguments, too."""
        from trireme.ext.swift.flag_names import INPUT, KEYS, TASKSETS, elsewhere

        if name in TASKSETS:
            return f"{INPUT}.taskset.{TASKSETS[name]}"
        return KEYS.get(name) or _TRL.get(name) or elsewhere(name) or ""

    def stand_in(self) -> None:
        """Let `import swift` find Trireme's names."""
        from trireme.ext.swift.imports import stand_in

        stand_in()

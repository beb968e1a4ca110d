"""Import path of the operators of the experience pipeline."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "EXPERIENCE_OPERATORS": "trireme.pipeline.names:OPERATORS",
        "ExperienceOperator": "trireme.pipeline.operator",
        "ExperienceOperatorV1": "trireme.pipeline.operator:ExperienceOperator",
    },
)

"""Workflow: Trinity-RFT's workflow of a question about pictures, answered in \\boxed{}."""

from __future__ import annotations

from trireme.workflows.single_turn import BOXED, SimpleWorkflow


class SimpleMMWorkflow(SimpleWorkflow):
    """A question about the row's pictures, reasoned freely and answered in \\boxed{}."""

    default_reward = "math_boxed_reward"
    default_system_prompt = BOXED

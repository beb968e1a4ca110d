"""Table: the built-in algorithms, one entry each. `trireme algorithms` prints it.

An entry names its parts (recipes.py says how they come together); the YAML may replace each.
"""

from __future__ import annotations

from trireme.algorithms.recipes import recipe
from trireme.extensions import former_names

sft = recipe(
    "sft",
    advantage=None,
    policy_loss="sft",
    schema="sft",
    use="Solved examples are at hand: the first stage.",
)
cpt = recipe(
    "cpt",
    like="sft",
    schema="cpt",
    use="Plain text is at hand: the model takes in its domain.",
)
dpo = recipe(
    "dpo",
    advantage=None,
    policy_loss="dpo",
    loss_agg_mode="seq-mean-token-mean",
    schema="dpo",
    use="Pairs of a better and a worse reply are at hand, and no reward.",
)
kto = recipe(
    "kto",
    advantage=None,
    policy_loss="kto",
    loss_agg_mode="seq-mean-token-mean",
    schema="kto",
    use="Single replies with thumbs up or down are at hand, and no pairs.",
)
grpo = recipe(
    "grpo",
    advantage="grpo",
    policy_loss="ppo",
    kl="k2",
    entropy="default",
    use="The default: a reward, and several rollouts a task.",
)
ppo = recipe(
    "ppo",
    like="grpo",
    advantage="ppo",
    use="A critic tells which token was worth what: long replies, rewards on the way, one rollout.",
)
reinforceplusplus = recipe(
    "reinforceplusplus",
    like="grpo",
    advantage="reinforceplusplus",
    use="One rollout a task and no critic: rewards are compared over the batch.",
)
multi_step_grpo = recipe(
    "multi_step_grpo",
    like="grpo",
    advantage="step_wise_grpo",
    use="Episodes of many steps, one reward at the end.",
)
dapo = recipe(
    "dapo",
    like="grpo",
    advantage="dapo",
    kl="none",
    options={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.28}},
    use="Long runs on tasks that become easy: groups that teach nothing are sampled anew.",
)
dr_grpo = recipe(
    "dr_grpo",
    like="grpo",
    kl="none",
    loss_agg_mode="seq-mean-token-sum-norm",
    options={"advantage_fn": {"norm_by_std": False}},
    use="GRPO without its weights by length and by the group's spread.",
)
gspo = recipe(
    "gspo",
    like="grpo",
    policy_loss="gspo",
    loss_agg_mode="seq-mean-token-mean",
    use="Mixtures of experts and long replies, where single tokens' ratios are noisy.",
)
cispo = recipe(
    "cispo",
    like="grpo",
    policy_loss="cispo",
    use="Off-policy steps: clipped tokens still learn.",
)
rloo = recipe(
    "rloo",
    like="grpo",
    advantage="rloo",
    use="Few rollouts a task: an unbiased baseline.",
)
remax = recipe(
    "remax",
    like="grpo",
    advantage="remax",
    kl="none",
    group_size=2,
    greedy_run=True,
    use="Two rollouts a task: the greedy one is the baseline.",
)
mix = recipe(
    "mix",
    like="grpo",
    policy_loss="mix",
    entropy="mix",
    sample="mix",
    use="A reward, and an expert's replies as well.",
)
on_policy_distill = recipe(
    "on_policy_distill",
    advantage="on_policy_distill",
    policy_loss="ppo",
    use="A larger model judges each token that the small one says.",
)


__getattr__ = former_names(__name__)

"""Table: the built-in algorithms, one row each. `trireme algorithms` prints it.

A row names its parts (recipes.py says how they come together); the YAML may replace each.
"""

from __future__ import annotations

from dataclasses import replace

from trireme.algorithms.recipes import Recipe

SFT = Recipe(
    "sft", policy_loss_fn="sft", schema="sft", use="Solved examples are at hand: the first stage."
)
CPT = replace(
    SFT, name="cpt", schema="cpt", use="Plain text is at hand: the model takes in its domain."
)
DPO = Recipe(
    "dpo",
    policy_loss_fn="dpo",
    schema="dpo",
    loss_agg_mode="seq-mean-token-mean",
    use="Pairs of a better and a worse reply are at hand, and no reward.",
)
GRPO = Recipe(
    "grpo",
    policy_loss_fn="ppo",
    advantage_fn="grpo",
    kl_loss_fn="k2",
    entropy_loss_fn="default",
    use="The default: a reward, and several rollouts a task.",
)
PPO = replace(
    GRPO,
    name="ppo",
    advantage_fn="ppo",
    use="A critic tells which token was worth what: long replies, rewards on the way, one rollout.",
)
REINFORCEPLUSPLUS = replace(
    GRPO,
    name="reinforceplusplus",
    advantage_fn="reinforceplusplus",
    use="One rollout a task and no critic: rewards are compared over the batch.",
)
MULTI_STEP_GRPO = replace(
    GRPO,
    name="multi_step_grpo",
    advantage_fn="step_wise_grpo",
    use="Episodes of many steps, one reward at the end.",
)
GIGPO = replace(
    GRPO,
    name="gigpo",
    advantage_fn="gigpo",
    group_size=8,
    options={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.2}},
    use="Episodes of many steps whose states come back, with rewards on the way.",
)
DAPO = replace(
    GRPO,
    name="dapo",
    advantage_fn="dapo",
    kl_loss_fn="none",
    options={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.28}},
    use="Long runs on tasks that become easy: groups that teach nothing are sampled anew.",
)
DR_GRPO = replace(
    GRPO,
    name="dr_grpo",
    kl_loss_fn="none",
    loss_agg_mode="seq-mean-token-sum-norm",
    options={"advantage_fn": {"norm_by_std": False}},
    use="GRPO without its weights by length and by the group's spread.",
)
GSPO = replace(
    GRPO,
    name="gspo",
    policy_loss_fn="gspo",
    loss_agg_mode="seq-mean-token-mean",
    use="Mixtures of experts and long replies, where single tokens' ratios are noisy.",
)
CISPO = replace(
    GRPO, name="cispo", policy_loss_fn="cispo", use="Off-policy steps: clipped tokens still learn."
)
SAPO = replace(GRPO, name="sapo", policy_loss_fn="sapo", use="A soft gate where a clip is harsh.")
RLOO = replace(
    GRPO, name="rloo", advantage_fn="rloo", use="Few rollouts a task: an unbiased baseline."
)
REMAX = replace(
    GRPO,
    name="remax",
    advantage_fn="remax",
    kl_loss_fn="none",
    greedy_run=True,
    group_size=2,
    use="Two rollouts a task: the greedy one is the baseline.",
)
OPMD = replace(
    GRPO,
    name="opmd",
    advantage_fn="opmd",
    policy_loss_fn="opmd",
    use="Stale experiences: no ratio, so no clip.",
)
ASYMRE = replace(
    OPMD,
    name="asymre",
    advantage_fn="asymre",
    kl_loss_fn="none",
    entropy_loss_fn="none",
    use="Stale experiences: failures weigh less than successes.",
)
TOPR = replace(
    GRPO,
    name="topr",
    advantage_fn="reinforce",
    policy_loss_fn="topr",
    use="Stale experiences with rewards above and below 0.",
)
SPPO = replace(
    ASYMRE,
    name="sppo",
    advantage_fn="opmd",
    policy_loss_fn="sppo",
    use="A linear surrogate inside a trust region.",
)
REC = replace(
    GRPO,
    name="rec",
    advantage_fn="rec",
    policy_loss_fn="rec",
    use="Research: clips, weights and regularizers in any combination.",
)
RAFT = Recipe(
    "raft",
    policy_loss_fn="sft",
    advantage_fn="raft",
    use="The simplest thing that learns from rewards: imitate your best replies.",
)
MIX = replace(
    GRPO,
    name="mix",
    policy_loss_fn="mix",
    entropy_loss_fn="mix",
    sample_strategy="mix",
    use="A reward, and an expert's replies beside it.",
)
MIX_CHORD = replace(
    MIX,
    name="mix_chord",
    policy_loss_fn="mix_chord",
    use="mix, the expert's share falling as the run goes on.",
)
ON_POLICY_DISTILL = Recipe(
    "on_policy_distill",
    policy_loss_fn="ppo",
    advantage_fn="on_policy_distill",
    use="A larger model judges each token that the small one says.",
)
JSD = replace(
    ON_POLICY_DISTILL,
    name="jsd",
    advantage_fn="jsd",
    use="The same with a divergence between the two directions.",
)

"""The algorithms of this extension, one entry each, as those of algorithms/table.py."""

from __future__ import annotations

from trireme.algorithms.recipes import recipe

gigpo = recipe(
    "gigpo",
    like="grpo",
    advantage="gigpo",
    group_size=8,
    options={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.2}},
    use="Episodes of many steps that revisit states, with rewards on the way.",
)
m2po = recipe(
    "m2po",
    like="grpo",
    policy_loss="m2po",
    kl="none",
    use="Very stale experiences: only the tokens that moved furthest are left out.",
)
gdpo = recipe(
    "gdpo",
    like="grpo",
    advantage="gdpo",
    use="Several rewards of different scales, each normalized separately.",
)
sapo = recipe(
    "sapo",
    like="grpo",
    policy_loss="sapo",
    use="A soft gate where a clip is harsh.",
)
real = recipe(
    "real",
    like="grpo",
    policy_loss="real",
    kl="none",
    loss_agg_mode="seq-mean-token-mean",
    group_size=8,
    use="Rewards that say right or wrong: a rollout's gradient is bounded, and none is idle.",
)
fipo = recipe(
    "fipo",
    like="grpo",
    policy_loss="fipo",
    kl="none",
    use="Long reasoning: a token is weighted by how much the tokens after it are reinforced.",
)
opmd = recipe(
    "opmd",
    like="grpo",
    advantage="opmd",
    policy_loss="opmd",
    use="Stale experiences: no ratio, so no clip.",
)
asymre = recipe(
    "asymre",
    like="opmd",
    advantage="asymre",
    kl="none",
    entropy="none",
    use="Stale experiences: failures weigh less than successes.",
)
topr = recipe(
    "topr",
    like="grpo",
    advantage="reinforce",
    policy_loss="topr",
    use="Stale experiences with rewards above and below 0.",
)
sppo = recipe(
    "sppo",
    like="asymre",
    advantage="opmd",
    policy_loss="sppo",
    use="A linear surrogate inside a trust region.",
)
rec = recipe(
    "rec",
    like="grpo",
    advantage="rec",
    policy_loss="rec",
    use="Research: clips, weights and regularizers in any combination.",
)
raft = recipe(
    "raft",
    advantage="raft",
    policy_loss="sft",
    use="The simplest thing that learns from rewards: imitate your best replies.",
)
mix_chord = recipe(
    "mix_chord",
    like="mix",
    policy_loss="mix_chord",
    use="mix, with an expert's share that decays during the run.",
)
rlsd = recipe(
    "rlsd",
    like="grpo",
    advantage="rlsd",
    kl="none",
    use="A reward says how good a rollout is, and a teacher which of its tokens made it so.",
)
jsd = recipe(
    "jsd",
    like="on_policy_distill",
    advantage="jsd",
    use="on_policy_distill, with a divergence between the two directions.",
)

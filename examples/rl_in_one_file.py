"""The whole idea in one flat file: a tiny model learns word problems by trying, without Trireme.

What the framework does with an Explorer, a Buffer, a Trainer and a Synchronizer is here one loop:
sample a group of replies to each question, score them, compare each with its group, and make the
better ones more likely (GRPO, arXiv:2402.03300). Needs torch and transformers; no GPU, no download.

    python examples/rl_in_one_file.py            # about two minutes on two cores
    python examples/rl_in_one_file.py --quick    # seconds: that it runs, not that it learns
"""

import argparse
import itertools
import math
import random
import re
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--quick", action="store_true", help="a few steps only")
options = parser.parse_args()

NUM_TEST, NUM_SOLVED = (20, 50) if options.quick else (500, 200)
SFT_STEPS, SFT_BATCH, SFT_LR = (5, 16, 3e-3) if options.quick else (200, 16, 3e-3)
RL_STEPS, TASKS, GROUP, RL_LR = (2, 4, 4, 5e-4) if options.quick else (150, 32, 8, 3e-4)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the gain of a likelier good token ends at 1.28 times
MAX_NEW_TOKENS = 40
random.seed(options.seed)
torch.manual_seed(options.seed)

# ---------------------------------------------------------------- 1. problems and their solutions
# A story, its worked lines, and which of its numbers are small. x and y are results of earlier
# lines.
STORIES = [
    ("N has A T and buys B more . Then N gives C away . How many are left ?",
     ["N has A + B = X .", "Left are X - C = Y ."], lambda a, b, c: (a + b, a + b - c)),
    ("N finds A T on Monday , B on Tuesday and C on Friday . How many in all ?",
     ["Two days A + B = X .", "In all X + C = Y ."], lambda a, b, c: (a + b, a + b + c)),
    ("N has A T . M has B more . How many do they have together ?",
     ["M has A + B = X .", "Together A + X = Y ."], lambda a, b, c: (a + b, a + a + b)),
    ("N has A bags with B T in each and loses C of them . How many are left ?",
     ["In the bags A * B = X .", "Left are X - C = Y ."], lambda a, b, c: (a * b, a * b - c)),
    ("N has A T . M has B fewer . C are lost . How many do they have together ?",
     ["M has A - B = X .", "Left are A + X - C = Y ."], lambda a, b, c: (a - b, a + a - b - c)),
    ("N wants A T and has B . M gives N C more . How many are missing ?",
     ["N has B + C = X .", "Missing are A - X = Y ."], lambda a, b, c: (b + c, a - b - c)),
    ("N finds A T , loses B , and doubles the rest . How many now ?",
     ["Left are A - B = X .", "Now 2 * X = Y ."], lambda a, b, c: (a - b, 2 * (a - b))),
    ("N has A boxes with B T in each and buys C more . How many now ?",
     ["In the boxes A * B = X .", "Now X + C = Y ."], lambda a, b, c: (a * b, a * b + c)),
    ("N has A T and loses B . Then N finds C more . How many now ?",
     ["Left are A - B = X .", "Now X + C = Y ."], lambda a, b, c: (a - b, a - b + c)),
]  # fmt: skip
NAMES, THINGS = ["Anna", "Ben", "Carla", "David"], ["apples", "books", "coins", "pens"]
LARGEST = 16


def tell(story, numbers):
    """One problem in words: (question, solution, result); None where a number is out of bounds."""
    text, lines, solve = story
    a, b, c = numbers
    x, y = solve(a, b, c)
    if not (1 <= x <= LARGEST and 1 <= y <= LARGEST):
        return None
    words = {"A": a, "B": b, "C": c, "X": x, "Y": y, "T": random.choice(THINGS)}
    words["N"], words["M"] = random.sample(NAMES, 2)

    def fill(t):
        return " ".join(str(words.get(word, word)) for word in t.split())

    return fill(text), " ".join([*(fill(line) for line in lines), f"#### {y}"]), str(y)


problems = {}
for story, numbers in itertools.product(STORIES, itertools.product(range(2, 8), repeat=3)):
    key = (story[0], numbers if re.search(r"\bC\b", story[0]) else numbers[:2])
    if key not in problems and (told := tell(story, numbers)):
        problems[key] = told
problems = list(problems.values())
random.shuffle(problems)
test, train = problems[: min(NUM_TEST, len(problems) // 3)], problems[len(problems) // 3 :]
solved = train[:NUM_SOLVED]  # only these come with a worked solution

# ---------------------------------------------------------------- 2. a tokenizer: a word is a token
PAD, ASK, REPLY, END = "<pad>", "<ask>", "<reply>", "<end>"
words = sorted({word for q, s, _ in problems for word in (q + " " + s).split()})
vocabulary = [PAD, ASK, REPLY, END, *words]
number_of = {word: number for number, word in enumerate(vocabulary)}
END_ID = number_of[END]


def encode(text):
    return [number_of[word] for word in text.split()]


def decode(ids):
    return " ".join(vocabulary[i] for i in ids)


def prompt_ids(question):
    return [number_of[ASK], *encode(question), number_of[REPLY]]


# ---------------------------------------------------------------- 3. a tiny model
model = AutoModelForCausalLM.from_config(
    Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=True, initializer_range=0.04, bos_token_id=None, eos_token_id=END_ID,
        pad_token_id=0,
    )
)  # fmt: skip


def token_logprobs(prompts, replies):
    """log p of every reply token, [N, R], and which are real; prompts are padded on the left."""
    width = max(map(len, prompts))
    length = max(map(len, replies))
    ids = torch.zeros(len(prompts), width + length, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        whole = prompt + reply
        start = width - len(prompt)
        ids[row, start : start + len(whole)] = torch.tensor(whole)
        seen[row, start : start + len(whole)] = 1
    places = (seen.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=seen, position_ids=places).logits
    logprobs = logits[:, width - 1 : -1].log_softmax(-1)
    targets = ids[:, width:]
    return logprobs.gather(2, targets[..., None])[..., 0], seen[:, width:].bool()


@torch.inference_mode()
def sample(prompts, copies, temperature):
    """`copies` replies to each prompt, with each token's log-probability. One prefill a prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    places = (seen.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=seen, position_ids=places, use_cache=True)
    cache = out.past_key_values
    cache.batch_repeat_interleave(copies)
    logits = out.logits[:, -1].repeat_interleave(copies, 0)
    seen = seen.repeat_interleave(copies, 0)
    place = places[:, -1].repeat_interleave(copies, 0)
    tokens, logprobs = [], []
    done = torch.zeros(len(logits), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        p = (logits / (temperature or 1.0)).log_softmax(-1)
        token = torch.multinomial(p.exp(), 1)[:, 0] if temperature else p.argmax(-1)
        tokens.append(torch.where(done, -1, token))
        logprobs.append(p.gather(1, token[:, None])[:, 0])
        done |= token == END_ID
        if done.all():
            break
        seen = torch.cat([seen, torch.ones(len(seen), 1, dtype=torch.long)], 1)
        place = place + 1
        out = model(
            input_ids=token[:, None], attention_mask=seen, position_ids=place[:, None],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        logits = out.logits[:, -1]
    rows = torch.stack(tokens, 1).tolist()
    scores = torch.stack(logprobs, 1).tolist()
    replies = [[t for t in row if t >= 0] for row in rows]
    return replies, [s[: len(r)] for s, r in zip(scores, replies, strict=True)]


def reward(reply, result):
    """1 where the reply ends in `#### <the right result>`, else 0."""
    found = re.search(r"#### (\d+) <end>$", decode(reply))
    return float(found is not None and found[1] == result)


def accuracy():
    replies, _ = sample([prompt_ids(q) for q, _, _ in test], 1, temperature=0)
    return sum(reward(r, y) for r, (_, _, y) in zip(replies, test, strict=True)) / len(test)


def optimizer_and_schedule(lr, beta2, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.0)
    cosine = lambda t: min(1, (t + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * t / steps))  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)


def learn(loss, optimizer, schedule):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


# ---------------------------------------------------------------- 4. warm-up: imitate a few
# solutions
print(f"{len(train)} problems to train on ({len(solved)} with solutions), {len(test)} held out")
print(f"before          held-out accuracy {accuracy():6.1%}")
started = time.time()
optimizer, schedule = optimizer_and_schedule(SFT_LR, 0.98, SFT_STEPS)
for _ in range(SFT_STEPS):
    batch = random.sample(solved, SFT_BATCH)
    logprobs, real = token_logprobs(
        [prompt_ids(q) for q, _, _ in batch], [[*encode(s), END_ID] for _, s, _ in batch]
    )
    learn(-logprobs[real].mean(), optimizer, schedule)
print(f"after warm-up   held-out accuracy {accuracy():6.1%}   {time.time() - started:.0f} s")

# ---------------------------------------------------------------- 5. reinforcement: try, compare,
# learn
started = time.time()
optimizer, schedule = optimizer_and_schedule(RL_LR, 0.99, RL_STEPS)
for step in range(1, RL_STEPS + 1):
    # explore: a group of replies to each question, from the weights as they are now
    batch = random.sample(train, TASKS)
    prompts = [prompt_ids(q) for q, _, _ in batch]
    replies, old = sample(prompts, GROUP, temperature=1.0)
    rewards = torch.tensor([reward(r, batch[i // GROUP][2]) for i, r in enumerate(replies)])

    # advantage: how much better than its group a reply did; a group of equals teaches nothing
    groups = rewards.view(TASKS, GROUP)
    spread = groups.std(1, keepdim=True) + 1e-6
    advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1)
    kept = (advantages != 0).nonzero()[:, 0].tolist()
    if kept:
        # train: raise the log-probability of the better replies' tokens, within the clip
        logprobs, real = token_logprobs(
            [prompts[i // GROUP] for i in kept], [replies[i] for i in kept]
        )
        old_logprobs = torch.zeros_like(logprobs)
        for row, i in enumerate(kept):
            old_logprobs[row, : len(old[i])] = torch.tensor(old[i])
        ratio = (logprobs - old_logprobs).exp()
        a = advantages[kept][:, None]
        gain = torch.minimum(ratio * a, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * a)
        tokens = sum(map(len, replies))  # all tokens of the batch, also those of equal groups
        learn(-(gain * real).sum() / tokens, optimizer, schedule)
    if step % 25 == 0 or step == RL_STEPS:
        print(
            f"step {step:4}  reward {rewards.mean():.2f}  held-out accuracy {accuracy():6.1%}"
            f"   {(time.time() - started) / step:.2f} s a step"
        )
question, _, result = test[0]
[reply], _ = sample([prompt_ids(question)], 1, temperature=0)
print(f"\n{question}\n{decode(reply)}   (right: {result})")

"""An engine of one recurrent layer: two requests that share a prefix, and drafts. `python examples/host_engine.py`"""

import torch

from mambacache import CacheConfig, Hit, PrefixCache
from mambacache.kernels import (
    StateIndices,
    StatePool,
    StateTensor,
    conv1d,
    conv1d_log,
    gated_delta_rule,
    gated_delta_rule_log,
)

TOKENS, HEADS, WIDTH, BLOCKS, LOGS, DRAFTS = 100, 2, 16, 32, 4, 3
CHANNELS = 3 * HEADS * WIDTH

torch.manual_seed(0)
embedding = torch.randn(TOKENS, CHANNELS)
unembedding = torch.randn(HEADS * WIDTH, TOKENS)
kernel, gates = torch.randn(CHANNELS, 4), torch.randn(TOKENS, 2, HEADS)
fp32 = torch.float32
window, state = StateTensor((4 - 1, CHANNELS), fp32), StateTensor((HEADS, WIDTH, WIDTH), fp32)
((windows, states),) = StatePool([[window, state]], BLOCKS).layers
inputs, updates = conv1d_log(CHANNELS, fp32), gated_delta_rule_log(HEADS, HEADS, WIDTH, WIDTH, fp32, fp32)
((conv_log, *log),) = StatePool([[inputs, *updates]], LOGS).layers  # of the tokens that requests decoded since
cache = PrefixCache(
    CacheConfig(num_state_blocks=BLOCKS, num_log_slots=LOGS, max_draft_tokens=DRAFTS, has_attention=False)
)


def forward(steps):
    """The rows' most likely next tokens, after each of their tokens."""
    plan = cache.plan(steps)
    indices = StateIndices.from_arrays(plan.arrays, "cpu")
    ids = indices.tokens.long()
    x = conv1d(embedding[ids], kernel, None, windows, conv_log, indices)
    q, k, v = x.view(-1, 3 * HEADS, WIDTH).split(HEADS, dim=1)
    a, b = gates[ids].unbind(1)
    y = gated_delta_rule(q, k, v, a, b, torch.zeros(HEADS), torch.zeros(HEADS), states, log, indices)
    return plan, (y.flatten(1)[indices.logits_index] @ unembedding).argmax(-1).tolist()


def guess(tokens):
    """What followed the last time that the last token came."""
    earlier = [i for i in range(len(tokens) - 1) if tokens[i] == tokens[-1]]
    return tokens[earlier[-1] + 1 : earlier[-1] + 1 + DRAFTS] if earlier else []


def answer(prompts, length, draft):
    left = {name: list(prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        cache.add(name, prompt)
    while left:
        steps = []
        for name, tokens in left.items():
            if not cache.runs(name) and isinstance(hit := cache.admit(name), Hit):
                print(f"{name}: {hit.num_tokens} of {len(tokens)} tokens hit")
            if cache.runs(name):
                drafts = guess(tokens) if draft and len(tokens) > len(prompts[name]) else []
                if row := cache.allocate(name, cache.next_tokens(name, budget=256), drafts=drafts):  # None: no room yet
                    steps.append(row)
        plan, sampled = forward(steps)
        cache.issued(plan.steps)
        accepted, first = {}, 0
        for step in plan.steps:
            if step.samples:
                after = sampled[first : (first := first + 1 + len(step.drafts))]
                agreed = next((i for i, d in enumerate(step.drafts) if d != after[i]), len(step.drafts))
                room = len(prompts[step.request_id]) + length - len(left[step.request_id])
                accepted[step.request_id] = after[: agreed + 1][:room]
                left[step.request_id] += accepted[step.request_id]
        cache.accept(plan.steps, accepted)
        for name in [name for name in left if len(left[name]) == len(prompts[name]) + length]:
            cache.free(name, finished=True)
            yield name, left.pop(name)[len(prompts[name]) :]


prompts = {name: [*range(TOKENS), *range(50, 90), own] for name, own in (("first", 1), ("second", 2))}
plain = dict(answer(prompts, 40, draft=False))
cache.reset()
assert dict(answer(prompts, 40, draft=True)) == plain
cache.check()
print(cache.stats)

"""A small engine of somebody else's: its own request loop, attention KV (plain tensors) and Gated DeltaNet layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from mambacache import CacheConfig, Hit, PrefixCache, kernels
from mambacache.plan import StepPlan

BLOCK = 64


@dataclass
class Job:
    tokens: list[int]
    kv: list[torch.Tensor] = field(default_factory=list)  # of each layer, keys and values [2, HKV, tokens, D]
    answer: list[int] = field(default_factory=list)
    hit: Hit | None = None


class ForeignGatedDeltaNet(torch.nn.Module):
    def __init__(self, engine: ForeignEngine, original: torch.nn.Module, num_blocks: int) -> None:
        super().__init__()
        self.engine, self.original = engine, original
        channels, _, width = original.conv1d.weight.shape
        self.windows = torch.full((num_blocks, width - 1, channels), torch.nan)
        value_heads, V, K = original.num_v_heads, original.head_v_dim, original.head_k_dim
        self.states = torch.full((num_blocks, value_heads, V, K), torch.nan)
        fp32, heads = torch.float32, original.num_k_heads
        recurrent = kernels.gated_delta_rule_log(heads, value_heads, K, V, fp32, fp32)
        logs = kernels.StatePool([[kernels.conv1d_log(channels, fp32), *recurrent]], num_blocks - 1)
        logs.buffer.fill_(0xFF)
        self.conv_log, *self.log = logs.layers[0]

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        own, indices = self.original, self.engine.indices
        parts = own.fix_query_key_value_ordering(own.in_proj_qkvz(hidden_states), own.in_proj_ba(hidden_states))
        q, k, v, z, b, a = (part[0] for part in parts)
        x = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        x = kernels.conv1d(x, own.conv1d.weight[:, 0], None, self.windows, self.conv_log, indices)
        q, k, v = map(torch.Tensor.view_as, x.split([own.key_dim, own.key_dim, own.value_dim], -1), (q, k, v))
        y = kernels.gated_delta_rule(q, k, v, a, b, own.A_log, own.dt_bias, self.states, self.log, indices)
        y = kernels.gated_rms_norm(y, z.view_as(y), own.norm.weight, own.norm.variance_epsilon)
        return own.out_proj(y.flatten(1))[None]


class ForeignEngine:
    def __init__(self, model: str, budget: int = 8192, num_blocks: int = 64) -> None:
        self.cache = PrefixCache(CacheConfig(num_state_blocks=num_blocks - 1))
        self.budget = budget
        AttentionInterface.register("foreign", self.attend)
        self.model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="foreign", dtype=torch.float32)
        layers = self.model.model.layers
        for layer in layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn = ForeignGatedDeltaNet(self, layer.linear_attn, num_blocks)
        self.attention_layers = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
        self.jobs: dict[str, Job] = {}
        self.kv_store: dict[tuple[int, ...], list[torch.Tensor]] = {}  # tokens up to a block's end -> its KV

    def attend(self, module: torch.nn.Module, q, k, v, mask, scaling: float, **_):  # type: ignore[no-untyped-def]
        layer, outputs, start = self.attention_layers.index(module), [], 0
        for step in self.plan.steps:
            job, rows = self.jobs[step.request_id], slice(start, start + step.num_tokens)
            job.kv[layer] = torch.cat([job.kv[layer], torch.stack([k[0, :, rows], v[0, :, rows]])], dim=2)
            keys, values = job.kv[layer]
            visible = torch.arange(keys.shape[1]) <= torch.arange(step.start, step.start + step.num_tokens)[:, None]
            out = scaled_dot_product_attention(q[0, :, rows], keys, values, visible, scale=scaling, enable_gqa=True)
            outputs.append(out.transpose(0, 1))
            start += step.num_tokens
        return torch.cat(outputs)[None], None

    def admit(self, name: str, job: Job) -> None:
        covered = 0
        while tuple(job.tokens[: covered + BLOCK]) in self.kv_store and covered + BLOCK <= len(job.tokens):
            covered += BLOCK
        if isinstance(found := self.cache.admit(name, kv_tokens=covered), Hit):
            job.hit = found
            ends = range(BLOCK, found.num_tokens + 1, BLOCK)
            blocks = [self.kv_store[tuple(job.tokens[:end])] for end in ends]
            empty = torch.empty(2, self.model.config.num_key_value_heads, 0, self.model.config.head_dim)
            job.kv = [torch.cat([empty, *(kv[i] for kv in blocks)], 2) for i in range(len(self.attention_layers))]

    @torch.inference_mode()
    def step(self) -> None:
        steps, budget = [], self.budget
        for name, job in self.jobs.items():
            if job.hit is None:
                self.admit(name, job)
            if (
                job.hit is not None
                and budget
                and (row := self.cache.allocate(name, self.cache.next_tokens(name, budget)))
            ):
                budget -= row.num_tokens
                steps.append(row)
        self.plan: StepPlan = self.cache.plan(steps)
        self.indices = kernels.StateIndices.from_arrays(self.plan.arrays, "cpu")
        ids, positions = self.indices.tokens[None], self.indices.positions[None]
        logits = self.model(
            ids, position_ids=positions, logits_to_keep=self.indices.logits_index, use_cache=False
        ).logits
        self.cache.issued(self.plan.steps)
        sampled = iter(logits[0].argmax(-1).tolist())
        tokens = {row.request_id: [next(sampled)] for row in self.plan.steps if row.samples}
        self.cache.accept(self.plan.steps, tokens)
        for row in self.plan.steps:
            job = self.jobs[row.request_id]
            job.answer += tokens.get(row.request_id, [])
            known = job.tokens + job.answer
            for end in range(BLOCK, row.start + row.num_tokens + 1, BLOCK):
                self.kv_store.setdefault(tuple(known[:end]), [kv[:, :, end - BLOCK : end] for kv in job.kv])

    def generate(self, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, Job]:
        for name, tokens in prompts.items():
            self.jobs[name] = Job(tokens)
            self.cache.add(name, tokens)
        done: dict[str, Job] = {}
        while self.jobs:
            self.step()
            for name in [name for name, job in self.jobs.items() if len(job.answer) == max_tokens]:
                done[name] = self.jobs.pop(name)
                self.cache.free(name, finished=True)
        return done

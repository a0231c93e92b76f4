"""Train the recall model, a small Qwen3-Next with the answers in its recurrent states.

The model is transformers' dense Qwen3NextForCausalLM with three Gated DeltaNet layers and one attention layer. The
attention layer stands third: as the last layer it would find the answers without the states. The curriculum grows from
2 to 48 names, a level whenever 90 % of a batch's answers are right. The learning rate follows a cosine over the steps
or the minutes, whichever ends first. On one H200 the 1,300 steps take about 2 minutes. experts.py then adds experts.

    python benchmarks/recall/train.py --out mambacache/demo/model
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from experts import give_experts
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.cache_utils import LinearAttentionLayer

from mambacache.demo.task import (
    EOS,
    FIRST_PLACE,
    NO_LABEL,
    TOKEN_ID,
    UNKNOWN,
    VOCABULARY,
    demo_document,
    demo_questions,
    encode,
    question_text,
    training_batch,
)

LAYER_TYPES = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
MAX_POSITIONS = 8192
CURRICULUM = (2, 4, 8, 16, 32, 48)
ITEMS_PER_NAME = 12
MAX_ITEMS = 400
PEAK_LEARNING_RATE = 3e-3
WARMUP = 0.03
EVALUATION_BATCH = 8


def build_config() -> Qwen3NextConfig:
    """Return the configuration of a dense Qwen3-Next of 0.91 million parameters."""
    return Qwen3NextConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(LAYER_TYPES),
        layer_types=list(LAYER_TYPES),
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        num_experts=0,
        mlp_only_layers=list(range(len(LAYER_TYPES))),
        bos_token_id=None,
        eos_token_id=TOKEN_ID[EOS],
        pad_token_id=TOKEN_ID[EOS],
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of the vocabulary, split at white space."""
    tokenizer = Tokenizer(models.WordLevel(vocab=dict(TOKEN_ID), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def learning_rate(progress: float) -> float:
    """Return the rate of a linear warm-up, then a cosine to zero; `progress` runs from 0 to 1."""
    return PEAK_LEARNING_RATE * min(progress / WARMUP, 0.5 + 0.5 * math.cos(math.pi * progress))


def sample_batch(rng: np.random.Generator, num_names: int, num_tokens: int, device: str) -> tuple[torch.Tensor, ...]:
    """Return (tokens, labels), int64 [batch, length], about `num_tokens` in all, with 1/4 to 1/2 questions."""
    num_items = min(ITEMS_PER_NAME * num_names, MAX_ITEMS)
    num_questions = int(rng.integers(num_items // 4, num_items // 2, endpoint=True))
    num_records = num_items - num_questions
    batch_size = max(1, num_tokens // (5 * num_records + 6 * num_questions))
    batch = training_batch(rng, batch_size, num_names, num_records, num_questions)
    return tuple(torch.from_numpy(array).to(device) for array in batch)


def train(model: Qwen3NextForCausalLM, steps: int, minutes: float, num_tokens: int, seed: int) -> int:
    """Train in place, and return the number of steps."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    level = 0
    start = time.perf_counter()
    with tqdm(total=steps, mininterval=5.0, unit="step") as bar:
        for step in range(steps):
            progress = max((step + 1) / steps, (time.perf_counter() - start) / (60 * minutes))
            if progress > 1:
                return step
            optimizer.param_groups[0]["lr"] = learning_rate(progress)
            tokens, labels = sample_batch(rng, CURRICULUM[level], num_tokens, str(model.device))
            asked = labels[:, 1:] != NO_LABEL
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[asked]
            targets = labels[:, 1:][asked]
            loss = functional.cross_entropy(logits, targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

            places = targets >= FIRST_PLACE
            accuracy = (logits.argmax(-1) == targets)[places].float().mean().item()
            bar.set_postfix(names=CURRICULUM[level], loss=f"{loss.item():.3f}", right=f"{accuracy:.3f}", refresh=False)
            bar.update()
            if accuracy >= 0.9 and level + 1 < len(CURRICULUM):
                level += 1
                tqdm.write(f"step {step + 1}: on to {CURRICULUM[level]} names")
    return steps


@torch.no_grad()
def evaluate(model: Qwen3NextForCausalLM, num_documents: int, swap_states: bool) -> int:
    """Return the number of right answers to one question about each of `num_documents` demo documents.

    `swap_states` replaces the recurrent states at each document's last boundary by another document's states, but not
    the keys and values. A model with its answers in the states then answers wrongly.
    """
    right = 0
    for first in tqdm(range(0, num_documents, EVALUATION_BATCH), desc="evaluate"):
        prompts, answers = [], []
        for seed in range(first, min(first + EVALUATION_BATCH, num_documents)):
            document = demo_document(seed)
            [(name, place)] = demo_questions(document, seed, count=1)
            prompts.append(encode(f"{document.text} {question_text(name)}"))
            answers.append(TOKEN_ID[place])
        tokens = torch.tensor(prompts, device=model.device)
        boundary = document.boundary
        cache = DynamicCache(config=model.config)
        model(input_ids=tokens[:, :boundary], past_key_values=cache, logits_to_keep=1)
        if swap_states:
            other = torch.LongTensor([*range(1, len(prompts)), 0])
            for layer in cache.layers:
                if isinstance(layer, LinearAttentionLayer):
                    layer.reorder_cache(other)
        logits = model(input_ids=tokens[:, boundary:], past_key_values=cache, logits_to_keep=1).logits
        right += int((logits[:, -1].argmax(-1).cpu() == torch.tensor(answers)).sum())
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the recall model and save it with its tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="directory to save to")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop training after this time")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens in a batch")
    parser.add_argument("--documents", type=int, default=80, help="documents to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3NextForCausalLM(build_config())
    print(f"{model.num_parameters():,} parameters on {device}")

    start = time.perf_counter()
    steps = train(model, options.steps, options.minutes, options.tokens, options.seed)
    print(f"trained {steps} steps in {(time.perf_counter() - start) / 60:.1f} minutes")
    model.save_pretrained(options.out)
    give_experts(options.out)
    build_tokenizer().save_pretrained(options.out)

    torch.set_float32_matmul_precision("highest")
    model.eval()
    for swap_states in (False, True):
        right = evaluate(model, options.documents, swap_states)
        print(f"{right} of {options.documents} right {'with swapped states' if swap_states else 'at 4,110 tokens'}")


if __name__ == "__main__":
    main()

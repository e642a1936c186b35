"""Group relative policy optimisation in a loop: generate answers, score them, and train on their log-probabilities.

    python examples/grpo.py

The logits of long answers never exist as a whole: `log_softmax` and `gather` run in chunks of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memo import MemoLoop

PROMPT, ANSWER, GROUP = 8, 56, 8


def log_probabilities(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Returns the log-probability of each token of the answers, [group, answer]."""
    logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 172}
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes, num_hidden_layers=4, num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=None
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # A small model needs neither: without alpha and loss_chunk_tokens, MemoLoop finds what fits.
    with MemoLoop(model, optimizer, alpha=0.5, loss_chunk_tokens=128):
        for step in range(10):
            prompts = torch.randint(2, 128, (1, PROMPT)).expand(GROUP, -1)
            ids = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=ANSWER
            )
            rewards = (ids[:, PROMPT:] % 2 == 0).float().mean(1)  # even numbers are good answers
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            with torch.no_grad():
                before = log_probabilities(model, ids)
            for _ in range(2):
                ratio = (log_probabilities(model, ids) - before).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(f"step {step}: reward {rewards.mean():.3f}")


if __name__ == "__main__":
    main()

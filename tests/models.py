"""Tiny checkpoints for tests: ordinary Hugging Face folders, written in milliseconds, equal for equal seeds.

Token ids 0 and 1 are EOS (also the padding) and BOS; id i >= 2 is the word `t<i>`, and a text is its words
joined by single spaces. SGLang pads a vocabulary to a multiple of 64, so V = 5 works there, but its logits
must be cut to V before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.pairs import noisy

EOS, BOS = 0, 1
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def tiny_llama(
    path: Path,
    vocab_size: int,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    scale: float = 1.5,
    max_position: int = 512,
) -> None:
    """Write a random Llama in float32.

    Every matrix keeps the variance of its input, so the whole context reaches the logits.

    Args:
        scale: standard deviation of the logits. At V = 5 the default gives next-token laws of about 1 nat.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=BOS,
        pad_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue  # norms stay at one
            std = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            weight.normal_(std=scale * std if "lm_head" in name else std, generator=generator)
    model.save_pretrained(path)


def markov_llama(path: Path, transitions: torch.Tensor, max_position: int = 2048) -> None:
    """Write a Llama whose next token depends on the last one only: a checkpoint that says what it should.

    Args:
        transitions: [V, V], each row the next-token probabilities after one token; V must not exceed 64.
    """
    tiny_llama(path, len(transitions), hidden=64, max_position=max_position)
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()  # the residual stream stays the token's own embedding
        eye = torch.eye(len(transitions), 64)
        model.model.embed_tokens.weight.copy_(eye)
        # RMSNorm scales a unit vector by sqrt(hidden) = 8.
        model.lm_head.weight.copy_(torch.log(transitions.clamp_min(1e-12)).T @ eye / 8)
    model.save_pretrained(path)


def perturbed(path_src: Path, path_dst: Path, noise: float, seed: int) -> None:
    """Write a draft: the checkpoint at `path_src` plus Gaussian noise of `noise` times each matrix' std."""
    noisy(path_src, noise, seed).save_pretrained(path_dst)


def word_tokenizer(path: Path, vocab_size: int, names: Mapping[int, str] | None = None) -> None:
    """Write the word tokenizer described above; words that it does not know become `t2`.

    Args:
        names: words that are called otherwise than `t<i>`, by id.
    """
    words = {i: f"t{i}" for i in range(2, vocab_size)} | dict(names or {})
    vocab = {"<eos>": EOS, "<bos>": BOS} | {word: i for i, word in words.items()}
    # The fallback is not declared to transformers: it would be a special token, and decoding drops those.
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<eos>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(path)

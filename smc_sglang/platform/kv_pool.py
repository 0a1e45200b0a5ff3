"""The KV pool of the torch CPU platform."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class TorchKVPool(MHATokenToKVPool):
    """SGLang's multi-head KV pool, which moves KV between slots with torch instead of a Triton kernel."""

    def _init_kv_copy_and_warmup(self) -> None:
        """Choose SGLang's own torch mover. The base class compiles and runs the kernel here."""
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True

    def write(
        self, layer_id: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's KV; returns its pools, [n_slots, n_kv_heads, head_dim] each.

        Args:
            slots: int64 [n_tokens].
            keys, values: [n_tokens, n_kv_heads, head_dim], of the pool's dtype.
        """
        all_keys, all_values = self.get_kv_buffer(layer_id)
        all_keys.index_copy_(0, slots, keys)
        all_values.index_copy_(0, slots, values)
        return all_keys, all_values

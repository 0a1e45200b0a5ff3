"""The KV pool of the torch CPU platform."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class TorchKVPool(MHATokenToKVPool):
    """SGLang's multi-head KV pool, which moves KV between slots with torch instead of a Triton kernel."""

    def _init_kv_copy_and_warmup(self) -> None:
        """Choose SGLang's own torch mover. The base class compiles and runs the kernel here."""
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True

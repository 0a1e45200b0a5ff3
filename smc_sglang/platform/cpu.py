"""The torch CPU platform: SGLang from its stock wheels on a machine without an accelerator.

SGLang's own CPU engine needs kernels that are not on PyPI. This one runs on torch alone: SGLang's torch
fallbacks for the small operators, :mod:`smc_sglang.platform.attention` for attention.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from smc_sglang.platform.machine import multiplies_bfloat16, thread_count

ATTENTION_BACKEND = "smc_torch"
SPECULATIVE_ALGORITHMS = ("SMC",)

# Fractions and sizes that leave a laptop usable: SGLang's defaults are made for a device of its own.
_MEM_FRACTION = 0.8  # of the memory that is free at start-up, for weights and KV together
_MAX_TOTAL_TOKENS = 65_536
_MAX_RUNNING_REQUESTS = 64
_CHUNKED_PREFILL_SIZE = 1024  # tokens; oneDNN's matmuls gain nothing from larger ones, decoding rows wait for them


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """What SGLang asks a platform; the capabilities are the base class's: no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([ATTENTION_BACKEND])

    # -- device --------------------------------------------------------------------------------------------

    def get_device(self, device_id: int = 0) -> str:
        """The value of `--device` where the user gave none, which SGLang handles as text."""
        return "cpu"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    # -- configuration -------------------------------------------------------------------------------------

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() in SPECULATIVE_ALGORITHMS

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open.

        Raises:
            ValueError: an attention backend that cannot run the speculative algorithm's scoring pass.
        """
        if server_args.device != "cpu":
            return
        speculative = server_args.speculative_algorithm is not None
        if server_args.attention_backend in (None, _sglang_cpu_attention_backend()):
            server_args.attention_backend = ATTENTION_BACKEND
        if speculative:
            _check_attention_backends(server_args)
        # An idle scheduler polls: on a device's host that is nobody's core, here it is one of a few.
        server_args.sleep_on_idle = True
        # Nothing runs beside the host here, so there is nothing to overlap with.
        server_args.disable_overlap_schedule = True
        if server_args.dtype == "auto" and not multiplies_bfloat16():
            server_args.dtype = "float32"
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = _MEM_FRACTION
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = _MAX_TOTAL_TOKENS
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = _CHUNKED_PREFILL_SIZE
        # SGLang reserves 2048 rows of a whole context each, which is 1 GB at 131072 tokens. A speculative
        # algorithm sizes its own rows.
        if server_args.max_running_requests is None and not speculative:
            server_args.max_running_requests = _MAX_RUNNING_REQUESTS

    # -- worker process ------------------------------------------------------------------------------------

    def init_backend(self) -> None:
        """Set torch's threads and offer the attention backend. SGLang calls it once in each worker."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        torch.set_num_threads(thread_count())

        @register_attention_backend(ATTENTION_BACKEND)
        def _create(model_runner: Any) -> Any:
            from smc_sglang.platform.attention import TorchCpuAttention

            return TorchCpuAttention.for_model(model_runner)

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Pack a loaded model's weights for oneDNN, and run it without SGLang's layers where it is a plain Llama."""
        from smc_sglang.platform.linear import pack_model
        from smc_sglang.platform.llama import LlamaDecoder

        pack_model(model)
        LlamaDecoder.install(model)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """KV pools that move KV with torch, for the model kinds that the attention backend serves."""
        if kind != "mha":
            return None
        from smc_sglang.platform.kv_pool import TorchKVPool

        return TorchKVPool


def _sglang_cpu_attention_backend() -> str:
    """What SGLang's own default rule has put into `attention_backend` by now where the user left it open."""
    from sglang.srt.utils.common import is_host_cpu_arm64

    return "torch_native" if is_host_cpu_arm64() else "intel_amx"


def _check_attention_backends(server_args: Any) -> None:
    for name in (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    ):
        backend = getattr(server_args, name)
        if backend not in (None, ATTENTION_BACKEND):
            raise ValueError(
                f"--{name.replace('_', '-')} {backend} cannot score drafted blocks on a CPU: leave it out or "
                f"use {ATTENTION_BACKEND}"
            )

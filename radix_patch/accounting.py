"""KV in use, and KV saved against copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from radix_patch.particle_tree import ParticleTree


def kv_saved(tree: ParticleTree, particles: Sequence[Req]) -> float:
    """1 - (distinct slots) / (sum of the particles' lengths) of a group's live particles; 0 for none.

    The prompt is shared by construction, so only what came after it is looked at.
    """
    if not particles:
        return 0.0
    prompt = len(particles[0].origin_input_ids)
    end = particles[0].kv.kv_committed_len
    if end == 0:
        return 0.0
    answers = torch.stack([tree.slots(particle, prompt, end) for particle in particles])
    distinct = prompt + answers.unique().numel()
    return 1.0 - distinct / (len(particles) * end)

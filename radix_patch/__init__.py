"""Particles on SGLang's RadixAttention tree: the only code that moves KV pointers, tree locks and slots."""

from radix_patch.particle_tree import ParticleTree

__all__ = ["ParticleTree"]

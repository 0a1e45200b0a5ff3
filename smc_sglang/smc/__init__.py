"""The mathematics of SMC decoding: torch only, no I/O, deterministic in (state, uniforms).

* :mod:`.step`: the algorithm box. Read this first.
* :mod:`.weights`: log weights, ESS and log Z^ of groups of particles.
* :mod:`.resampling`: four schemes with one signature.
* :mod:`.densities`: logits -> target and proposal densities.
* :mod:`.rejection`: acceptance of drafted tokens, at temperature 0 and in mode `exact`.
* :mod:`.rng`: counter-based uniforms, and sampling by them.
"""

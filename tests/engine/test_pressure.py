"""KV pressure in every other step: answers stay at the law, whatever happens to their groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.enumerable import Enumerable, assert_z_weighs_answers_to_the_target, running
from tests.engine.tiny import idle_pool

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enumerable]:
    folder = tmp_path_factory.mktemp("pressed")
    with running(folder, noise=0.2, environment={"SMC_TEST_PRESSURE": "1"}) as enumerable:
        yield enumerable


def test_shrinking_and_retraction_are_unbiased(pressed: Enumerable) -> None:
    """E[Z^ 1{answer = s}] = p(s) although groups lose particles or leave the batch and come back."""
    smc = {"n_particles": 4, "draft_length": 2, "resample_threshold": 0.5}
    answers, log_z = pressed.answers(6, temperature=1.0, max_new_tokens=7, ignore_eos=True, smc=smc)
    shrunk = np.array([report["shrinks"] > 0 for report in pressed.reports])
    retracted = np.array([report["retractions"] > 0 for report in pressed.reports])
    assert shrunk.mean() > 0.2
    assert retracted.mean() > 0.02
    assert_z_weighs_answers_to_the_target(pressed, answers, log_z, eos=None)
    idle_pool(pressed.engine)

"""A configuration, which groups ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tree.pools import published_config


@pytest.fixture(scope="module", autouse=True)
def config() -> Iterator[None]:
    with published_config():
        yield

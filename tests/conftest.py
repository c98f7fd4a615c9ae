"""Every test run has a cache of its own: it neither reads nor fills the user's."""

from collections.abc import Iterator

import pytest

pytest_plugins = ["eqsat_neptune.testing.pytest_plugin"]  # tests over rules


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("EQSAT_NEPTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield

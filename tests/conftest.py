"""Every test run has a cache of its own: it neither reads nor fills the user's."""

from collections.abc import Iterator

import pytest

pytest_plugins = ["eqsat_neptune.testing.pytest_plugin"]  # tests over rules


# what says that rules, compilations and emitted code are sound: `-m soundness`, slow ones among them
SOUNDNESS = (
    "rules", "repair", "soundness", "testing", "facts", "infinities", "cancelling", "wide", "verify", "fuzz", "cache", "shapes_and_values",
    "specials", "real", "resized_facts",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in SOUNDNESS:
            item.add_marker("soundness")


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("EQSAT_NEPTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield

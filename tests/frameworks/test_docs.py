"""The pages of the documentation that need a framework do what they say."""

from pathlib import Path

import pytest

from tests.examples.pages import name_of
from tests.examples.test_docs import PAGES_OF_FRAMEWORKS, run_page


@pytest.mark.parametrize("page", PAGES_OF_FRAMEWORKS, ids=name_of)
def test_page(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_there_are_such_pages() -> None:
    assert "train-with-torch.md" in {page.name for page in PAGES_OF_FRAMEWORKS}

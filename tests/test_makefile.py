"""Every way in which the Makefile gets torch, with real make, venv and pip, and an index of tiny wheels.

The fake torch says more in `torch.__version__` than its distribution's version does, as the CUDA build of the package
index does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from once import made_once

ROOT = Path(__file__).parents[1]

# What the Makefile installs in place of this package, without a compiler and in no time.
BACKEND = """
from pathlib import Path
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "fake_project-1.0-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder, name), "w") as wheel:
        wheel.writestr("fake_project-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\\nName: fake-project\\nVersion: 1.0\\nRequires-Dist: torch>=2.11\\n")
        wheel.writestr("fake_project-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("fake_project-1.0.dist-info/RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = ["fake-builder"]
build-backend = "backend"
backend-path = ["."]

[project]
name = "fake-project"
version = "1.0"
dependencies = ["torch>=2.11"]

[project.optional-dependencies]
serve = []
dev = ["fake-linter"]
"""


def wheel(folder: Path, name: str, version: str, body: str = "", requires: str = "") -> Path:
    """A wheel of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    about = f"{module}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}/__init__.py", body)
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        archive.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{about}/RECORD", "")
    return folder / f"{module}-{version}-py3-none-any.whl"


def torch_wheel(folder: Path, version: str, calls_itself: str) -> Path:
    return wheel(folder, "torch", version, f"__version__ = {calls_itself!r}")


def index(folder: Path) -> str:
    """The address of a package index with the wheels that lie in the folder of each package."""
    for package in folder.iterdir():
        links = "".join(f'<a href="{file.name}">{file.name}</a>\n' for file in package.glob("*.whl"))
        (package / "index.html").write_text(links)
    return folder.as_uri()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Virtual environments with pip, which take seconds to make and none to copy: with and without system packages."""

    def make(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder / "apart"], check=True)
        shutil.copytree(folder / "apart", folder / "shared", symlinks=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", folder / "shared"],
            check=True,
        )

    return made_once(tmp_path_factory, "finished", make)


@pytest.fixture
def python(tmp_path: Path, finished: Path) -> Path:
    """An interpreter without torch, whatever the one of these tests has; its `-m venv` copies a finished one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "python"], check=True)
    program = tmp_path / "python/quick-python"
    copy = f"exec '{shutil.which('cp')}' -a '{finished}"
    program.write_text(
        f"""#!/bin/sh
case "$*" in
  "-m venv --system-site-packages "*) {copy}/shared' "$4" ;;
  "-m venv "*) {copy}/apart' "$3" ;;
  *) exec '{tmp_path}/python/bin/python' "$@" ;;
esac
"""
    )
    program.chmod(0o755)
    return program


class Clone:
    """A folder with our Makefile, and what pip may find."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder / "a clone", python
        self.folder.mkdir()
        shutil.copy(ROOT / "Makefile", self.folder)
        (self.folder / "native").mkdir()
        for name, text in {
            "pyproject.toml": PROJECT,
            "backend.py": BACKEND,
            "setup.py": "",
            "CMakeLists.txt": "",
        }.items():
            (self.folder / name).write_text(text)
        self.packages, self.cpu_packages, self.programs = folder / "index", folder / "cpu", folder / "bin"
        self.programs.mkdir()
        self.program("c++", "echo 12.2.0")
        wheel(self.packages / "fake-builder", "fake-builder", "1.0")
        wheel(self.packages / "fake-linter", "fake-linter", "1.0", requires="torch>=2")
        # What pip must never take in place of the torch that is there.
        torch_wheel(self.packages / "torch", "99.0", "99.0+cu999")
        (self.cpu_packages / "torch").mkdir(parents=True)

    def program(self, name: str, script: str = "") -> None:
        """Put a program into the PATH."""
        (self.programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.programs / name).chmod(0o755)

    def make(self, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "PYTHON", "MAKE", "CXX"))
        }
        # Nothing but make, a shell and its tools: the machine may have an NVIDIA driver.
        for program in ("make", "sh", "find", "grep", "rm", "mv", "touch"):
            found = shutil.which(program)
            assert found is not None, program
            if not (self.programs / program).exists():
                (self.programs / program).symlink_to(found)
        environ = {
            **kept,
            "PATH": str(self.programs),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": index(self.packages),
            "PIP_NO_COMPILE": "1",
        }
        arguments = {"PYTHON": str(self.python), "TORCH_CPU_INDEX": index(self.cpu_packages), **variables}
        return subprocess.run(
            ["make", target, *(f"{name}={value}" for name, value in arguments.items())],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )

    def torch(self) -> tuple[str, str]:
        """What the Makefile's own Python imports: version of the distribution, torch.__version__."""
        code = "import torch, importlib.metadata as m; print(m.version('torch'), torch.__version__)"
        done = subprocess.run(
            [self.folder / ".venv/bin/python", "-c", code], check=True, capture_output=True, text=True
        )
        version, calls_itself = done.stdout.split()
        return version, calls_itself


@pytest.fixture
def clone(tmp_path: Path, python: Path) -> Clone:
    return Clone(tmp_path, python)


def check(
    clone: Clone, version: str, calls_itself: str, target: str = ".venv/torch", **variables: str
) -> str:
    """`make` ends well with this torch; what was written. Whether the rest keeps it is seen with target="dev"."""
    done = clone.make(target, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert clone.torch() == (version, calls_itself)
    assert (clone.folder / ".venv/torch").read_text() == f"torch=={version}\n"
    assert (clone.folder / ".venv/dev").exists() == (target == "dev")
    return done.stdout


def test_an_nvidia_driver_takes_torch_from_the_package_index(clone):
    clone.program("nvidia-smi")
    torch_wheel(clone.packages / "torch", "2.13.0", "2.13.0+cu130")
    torch_wheel(clone.cpu_packages / "torch", "2.13.0+cpu", "2.13.0+cpu")
    check(clone, "2.13.0", "2.13.0+cu130", "dev")


def test_without_a_driver_a_wheel_of_the_cpu_build_comes_first(clone):
    torch_wheel(clone.packages / "torch", "2.13.0", "2.13.0+cu130")
    torch_wheel(clone.folder / "wheels", "2.13.0+cpu", "2.13.0+cpu")
    check(clone, "2.13.0+cpu", "2.13.0+cpu", "dev", PIP_ARGS="--find-links wheels")


def test_without_a_driver_torch_s_index_of_cpu_builds_comes_second(clone):
    torch_wheel(clone.packages / "torch", "2.13.0", "2.13.0+cu130")
    torch_wheel(clone.cpu_packages / "torch", "2.13.0+cpu", "2.13.0+cpu")
    check(clone, "2.13.0+cpu", "2.13.0+cpu")


def test_where_there_is_no_cpu_build_the_package_index_comes_last(clone):
    """Found with a compiler that does not tell its version as g++ does, such as clang++."""
    clone.program("c++", "echo 'unknown argument' >&2; exit 1")
    torch_wheel(clone.packages / "torch", "2.13.0", "2.13.0+cu130")
    check(clone, "2.13.0", "2.13.0+cu130")


def install(python: Path, built: Path) -> None:
    """Put a wheel where an interpreter finds it, by hand: it has no pip."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    zipfile.ZipFile(built).extractall(found)


@pytest.mark.parametrize(
    ("version", "calls_itself", "target"),
    [
        ("2.13.0", "2.13.0+cu130", ".venv/torch"),
        pytest.param(
            "2.14.0.dev20260601+cu130", "2.14.0.dev20260601+cu130", "dev", marks=pytest.mark.nightly
        ),
    ],
    ids=["release", "nightly"],
)
def test_the_torch_of_a_virtual_environment_is_used(clone, version, calls_itself, target):
    install(clone.python, torch_wheel(clone.folder / "wheels", version, calls_itself))
    said = check(clone, version, calls_itself, target)
    assert f"Using torch {version} of {clone.python}" in said
    assert not list(clone.folder.glob(".venv/lib/*/site-packages/torch"))


def test_an_older_torch_is_not_used(clone):
    """A build of before the release, which pip sorts before it, though its number is the same."""
    install(clone.python, torch_wheel(clone.folder / "wheels", "2.11.0a0+git123", "2.11.0a0+git123"))
    torch_wheel(clone.packages / "torch", "2.13.0", "2.13.0+cu130")
    assert "is not torch>=2.11" in check(clone, "2.13.0", "2.13.0+cu130")


def test_the_torch_that_is_asked_for_comes_before_the_one_that_is_there(clone):
    install(clone.python, torch_wheel(clone.folder / "wheels", "2.13.0", "2.13.0+cu130"))
    torch_wheel(clone.packages / "torch", "2.12.1", "2.12.1+cu130")
    check(clone, "2.12.1", "2.12.1+cu130", TORCH="torch==2.12.1")


def test_after_a_failure_make_begins_again(clone):
    """Nothing that a run without an index left behind is taken for finished."""
    clone.program("nvidia-smi")  # then pip is asked only once
    failed = clone.make("dev", PIP_ARGS="--no-index")
    assert failed.returncode != 0 and not (clone.folder / ".venv/torch").exists()
    torch_wheel(clone.packages / "torch", "2.13.0", "2.13.0+cu130")
    check(clone, "2.13.0", "2.13.0+cu130")


@pytest.mark.parametrize(
    "script, said",
    [
        ("echo 10.2.1", "c++ is g++ 10.2.1; 11 or newer is needed"),
        (None, "there is no C++ compiler"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_downloaded(clone, script, said):
    if script is None:
        (clone.programs / "c++").unlink()
    else:
        clone.program("c++", script)
    done = clone.make("dev", CXX="")
    assert done.returncode != 0 and said in done.stderr and not (clone.folder / ".venv").exists()


def test_a_python_that_is_not_there_is_named(clone):
    assert "There is no no-such-python. Name another" in clone.make("dev", PYTHON="no-such-python").stderr

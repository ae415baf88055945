"""What is built, and what is installed here, is what git tracks."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path

import gradsight

TREE = Path(__file__).parents[2]
DIST = Path(sys.prefix) / "dist"
"""Where `make package` puts both."""

MODULES_OF = {
    "wandb": {"wandb"},
    "tensorboard": {"tensorboard"},
    "trackio": {"trackio"},
    "hf": {"transformers", "accelerate"},
    "lightning": {"lightning"},
    "serve": {"starlette", "uvicorn"},
}
"""What the packages of each extra are imported as."""


def tracked(*folders: str) -> dict[str, bytes]:
    """The files that git tracks, or would after `git add`, as they are in the work tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listing = subprocess.run([*command, *folders], cwd=TREE, check=True, capture_output=True)
    names = listing.stdout.decode().split("\0")
    return {name: (TREE / name).read_bytes() for name in names if (TREE / name).is_file()}


def package_files() -> dict[str, bytes]:
    return {name.removeprefix("src/"): data for name, data in tracked("src/gradsight").items()}


def wheel() -> dict[str, bytes]:
    (file,) = DIST.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist() -> dict[str, bytes]:
    (file,) = DIST.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        contents = {member.name: archive.extractfile(member) for member in members}
        return {
            name.split("/", 1)[1]: content.read() for name, content in contents.items() if content
        }


def differences(expected: dict[str, bytes], got: dict[str, bytes]) -> list[str]:
    """Every file that is missing, too much, or of other content."""
    names = sorted(expected.keys() | got.keys())
    return [name for name in names if expected.get(name) != got.get(name)]


def test_the_wheel_holds_what_git_tracks_and_nothing_else() -> None:
    files = wheel()
    code = {name: data for name, data in files.items() if ".dist-info/" not in name}
    assert differences(package_files(), code) == []
    about = {name.split("/", 1)[1] for name in files.keys() - code.keys()}
    assert about == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def test_the_sdist_holds_what_git_tracks_and_nothing_else() -> None:
    files = sdist()
    assert files.pop("PKG-INFO")
    assert differences(tracked(), files) == []


def test_the_tests_run_on_what_git_tracks() -> None:
    folder = Path(gradsight.__file__).parent
    installed = {
        f"gradsight/{file.relative_to(folder).as_posix()}": file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert differences(package_files(), installed) == []


def test_a_file_that_is_missing_is_seen() -> None:
    files = package_files()
    del files["gradsight/core/group.py"]
    assert differences(package_files(), files) == ["gradsight/core/group.py"]


def test_the_wheel_says_what_it_needs() -> None:
    (name,) = [name for name in wheel() if name.endswith("METADATA")]
    about = message_from_bytes(wheel()[name])
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert about["Version"] == project["version"] == distribution("gradsight").version
    assert set(about.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    plain = [need for need in about.get_all("Requires-Dist") if "extra ==" not in need]
    assert len(plain) == len(project["dependencies"])


def test_no_extra_is_without_code() -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"all", "dev"}
    assert extras == MODULES_OF.keys()
    imported = set().union(*map(imported_by, (TREE / "src").rglob("*.py")))
    for extra, modules in MODULES_OF.items():
        assert modules & imported, f"nothing in src imports what the extra {extra} brings"
        lines = "\n".join(project["optional-dependencies"][extra])
        named = set(re.findall(r"^[a-z0-9-]+", lines, re.M))
        assert named == modules


def imported_by(file: Path) -> set[str]:
    """The packages that a module imports anywhere in it, by name or as text for importlib."""
    packages = set()
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(name)) if "import_module" in source:
                packages.add(name.split(".")[0])
            case ast.Import(names=names):
                packages |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                packages.add(module.split(".")[0])
    return packages

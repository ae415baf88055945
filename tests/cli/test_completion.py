"""gradsight --install-completion, which cyclopts provides, writes what a shell can load."""

import subprocess
from pathlib import Path

import pytest

from gradsight.cli import main

FILES = {
    "bash": ".local/share/bash-completion/completions/gradsight",
    "zsh": ".zsh/completions/_cyclopts_gradsight",
    "fish": ".config/fish/completions/gradsight.fish",
}
COMPLETE = """
source "{file}"
function=$(complete -p gradsight | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
$function
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ZSH", "ZSH_CUSTOM", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SHELL", "BASH_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("shell", FILES)
def test_the_script_is_written_where_the_shell_looks(
    shell: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--install-completion", "--shell", shell]) == 0
    file = home / FILES[shell]
    assert str(file) in capsys.readouterr().out
    text = file.read_text()
    assert "influence" in text
    assert "--gradient_checkpointing" in text or "gradient_checkpointing" in text
    if shell != "fish":  # which looks into its folder by itself
        assert str(file.parent) in (home / f".{shell}rc").read_text()


def test_bash_completes_commands_and_options(home: Path) -> None:
    main(["--install-completion", "--shell", "bash"])
    for words, expected in (
        ('gradsight ""', "check demo dump influence memory replay report train"),
        ("gradsight mem", "memory"),
        ("gradsight train --batch", "--batch_size"),
    ):
        script = COMPLETE.format(file=home / FILES["bash"], words=words)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert set(expected.split()) <= set(done.stdout.split())


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--install-completion", "--shell", "tcsh"]) == 64

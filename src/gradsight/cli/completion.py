"""gradsight --install-completion"""

from typing import Literal

from gradsight.errors import UsageError


def install_completion(*, shell: Literal["bash", "zsh", "fish"] | None = None) -> int:
    """Let the shell complete commands and options.

    Parameters
    ----------
    shell
        The shell; by default the one that this is run from.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    # Here, for the list of all commands is what lists this one.
    from gradsight.cli import all_commands

    try:
        found = shell or detect_shell()
    except ShellDetectionError:
        found = None
    if found not in ("bash", "zsh", "fish"):
        raise UsageError("your shell cannot be told: add --shell bash, zsh or fish")
    file = all_commands().install_completion(shell=found)
    print(f"Written: {file}")
    if found == "bash":
        print("It is loaded by ~/.bashrc from now on: open a new shell, or `source ~/.bashrc`.")
    if found == "zsh":
        print("It is loaded by ~/.zshrc from now on: open a new shell, or `exec zsh`.")
    if found == "fish":
        print("fish finds it there by itself: open a new shell.")
    return 0

"""One definition of whose a file is, and of the user's own line."""

import inspect
import random
import sys
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch

import gradsight
from gradsight.core.source import Owner, owner_of, users_frames, users_line, users_place

PACKAGE = Path(gradsight.__file__).parent

FILES: dict[str, Owner] = {
    "/home/me/project/train.py": "user",
    __file__: "user",
    str(PACKAGE / "train" / "loop.py"): "user",
    str(PACKAGE / "session" / "watch_session.py"): "ours",
    torch.nn.Linear.forward.__code__.co_filename: "torch",
    pytest.__file__: "library",
    "/usr/lib/python3/dist-packages/six.py": "library",
    random.__file__: "python",
    "<frozen runpy>": "python",
    "<string>": "made up",
    "<eval_with_key>.1": "made up",
}


@pytest.mark.parametrize("filename", FILES)
def test_whose_a_file_is(filename: str) -> None:
    assert owner_of(filename) == FILES[filename]


@pytest.mark.parametrize("module", [torch.nn, gradsight, random])
def test_files_behind_a_link_have_the_same_owner(module: ModuleType, tmp_path: Path) -> None:
    file = Path(str(module.__file__))
    (tmp_path / "linked").symlink_to(file.parent, target_is_directory=True)
    assert owner_of(str(tmp_path / "linked" / file.name)) == owner_of(str(file)) != "user"


def here() -> str:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno}"


def test_the_users_line_is_found_through_code_that_is_not() -> None:
    assert users_line() == here()
    made_up: dict[str, object] = {"users_line": users_line}
    exec(compile("def asked(): return users_line()", "<made up>", "exec"), made_up)
    assert made_up["asked"]() == here()  # type: ignore[operator]
    module = torch.nn.Identity()
    told = []
    module.register_forward_hook(lambda *_: told.append(users_place()))
    module(1)
    assert told[0] is not None
    assert told[0][0] == __file__


def test_frames_go_outwards() -> None:
    def inner() -> list[FrameType]:
        return list(users_frames())

    names = [frame.f_code.co_name for frame in inner()]
    assert names[:2] == ["inner", sys._getframe().f_code.co_name]

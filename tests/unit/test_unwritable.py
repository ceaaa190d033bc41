"""A checkpoint that cannot be written: the error names the folder and what keeps it out."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_zero.checkpoint import file
from lightning_zero.errors import CheckpointError


def _said(path: Path) -> str:
    with pytest.raises(CheckpointError) as found:
        file.write({"x": torch.ones(2)}, str(path))
    return str(found.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_read_only_folder_is_named(tmp_path, number):
    """Tests may run as root, whom no permission keeps out."""
    with mock.patch.object(os, "mkdir", side_effect=[FileNotFoundError(errno.ENOENT, "no"), OSError(number, "no")]):
        said = _said(tmp_path / "new" / "checkpoints" / "last.ckpt")
    assert f"the folder {tmp_path} (drwx" in said
    assert "change its permissions" in said
    assert "default_root_dir" in said
    assert "free" not in said


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "logs").touch()
    said = _said(tmp_path / "logs" / "run" / "last.ckpt")
    assert f"{tmp_path / 'logs'} is not a folder" in said
    assert "default_root_dir" in said


def test_a_full_disk_has_so_much_free(tmp_path):
    with mock.patch.object(Path, "mkdir", side_effect=OSError(errno.ENOSPC, "full")):
        said = _said(tmp_path / "new" / "last.ckpt")
    assert f"MiB are free at {tmp_path}: free space" in said

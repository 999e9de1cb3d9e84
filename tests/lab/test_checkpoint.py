"""What a checkpoint and a run's folder promise: whole files, one process, room on the disk."""

import errno
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drills.runs import TINY
from processes import start
from ripple_lab.files import DiskFullError, replace_text
from ripple_lab.train import checkpoint as checkpoints
from ripple_lab.train import lock
from ripple_lab.train.checkpoint import (
    CHECKSUMS,
    EMBEDDED,
    CheckpointFolders,
    describe,
    read_model,
    read_weights,
    write_weights,
)
from ripple_lab.train.lock import RunInUseError, only_process_in
from ripple_lab.train.recipe import Recipe
from ripple_lab.train.recorder import read_metrics

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
CLASSES = tuple("0123456789")


def write_checkpoint(folder):
    state = {f"model.{name}": x for name, x in TINY.create_module().model.state_dict().items()}
    metadata = describe(TINY, CLASSES)
    CheckpointFolders().save_checkpoint({"state_dict": state, "metadata": metadata}, folder)


def test_checksums_are_those_of_sha256sum(tmp_path):
    write_checkpoint(tmp_path / "step")
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", CHECKSUMS], cwd=tmp_path / "step", capture_output=True
    )
    assert done.stdout.decode().split() == ["model.safetensors:", "OK", "trainer.pt:", "OK"]


def test_the_same_weights_are_the_same_file(tmp_path):
    """Whenever they are written: the file that comes with the package is written again."""
    weights, metadata = read_weights(EMBEDDED)
    backwards = dict(reversed(metadata.items()))
    write_weights(tmp_path / "again.safetensors", weights, backwards)
    assert (tmp_path / "again.safetensors").read_bytes() == EMBEDDED.read_bytes()


def test_other_programs_read_our_weights():
    weights, _ = read_weights(EMBEDDED)
    theirs = load_file(EMBEDDED)
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in weights.items())


def test_weights_without_a_checksum_are_used_and_that_is_said_once(tmp_path):
    path = tmp_path / "plain.safetensors"
    save_file({"x": torch.ones(3)}, path, describe(TINY, CLASSES))
    with pytest.warns(UserWarning, match="plain.safetensors has no checksum") as said:
        weights, recipe, classes = read_model(path)
    assert len(said) == 1
    assert (weights["x"].tolist(), recipe, classes) == ([1, 1, 1], TINY, CLASSES)


@pytest.mark.parametrize("lost", [b'"checksum"', b'"sha256:'])
def test_a_damaged_mark_of_a_checksum_is_no_lack_of_one(lost, tmp_path):
    path = tmp_path / "model.safetensors"
    write_weights(path, {"x": torch.ones(3)}, describe(TINY, CLASSES))
    path.write_bytes(path.read_bytes().replace(lost, lost[:-2] + b"~" + lost[-1:]))
    with pytest.raises(checkpoints.CheckpointError, match="does not match the checksum"):
        read_model(path)


@pytest.mark.parametrize("place", ["_flush", "write_weights", "replace_text"])
def test_a_checkpoint_for_which_there_is_no_space_leaves_nothing(place, tmp_path, monkeypatch):
    def full(path, *arguments):
        with checkpoints.naming_full_disk(path):
            raise NO_SPACE

    monkeypatch.setattr(checkpoints, place, full)
    with pytest.raises(DiskFullError, match=r"\S+ cannot be written: No space .* Free some space"):
        write_checkpoint(tmp_path / "step")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_with_the_file_and_the_old_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    replace_text(path, "old")

    def full(self, text, **options):
        raise NO_SPACE

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DiskFullError, match=f"^{path} cannot be written: .* --resume$"):
        replace_text(path, "new")
    assert path.read_text() == "old"


def test_a_folder_has_one_process_and_names_it(tmp_path):
    run = tmp_path / "run"
    with only_process_in(run):
        holder = f"process {os.getpid()} on {socket.gethostname()}, since 20"
        with pytest.raises(RunInUseError, match=holder), only_process_in(run):
            pass
        (run / "metrics.jsonl").touch()
    with only_process_in(run):
        pass
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def hold_and_die(folder):
    with only_process_in(folder):
        if os.fork() == 0:  # as a worker of a loader, which lives on for a while
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_of_a_dead_process_holds_nobody_up(tmp_path):
    process = start(hold_and_die, tmp_path)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / lock.LOCK).exists()
    with only_process_in(tmp_path):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_distance", 10**9),
        ("max_distance", 10**30),
        ("depth", 10**9),
        ("width", 10**30),
        ("width", 10**9 + 8),
        ("mlp_ratio", 1e308),
        ("mlp_ratio", -1.0),
    ],
)
def test_a_network_beyond_all_measure_is_refused_at_once(field, value):
    text = replace(TINY, name="huge").to_json()
    values = json.loads(text)
    values["model"][field] = value
    with pytest.raises(ValueError, match=rf"{field}|{value}|infinity|allocate") as refused:
        Recipe.from_json(json.dumps(values)).create_module()
    assert len(str(refused.value).splitlines()) == 1


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        b'{"step": 1}',
        b"5",
        b"null",
        b"[1]",
        b"{}",
        b"\xff",
        b'{"step": "2"}',
        b'{"step": 3}',
    ]
    path.write_bytes(b"\n".join([*lines, b'{"step": 4, "los']))
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]

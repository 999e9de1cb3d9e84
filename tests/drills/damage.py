"""Damaged files: of checkpoints, of weights, and JSON that says what it should not."""

import os
import random
import shutil
import warnings

from drills import drill
from drills.runs import TINY, gone_on, reference, refusal, train
from processes import Ripple
from ripple_lab.train.checkpoint import (
    CHECKSUMS,
    TRAINER,
    WEIGHTS,
    CheckpointError,
    CheckpointFolders,
    describe,
    folder_of_step,
    read_model,
    write_weights,
)
from ripple_lab.train.run import last_good_checkpoint

TRIALS = 300
FILES = (*WEIGHTS, TRAINER, CHECKSUMS)


def flip(content, generator):
    changed = bytearray(content)
    changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def cut(content, generator):
    return content[: generator.randrange(len(content))]


def blank(content, generator):
    place = generator.randrange(len(content))
    end = min(place + 4096, len(content))
    return content[:place] + bytes(end - place) + content[end:]


DAMAGES = {"a flipped bit": flip, "cut short": cut, "zeros in place of up to 4 KiB": blank}


def damaged(content, number, generator):
    """The name of a kind of damage, and a content that has it."""
    name = list(DAMAGES)[number % len(DAMAGES)]
    while (worse := DAMAGES[name](content, generator)) == content:
        pass
    return name, worse


@drill("damaged checkpoint", "--resume takes the one before, and a warning names the file")
def checkpoints(folder, short):
    generator = random.Random(0)
    last, before = (folder_of_step(folder, step) for step in (2, 1))
    state = TINY.create_module().state_dict()
    saved = {"metadata": describe(TINY, tuple("0123456789")), "optimizer_states": [state]}
    for path in (before, last):
        CheckpointFolders().save_checkpoint(saved | {"state_dict": dict(state)}, path)
    whole = {path.name: path.read_bytes() for path in last.iterdir()}
    assert sorted(whole) == sorted(FILES)
    for number in range(TRIALS):
        name = FILES[number // len(DAMAGES) % len(FILES)]
        kind, content = damaged(whole[name], number, generator)
        (last / name).write_bytes(content)
        yield f"{name}: {kind}", passed_over(folder, before, last / name)
        restore(last, whole)
    for name in FILES:
        (last / name).unlink()
        yield f"{name}: gone", passed_over(folder, before, last / name)
        restore(last, whole)
        (last / name).unlink()
        os.mkfifo(last / name)
        yield f"{name}: a pipe", passed_over(folder, before, last / name)
        restore(last, whole)


def restore(folder, files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def passed_over(kept, expected, file):
    """What is wrong with the checkpoint that a run would go on from."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = last_good_checkpoint(kept)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if found != expected:
        return f"{found} is used"
    words = [str(warning.message) for warning in said]
    return "" if len(words) == 1 and str(file) in words[0] else f"{file} is not named: {words}"


@drill("damaged weights", "they are refused, and the error names the file")
def weights(folder, short):
    generator = random.Random(1)
    path = folder / "model.safetensors"
    model = TINY.create_module().model
    write_weights(path, model.state_dict(), describe(TINY, tuple("0123456789")))
    whole = path.read_bytes()
    for number in range(TRIALS):
        kind, content = damaged(whole, number, generator)
        path.write_bytes(content)
        try:
            read_model(path)
            wrong = "they are used"
        except CheckpointError as error:
            wrong = "" if str(path) in str(error) else f"{path} is not named: {error}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        yield kind, wrong
    commands = {"evaluate": [], "predict": [path], "analyze": [], "explain": [path], "app": []}
    for command, words in list(commands.items())[: 0 if short else None]:
        for number, kind in enumerate(DAMAGES):
            path.write_bytes(damaged(whole, number, generator)[1])
            process = Ripple(folder / f"{command}-{number}", command, path, *words)
            yield f"{kind}, `ripple {command}`", refusal(process, path)


DEEP = b"[" * 10**5
NO_RECIPES = (
    *(b'{"task": []}', b'{"model": 5}', b'{"epochs": "x"}', b'{"epochs": true}'),
    *(b'{"model": {"max_distance": 1000000000}}', b'{"seed": ' + b"9" * 5000 + b"}"),
)
REFUSED = {
    "recipe.json": (b"5", b"", b"null", b"[1]", b"{", b"\xff\xfe", DEEP, *NO_RECIPES),
    "result.json": (b"5", b"", b"null", b"[1]", b"{}", b"\xff", DEEP),
}
NO_ROWS = (b'{"st', b'{"step": "x"}', b'{"kind": "train", "step": 2}')
GONE_ON_WITH = {
    "environment.json": (b"5", b"", b"null", b"{}", b'"x"', b"\xff", DEEP),
    "metrics.jsonl": (b"5", b"null", b"[1]", b"{}", b"\xff", DEEP, *NO_ROWS),
}


@drill("JSON that is wrong", "one line names the file; a run whose records are damaged goes on")
def json_files(folder, short):
    whole = reference(folder)
    for name, contents in REFUSED.items():
        for number, content in enumerate(contents[: 1 if short else None]):
            run = folder / f"{name}-{number}"
            shutil.copytree(whole, run)
            (run / name).write_bytes(content)
            yield f"{name}, {shown(content)}", refusal(train(run, "--resume"), run / name)
    for name, contents in GONE_ON_WITH.items():
        for number, content in enumerate(contents[: 1 if short else None]):
            run = folder / f"{name}-{number}"
            shutil.copytree(whole, run)
            (run / "result.json").unlink()
            before = (run / name).read_bytes() if name == "metrics.jsonl" else b""
            (run / name).write_bytes(before + content)
            yield f"{name}, {shown(content)}", gone_on(run, whole)


BAD_METADATA = [
    *(("recipe", text.decode()) for text in (b"5", b"null", b"[1]", b"{", DEEP, *NO_RECIPES)),
    *(("classes", text) for text in ("5", "null", "[1]", "{}", "[", '["a", "b"]', DEEP.decode())),
]


@drill("metadata of weights that is wrong", "one line names the file")
def metadata(folder, short):
    state = TINY.create_module().model.state_dict()
    for number, (name, text) in enumerate(BAD_METADATA[: 1 if short else None]):
        path = folder / f"{number}.safetensors"
        write_weights(path, state, describe(TINY, tuple("0123456789")) | {name: text})
        process = Ripple(folder / f"log-{number}", "evaluate", path)
        yield f"{name}: {shown(text.encode())}", refusal(process, path)


def shown(content):
    return repr(content if len(content) < 50 else content[:12] + b"...")[2:-1]

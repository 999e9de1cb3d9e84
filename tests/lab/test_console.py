"""The console: help everywhere, near names for unknown ones, clean pipes, and Ctrl-C."""

import io
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from processes import Ripple, clean_environment, wait_for
from ripple_lab import commands as cli
from ripple_lab.console import Commands
from ripple_lab.files import replace_text, replacing
from ripple_lab.recipes import find_recipe
from ripple_lab.train.checkpoint import find_weights, read_weights
from ripple_lab.train.recorder import Recorder
from ripple_lab.train.run import train

ROOT_FOLDER = Path(__file__).parents[2]
ROOT = typer.main.get_command(cli.app)
COMMAND = [sys.executable, "-c", "import ripple_lab.start; ripple_lab.start.main()"]
COLORS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])[;m]")


def walk(command=ROOT, path=("ripple",)):
    """Every command, nested ones too, with the words that name it."""
    yield path, command
    for name, nested in getattr(command, "commands", {}).items():
        yield from walk(nested, (*path, name))


ALL = dict(walk())
GROUPS = [path for path, command in ALL.items() if hasattr(command, "commands")]


def ripple(*words):
    return CliRunner().invoke(cli.app, words, env={"COLUMNS": "80"})


@pytest.mark.parametrize("path", GROUPS, ids=" ".join)
def test_a_group_alone_lists_its_commands_with_one_line_each(path):
    output = ripple(*path[1:]).output
    for name, command in ALL[path].commands.items():
        first_line = command.help.splitlines()[0]
        assert re.search(rf"^\W*{name} +{re.escape(first_line)}\W*$", output, re.M), name


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_has_an_example_that_is_understood(path):
    done = ripple(*path[1:], "--help")
    assert done.exit_code == 0
    example = re.search(r"Example: (ripple [^│]+)", " ".join(done.output.split()))
    assert example
    (said,) = re.findall(r"Example: (.+)", ALL[path].help)
    words = shlex.split(said)
    named = max((other for other in ALL if tuple(words[: len(other)]) == other), key=len)
    assert named[: len(path)] == path
    ALL[named].make_context(words[0], words[len(named) :], resilient_parsing=True)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("trian", "Did you mean 'train'?"),
        ("bench oop", "Did you mean 'op'?"),
        ("bench op --devise cpu", "--device"),
        ("train digit", "did you mean digits?"),
        ("train digits --optimizer.lrr 1", "--optimizer.lr "),
        ("train digits --quick --model.name riple_tiny4_patch2_32", "ripple_tiny4_patch2_32"),
        ("train shapes-smca --quick --model.name smca_riple_resnet18", "smca_ripple_resnet18"),
        ("models --only riple", "did you mean ripple"),
        ("bench model --only deti", "did you mean DeiT"),
        ("reproduce tabel2", "did you mean table2"),
        ("train recipe.json", "did you mean epochs?"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(words, near, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.json").write_text('{"epochz": 3}')
    done = ripple(*words.split())
    assert done.exit_code != 0
    said = done.output + str(done.exception) + "".join(capfd.readouterr())
    assert near in " ".join(said.replace("│", " ").split()) + " "


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench op --device cuba", "--device is cpu or cuda; got 'cuba'"),
        ("models --only tiny4 --throughput 1 --device cuba", "--device is cpu or cuda"),
        ("predict nowhere a.png --device cuba", "--device is cpu or cuda"),
        ("analyze nowhere --device cuba", "--device is cpu or cuda"),
        ("explain nowhere a.png --device cuba", "--device is cpu or cuda"),
        ("app nowhere --device cuba", "--device is cpu or cuda"),
        ("picture ripples.doc", "must end in .png or .svg; got ripples.doc"),
        ("train nowhere.json", "there is no nowhere.json"),
    ],
)
def test_a_refusal_has_the_rule_and_what_came(words, said):
    done = ripple(*words.split())
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit | ValueError)
    assert said in " ".join((done.output + str(done.exception)).replace("│", " ").split())


@pytest.mark.parametrize(
    "words", ["train digits --quick --model.name nope", "train ripple", "reproduce speed"]
)
def test_words_inside_names_are_not_suggested_for_whole_ones(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = str(ripple(*words.split()).exception)
    assert repr(words.split()[-1]) in error and "did you mean" not in error


def test_an_error_in_a_pipe_is_one_line(tmp_path):
    path = tmp_path / ("long" * 30) / "recipe.json"
    refused = Ripple(tmp_path, "train", path)
    assert refused.wait() == 1
    said = refused.errors.read_text()
    assert said.count("\n") == 1 and f"there is no {path}: `ripple train" in said


def test_a_device_that_is_not_there_has_a_remedy(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = ripple("bench", "op", "--device", "cuda")
    assert done.exit_code == 2
    assert "take --device cpu" in " ".join(done.output.replace("│", " ").split())


def on_a_screen(words, **environment):
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *words],
        stdout=follower,
        stderr=follower,
        stdin=follower,
        env=surroundings(TERM="xterm-256color", **environment),
    )
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # its end, on Linux
            break
        if not part:
            break
        output += part
    process.wait(60)
    os.close(leader)
    return output.decode()


def surroundings(**changes):
    """The environment, without what decides about colours."""
    return clean_environment() | {"OMP_NUM_THREADS": "1"} | changes


def heed_interrupts():
    """Undoes what a shell does to jobs in the background, which these tests may be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_no_color_is_respected():
    assert COLORS.search(on_a_screen(["trian"]))
    refused = on_a_screen(["train", "digits", "--epochz", "1"], NO_COLOR="1")
    assert "--epochs" in refused
    assert not COLORS.search(refused)


def test_a_pipe_is_plain():
    done = ripple("models", "--only", "ripple_tiny4")
    assert "ripple_tiny4_patch2_32" in done.output
    assert "\x1b" not in done.output and "\r" not in done.output


def test_ctrl_c_in_training_keeps_a_checkpoint_and_says_so(tmp_path):
    folder = tmp_path / "demo"
    ripple = Ripple(tmp_path, "demo", "--epochs", "100", "--output", folder)
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"train"' in metrics.read_text(), 200)
    ripple.send_signal(signal.SIGINT)
    assert ripple.wait() == 130
    said = ripple.errors.read_text()
    assert len(said.splitlines()) == 1
    assert "the checkpoint is" in said and said.endswith("The same command goes on.\n")
    assert "\x1b" not in ripple.output.read_text() + said
    assert not list(folder.rglob(".*"))
    assert read_weights(find_weights(folder))[0]


def test_a_run_that_breaks_off_gives_the_screen_back(tmp_path, monkeypatch):
    def broken(self, trainer, module):
        raise RuntimeError("broken off")

    monkeypatch.setattr(Recorder, "flush", broken)
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(RuntimeError, match="broken off"):
        train(find_recipe("digits").smoke_run(), tmp_path / "run", console)
    output = console.file.getvalue()
    hidden, shown = output.rfind("\x1b[?25l"), output.rfind("\x1b[?25h")  # the cursor
    assert 0 <= hidden < shown


def interrupted(action):
    """A command of this console's kind that meets an interrupt."""
    app = typer.Typer(cls=Commands)
    app.command()(action)
    app.command(name="other")(lambda: None)
    return CliRunner().invoke(app, [action.__name__])


def test_ctrl_c_is_one_line():
    def work():
        raise KeyboardInterrupt

    done = interrupted(work)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Stopped.\n")


def test_ctrl_c_in_lightning_is_one_line():
    def work():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    done = interrupted(work)
    assert (done.exit_code, done.stderr) == (130, "Stopped.\n")


def test_another_exit_keeps_its_code():
    def work():
        sys.exit(3)

    done = interrupted(work)
    assert (done.exit_code, done.stderr) == (3, "")


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    package = tmp_path / "ripple_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "start.py").write_text((ROOT_FOLDER / "ripple_lab/start.py").read_text())
    (package / "commands.py").write_text(
        textwrap.dedent("""
            import os, signal
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass  # as half an import may
            def main(): print("went on")
        """)
    )
    environment = surroundings(PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        COMMAND,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        cwd=tmp_path,
        preexec_fn=heed_interrupts,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--version"], ["torch", "numpy"]),
        (["--help"], ["torch", "numpy"]),
        (["bench", "--help"], ["torch", "numpy"]),
        (["train", "digitz"], ["torch", "numpy"]),
        (["train", "--list"], ["torch", "numpy"]),
        (["predict", "no.png"], ["torch", "numpy"]),
        (["predict", "PICTURE"], ["lightning", "torchmetrics", "sklearn", "matplotlib"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_command_imports_no_more_than_it_needs(words, unwanted, tmp_path):
    picture = tmp_path / "picture.png"
    Image.new("RGB", (32, 32)).save(picture)
    words = [str(picture) if word == "PICTURE" else word for word in words]
    code = f"""
import sys, atexit
sys.argv = ["ripple", *{words}]
atexit.register(lambda: print("IMPORTED", [name for name in {unwanted} if name in sys.modules]))
import ripple_lab.start
ripple_lab.start.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "IMPORTED []" in done.stdout, done.stdout + done.stderr


def test_an_interrupted_file_is_not_there(tmp_path):
    path = tmp_path / "results.csv"
    replace_text(path, "old")

    def interrupted_halfway():
        with replacing(path) as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_halfway()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

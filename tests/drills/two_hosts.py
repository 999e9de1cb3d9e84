"""Training on two hosts: two network namespaces of this machine, joined by a cable.

The second host loses its power midway, comes back, and the run goes on from its last checkpoint.
Its weights are compared with those of one undisturbed process. Needs Linux, root and `ip`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file

from drills import drill

BIN = Path(sys.executable).parent
PORT = 29400
# Namespace, end of the cable, address; the first one holds the rendezvous.
HOSTS = (("ripple-a", "ripple-va", "10.77.0.1"), ("ripple-b", "ripple-vb", "10.77.0.2"))
TRAIN = ["train", "digits", "--epochs", "2", "--log-every", "5", "--checkpoint-minutes", "0"]
# Each process augments images in its own way, and large steps make more of what is rounded.
TRAIN += ["--augmentation.crop", "none", "--augmentation.erasing", "0", "--optimizer.lr", "1e-4"]
TRAIN += ["--optimizer.warmup-epochs", "0"]
TOLERANCE = 1e-3  # of a weight, which 118 steps of 1e-4 move by up to 1e-2
LOST_AT = 40  # steps after which the second host is lost


def why_not():
    """Why this machine cannot do it; "" where it can."""
    if shutil.which("ip") is None:
        return "needs the command ip: apt-get install iproute2"
    try:
        with cable():
            return ""
    except subprocess.CalledProcessError as error:
        return f"needs to make network namespaces: {error.stderr.strip()}"


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def cable():
    """Two namespaces and a cable between them; gone at the end with all that runs in them."""
    (a, end_a, _), (b, end_b, _) = HOSTS
    try:
        for name in (a, b):
            ip("netns", "add", name)
        ip("link", "add", end_a, "netns", a, "type", "veth", "peer", "name", end_b, "netns", b)
        for name, end, address in HOSTS:
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for link in ("lo", end):
                ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name, _, _ in HOSTS:
            kill_all(name)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def kill_all(name):
    """Kills what runs in a namespace."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    for number in found.split():
        os.kill(int(number), signal.SIGKILL)


def start(host, folder, run):
    """What a person starts on each host."""
    name, end, address = HOSTS[host]
    torchrun = [
        BIN / "torchrun", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", "--rdzv-id=drill", f"--rdzv-endpoint={HOSTS[0][2]}:{PORT}",
        f"--rdzv-conf=is_host={host == 0}", f"--local-addr={address}",
    ]  # fmt: skip
    ripple = [BIN / "ripple", *TRAIN, "--hardware.nodes=2", "--resume", f"--output={run}"]
    interfaces = {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"}
    # Without this a host that starts anew waits in vain for an address that the others keep.
    interfaces["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    log = (folder / f"host-{host}.log").open("a")
    words = ["ip", "netns", "exec", name, *torchrun, "--no-python", *ripple]
    return subprocess.Popen(
        words, env=os.environ | interfaces, stdout=log, stderr=subprocess.STDOUT, cwd=folder
    )


def steps(run):
    """The steps that a run's metrics tell of, in the order in which they were made."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["step"] for row in rows if row["kind"] == "train"]


@drill("two hosts", "one that is lost and comes back goes on; weights as of one process")
def two_hosts(folder, short):
    reason = "it takes minutes" if short else why_not()
    if reason:
        print(f"two hosts: not run, {reason}")
        return
    one, two = folder / "one", folder / "two"
    with cable():
        first, second = start(0, folder, two), start(1, folder, two)
        wait_for(lambda: max(steps(two), default=0) >= LOST_AT, (first, second))
        name, end, _ = HOSTS[1]
        ip("-n", name, "link", "set", end, "down")  # first, so that nobody is told
        kill_all(name)
        second.wait()
        lost = max(steps(two))
        time.sleep(5)
        ip("-n", name, "link", "set", end, "up")
        back = time.monotonic()
        second = start(1, folder, two)
        wait_for(lambda: max(steps(two)) > lost, (first, second))
        seconds = time.monotonic() - back
        print(f"two hosts: lost at step {lost}; {seconds:.0f} s from its return to the next steps")
        codes = [process.wait(600) for process in (first, second)]
    yield "a host is lost and comes back", "" if codes == [0, 0] else f"exit codes {codes}"
    resumed = (folder / "host-0.log").read_text().count("Going on from")
    yield "a host is lost and comes back", "" if resumed == 1 else f"resumed {resumed} times"
    devices = json.loads((two / "result.json").read_text())["devices"]
    yield "a host is lost and comes back", "" if devices == 2 else f"{devices} processes, not 2"
    subprocess.run(
        [BIN / "ripple", *TRAIN, f"--output={one}"],
        check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ours, theirs = (load_file(run / "model.safetensors") for run in (two, one))
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    print(f"two hosts: weights differ by {difference:.1e} at most")
    wrong = "" if difference < TOLERANCE else f"weights differ by {difference:.1e}"
    yield "two hosts and one process", wrong


def wait_for(condition, processes, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            raise RuntimeError("a host stopped, or waited in vain: its log says why")
        time.sleep(0.2)

"""The page under load, and clients that mean it no good: `ripple app` in a process of its own."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import httpx
from small_run import write_small_run

from drills import drill
from processes import free_port
from ripple_lab.inspection.guard import MOST_BYTES
from ripple_lab.inspection.uploads import MAX_BYTES

API = "/gradio_api"


class Page:
    """A page that is served, and what its clients ask of it.

    Args:
        address: Where it is served.
    """

    def __init__(self, address):
        self.http = httpx.Client(base_url=address, timeout=600)
        self.address = address
        self.events = {}  # the number and the inputs of each event, by its trigger
        config = self.http.get("/config").json()
        self.initial = {part["id"]: part["props"].get("value") for part in config["components"]}
        for event in config["dependencies"]:
            for _, trigger in event["targets"]:
                self.events.setdefault(trigger, (event["id"], event["inputs"]))

    def inputs(self, trigger="load"):
        """What a page sends that nobody has touched."""
        return [self.initial.get(number) for number in self.events[trigger][1]]

    def ask(self, data=None, trigger="load", **more):
        """One event of a new session: the messages that its person sees, the answer last."""
        session = uuid.uuid4().hex
        body = {
            "data": self.inputs(trigger) if data is None else data,
            "fn_index": self.events[trigger][0],
            "session_hash": session,
        } | more
        joined = self.http.post(f"{API}/queue/join", json=body)
        if joined.status_code != 200:
            return [{"msg": "refused", "status": joined.status_code}]
        messages = []
        place = f"{API}/queue/data?session_hash={session}"
        with httpx.stream("GET", self.address + place, timeout=600) as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    messages.append(json.loads(line[5:]))
                    if messages[-1]["msg"] in ("process_completed", "close_stream"):
                        break
        return messages

    def upload(self, content, name="picture.png", **options):
        files = {"files": (name, content)}
        return self.http.post(f"{API}/upload", files=files, **options)


def answered(messages):
    return messages[-1].get("success", False)


MALFORMED = {
    "nothing": [],
    "numbers": [1, 2, 3, 4, 5, 6],
    "no such checkpoint": ["/etc/passwd", None, None, "layer 1", 4, 0.05],
    "no such layer": ["", None, None, "layer x", 4, 0.05],
    "a distance in words": ["", None, None, "layer 1", "far", None],
    "a distance of a mile": ["", None, None, "layer 1", 10**400, 0.05],
    "nested": [[[[]]], {}, None, [], {}, []],
    "too much": [None] * 1000,
    "a word": "word",
    "a number": 7,
    "null": None,
}


def malformed_calls(page, short=False):
    """Sends what no browser sends; returns how many calls were answered as if they were sound."""
    sound = 0
    for trigger in list(page.events)[: 2 if short else None]:
        for data in MALFORMED.values():
            for more in ({}, {"event_data": {"index": "x"}}, {"event_data": [1]}):
                if data is None:
                    more = {"fn_index": 10**6}
                sound += answered(page.ask(data, trigger, **more))
    for path in ("/queue/join", "/run/predict", "/api/predict", "/upload", "/call/show", "/cancel"):
        for content in (b"", b"{", b"null", b'"x"', b"[1]", b"\xff\xfe", b"[" * 9999):
            for kind in ("application/json", "multipart/form-data; boundary=x", "x/y"):
                head = {"content-type": kind}
                done = page.http.post(API + path, content=content, headers=head)
                sound += done.status_code == 200 and done.json() != []  # no files: none taken
    for path in (
        "/file=/etc/passwd",
        "/file=../../etc/passwd",
        "/queue/data",
        "/nope",
        "/%00",
        "/x=%ff",
    ):
        sound += page.http.get(API + path).status_code == 200
    return sound


def ask_at_once(page, count):
    """Many sessions at once: how many were answered, and how many saw their place in the queue,
    which came nearer one by one, to the first."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(page.ask())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nearer = 0
    for messages in found:
        places = [m["rank"] for m in messages if m["msg"] == "estimation"]
        nearer += places == [*range(len(places))][::-1] != []
    return sum(map(answered, found)), nearer


@contextmanager
def serve(folder):
    """`ripple app` with a small model; yields its page, its process and its log."""
    run = folder / "run"
    if not run.exists():
        write_small_run(run)
    port, log = free_port(), folder / "log"
    words = [Path(sys.executable).with_name("ripple"), "app", run, "--no-browse", f"--port={port}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
    try:
        while "Serving" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        yield Page(f"http://127.0.0.1:{port}"), process, log
    finally:
        process.terminate()
        process.wait()


def memory(process):
    """Bytes that a process holds."""
    (line,) = (
        line
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return 1024 * int(line.split()[1])


def folders():
    """Where pages keep their files."""
    return set(Path("/dev/shm").glob("ripple-app-*"))


@drill("page under load", "all are answered, memory and files stay bounded, no traceback")
def page_under_load(folder, short):
    clients, warmup, predictions = (8, 2, 6) if short else (50, 50, 500)
    before = folders()
    with serve(folder) as (page, process, log):
        (own,) = folders() - before
        right, held = 0, 0
        for number in range(predictions):
            if number == warmup:
                held = memory(process)
            right += answered(page.ask())
        yield "one after another", differs("answered", right, predictions)
        now = memory(process)
        growth = now / held - 1
        print(f"page under load: memory grew by {growth:.1%} to {now / 2**20:.0f} MB")
        yield "one after another", "" if short or growth < 0.05 else f"memory grew by {growth:.1%}"
        done, nearer = ask_at_once(page, clients)
        yield "many at once", differs("answered", done, clients)
        yield "many at once", differs("saw their turn come", nearer, clients)
        for _ in range(3 if short else 30):  # looked at by nobody
            page.upload(os.urandom(9 * 2**20))
        kept = sum(path.stat().st_size for path in own.rglob("*") if path.is_file())
        most = MOST_BYTES + MAX_BYTES
        yield "uploads that stay", "" if kept <= most else f"{kept} bytes of files are kept"
        large = page.upload(bytes(MAX_BYTES + 2**20)).status_code
        yield "an upload of 11 MB", differs("status", large, 413)
        yield "malformed calls", differs("taken for sound", malformed_calls(page, short), 0)
        evil = {"host": "evil.example"}, {"origin": "http://evil.example"}
        for headers, status in zip(evil, (400, 403), strict=True):
            got = page.http.get("/config", headers=headers).status_code
            yield "another site", differs("status", got, status)
        yield "malformed calls", differs("answers after them", answered(page.ask()), True)
    traces = log.read_text().count("Traceback")
    yield "malformed calls", differs("tracebacks in the log", traces, 0)
    yield "the end", differs("files are left", own.exists(), False)


def differs(what, got, expected):
    return "" if got == expected else f"{what}: {got}, not {expected}"

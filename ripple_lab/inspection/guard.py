"""What the page lets in and out: requests of this machine alone, of bounded size, few files."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ripple_lab.console import errors
from ripple_lab.inspection.uploads import MAX_BYTES
from ripple_lab.text import plain

HOSTS = ["127.0.0.1", "localhost"]
# Only this server: the browser refuses requests of the page to others.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; frame-ancestors 'self'"
)
ENVELOPE = 2**16  # bytes of a request beside an uploaded file
AT_ONCE = 4  # uploads
MOST_BYTES = 10 * MAX_BYTES  # of files that lie in memory
MOST_SECONDS = 600.0  # that they do


class Guard:
    """ASGI middleware that refuses what is not for the page, and adds the policy to each answer.

    Another site may send a form here, or have its name resolve to this machine: `Origin` gives the
    first away, and `Host` the second, which starlette's TrustedHostMiddleware looks at.

    Args:
        app: What it stands before.
        folder: Where uploads lie.
    """

    def __init__(self, app: Any, folder: Path):
        self.app, self.folder = app, folder
        self._uploads = asyncio.Semaphore(AT_ONCE)

    async def __call__(
        self, scope: Any, receive: Any, send: Callable[..., Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_with_policy(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                policy = (b"content-security-policy", POLICY.encode())
                message = {**message, "headers": [*message.get("headers", []), policy]}
            await send(message)

        async def refuse(status: int, why: str) -> None:
            kind = (b"content-type", b"text/plain; charset=utf-8")
            head = {"type": "http.response.start", "status": status, "headers": [kind]}
            await send_with_policy(head)
            await send({"type": "http.response.body", "body": why.encode()})

        uploads = scope["path"].endswith("/upload")
        if refusal := _refusal(scope, uploads):
            await refuse(*refusal)
            return
        try:
            if uploads:
                async with self._uploads:
                    sweep(self.folder)
                    await self.app(scope, receive, send_with_policy)
            else:
                await self.app(scope, receive, send_with_policy)
        except Exception as error:  # a request that nobody has thought of: a line, no traceback
            note(error)
            if not started:
                await refuse(400, "This request cannot be answered.")


def _refusal(scope: Any, uploads: bool) -> tuple[int, str] | None:
    """The status and the reason why a request is refused, if it is."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and _host(origin) not in HOSTS:
        return 403, "This page answers its own requests alone."
    length = headers.get(b"content-length", b"")
    if scope["method"] == "POST" or length or b"transfer-encoding" in headers:
        if not length.isdigit():
            return 411, "A request must say how long it is."
        if int(length) > ENVELOPE + (MAX_BYTES if uploads else 0):
            return 413, f"A picture may have {MAX_BYTES / 2**20:.0f} MB."
    return None


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def note(error: Exception) -> None:
    """One line in the log, however long the message is."""
    message = plain((str(error).splitlines() or [""])[0], 200)
    errors.print(f"A request was not answered: {type(error).__name__}: {message}", soft_wrap=True)


def sweep(folder: Path, most: int = MOST_BYTES, seconds: float = MOST_SECONDS) -> None:
    """Removes the oldest files of a folder: those over the bytes or the seconds it may keep."""
    files = []
    for path in folder.rglob("*"):
        try:
            about = path.stat()
        except FileNotFoundError:  # another request was done with it
            continue
        if path.is_file():
            files.append((about.st_mtime, about.st_size, path))
    total, now = 0, time.time()
    for written, size, path in sorted(files, reverse=True):
        total += size
        if total > most or now - written > seconds:
            path.unlink(missing_ok=True)


@contextmanager
def swept(folder: Path, every: float = 60.0) -> Iterator[None]:
    """Sweeps a folder now and then while the block runs."""
    ended = threading.Event()

    def keep_sweeping() -> None:
        while not ended.wait(every):
            sweep(folder)

    thread = threading.Thread(target=keep_sweeping, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

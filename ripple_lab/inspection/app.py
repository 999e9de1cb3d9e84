"""`ripple app`: a page on this machine; click on a patch and see its ripples."""

import html
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from ripple_lab.inspection.guard import HOSTS, Guard, note, swept
from ripple_lab.inspection.uploads import MAX_BYTES, MAX_PIXELS, UploadError, decode
from ripple_lab.inspection.viewer import (
    EXAMPLES,
    Viewer,
    patch_at,
    trained_settings,
)
from ripple_lab.inspection.views import Settings
from ripple_lab.text import plain

TITLE = "Ripple attention, seen from a patch"
INTRODUCTION = """
Every patch of a picture gathers what the others hold. In **linear attention** all of them count
alike. In **ripple attention** the patch decides how much each ring around it counts. Click on a
patch and see.
"""
ABOUT_DISTANCE = "Farther tokens are one group, the rest (at most as far as trained)."
ABOUT_THRESHOLD = "A ripple halts once less than this weight is left."
ABOUT_LINEAR = (
    "The rows **attention** and **linear attention** have the same similarities; only the weights "
    "of the rings differ. Brighter is more. Grey in the last row: the ripple did not halt."
)
SIDE = 1024  # pixels of an uploaded picture
MOST_WAITING = 100  # requests; later ones are told to come again
SESSIONS = 64  # whose pictures are kept


def receive(path: str) -> Image.Image:
    """The picture of an uploaded file, which is removed before anything else happens."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    finally:
        file.unlink(missing_ok=True)
    image = decode(data)
    image.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)  # models see less, sessions keep it
    return image


def create_page(viewer: Viewer) -> Any:
    """The page, as gradio's Blocks."""
    import gradio as gr

    first = viewer.first_choice()
    explainer = viewer.explainer(first)
    start = next(iter(EXAMPLES))

    def show(
        choice: str, image: Any, at: Any, layer: str, distance: float, tau: float
    ) -> list[Any]:
        settings = Settings(int(distance), float(tau))
        answer = viewer.answer(choice, image, at, _number(layer), settings)
        return [
            answer.picture, answer.classes, answer.words, answer.layers, answer.heads,
            answer.grid_size,
        ]  # fmt: skip

    def take_example(name: str) -> list[Any]:
        return [EXAMPLES[name](), None, ""]

    def take_upload(path: str) -> list[Any]:
        try:
            return [receive(path), None, "", None]  # the last: room for the next file
        except UploadError as error:
            return [gr.skip(), gr.skip(), f"⛔ {error}", None]

    def show_click(
        choice: str, image: Any, layer: str, distance: float, tau: float,
        grid_size: tuple[int, int], event: gr.SelectData,
    ) -> list[Any]:  # fmt: skip
        at = patch_at(event.index[0], event.index[1], grid_size)
        return [*show(choice, image, at, layer, distance, tau), at]

    def take_checkpoint(choice: str) -> list[Any]:
        try:
            return _controls(gr, viewer, choice)
        except (ValueError, RuntimeError, OSError) as error:
            told = html.escape(plain(str(error)))
            raise gr.Error(told, duration=None, print_exception=False) from None

    class Page(gr.Blocks):
        async def process_api(self, *args: Any, **options: Any) -> Any:
            """As gradio does it, but a malformed call leaves one line in the log, no traceback."""
            try:
                return await super().process_api(*args, **options)
            except gr.Error as error:
                error.print_exception = False
                raise
            except Exception as error:
                note(error)
                told = "This request cannot be answered: please load the page again."
                raise gr.Error(told, print_exception=False) from None

    with Page(title=TITLE, analytics_enabled=False) as page:
        image = gr.State(EXAMPLES[start]())
        at, grid_size = gr.State(None), gr.State((1, 1))
        gr.Markdown(f"# {TITLE}\n{INTRODUCTION}")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                picture = gr.Image(
                    label="Click on a patch", type="pil", format="png", interactive=False,
                    elem_id="picture", buttons=[],
                )  # fmt: skip
                refusal = gr.Markdown(elem_id="refusal")
                example = gr.Radio(
                    list(EXAMPLES), value=start, label="Examples", elem_id="examples"
                )
                upload = gr.File(
                    label="Or drop a picture: PNG, JPEG or WebP, up to 10 MB",
                    file_types=[".png", ".jpg", ".jpeg", ".webp"], type="filepath", height=150,
                    elem_id="upload",
                )  # fmt: skip
                choice = gr.Dropdown(viewer.choices, value=first, label="Checkpoint")
            with gr.Column(scale=3, min_width=420):
                said = gr.Markdown(elem_id="words")
                layers = gr.HTML(elem_id="layers", label="layers")
                with gr.Row():
                    distance = gr.Slider(
                        1, max(2, explainer.max_distance), step=1, label="R_max",
                        info=ABOUT_DISTANCE, value=max(1, explainer.max_distance),
                        interactive=explainer.max_distance > 1, elem_id="distance",
                    )  # fmt: skip
                    tau = gr.Slider(
                        0, 0.5, step=0.001, label="τ", info=ABOUT_THRESHOLD,
                        value=explainer.halt_threshold, interactive=explainer.max_distance > 0,
                        elem_id="tau",
                    )  # fmt: skip
                reset = gr.Button("Both sliders as trained", size="sm")
        gr.Markdown(ABOUT_LINEAR)
        classes = gr.Label(label="Predicted classes", elem_id="classes")
        gr.Markdown("### One layer, head by head")
        layer = gr.Dropdown(
            _layers(viewer, first), value="layer 1", show_label=False, container=False, scale=0
        )
        heads = gr.HTML(elem_id="heads", label="heads")

        asked = [choice, image, at, layer, distance, tau]
        shown = [picture, classes, said, layers, heads, grid_size]
        controls = [distance, tau, layer]
        # One request at a time; of those that come meanwhile, only the last is answered.
        only: Any = {"show_progress": "minimal", "concurrency_limit": 1, "concurrency_id": "model"}
        only["trigger_mode"] = "always_last"
        page.load(show, asked, shown, **only)
        # One step: two could be overtaken by those of the next click.
        clicked = [choice, image, layer, distance, tau, grid_size]
        picture.select(show_click, clicked, [*shown, at], **only)
        for event in (
            example.input(take_example, example, [image, at, refusal], trigger_mode="multiple"),
            upload.upload(
                take_upload, upload, [image, at, refusal, upload], trigger_mode="multiple"
            ),
            choice.input(take_checkpoint, choice, controls, trigger_mode="multiple"),
            reset.click(lambda name: take_checkpoint(name)[:2], choice, controls[:2]),
        ):
            event.success(show, asked, shown, **only)
        moved = [distance.input, tau.input, layer.input]
        gr.on(moved, show, asked, shown, **only)
    return page


def _layers(viewer: Viewer, choice: str) -> list[str]:
    return [f"layer {i + 1}" for i in range(viewer.explainer(choice).num_layers)]


def _number(layer: str) -> int:
    return int(layer.removeprefix("layer ")) - 1


def _controls(gr: Any, viewer: Viewer, choice: str) -> list[Any]:
    """The controls as a checkpoint was trained."""
    explainer = viewer.explainer(choice)
    settings = trained_settings(explainer)
    largest = settings.max_distance or 1
    return [
        gr.update(maximum=max(2, largest), value=largest, interactive=largest > 1),
        gr.update(value=settings.halt_threshold, interactive=explainer.max_distance > 0),
        gr.update(choices=_layers(viewer, choice), value="layer 1"),
    ]


@contextmanager
def kept_in_memory() -> Iterator[Path]:
    """A folder for gradio's pictures, in memory if the system can; removed at the end."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    before = os.environ.get("GRADIO_TEMP_DIR")
    with tempfile.TemporaryDirectory(prefix="ripple-app-", dir=root) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # the only way that gradio offers
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = before


@contextmanager
def served(viewer: Viewer, port: int | None = None, *, browse: bool = False) -> Iterator[str]:
    """Serves the page on this machine alone while the block runs.

    Yields:
        Its address.
    """
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, MAX_PIXELS  # gradio opens some, too
    with kept_in_memory() as folder, swept(folder):
        page = create_page(viewer).queue(max_size=MOST_WAITING)
        middleware = [
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
            Middleware(Guard, folder=folder),
        ]
        _, address, _ = page.launch(
            server_name=HOSTS[0],
            server_port=port,
            share=False,
            inbrowser=browse,
            prevent_thread_lock=True,
            quiet=True,
            max_file_size=MAX_BYTES,
            footer_links=[],
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            state_session_capacity=SESSIONS,
            theme=gr.themes.Default(
                font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
            ),
            app_kwargs={"middleware": middleware},
        )
        try:
            yield address
        finally:
            page.close(verbose=False)
            Image.MAX_IMAGE_PIXELS = before

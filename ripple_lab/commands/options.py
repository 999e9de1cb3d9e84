"""Arguments and options that several commands share."""

import typer

CHECKPOINT = typer.Argument(
    help="A .safetensors file, the folder of a checkpoint or a run, or `embedded`."
)
EMA = typer.Option("--ema", help="Use the running mean of the weights.")
DEVICE = typer.Option(help="cpu or cuda.")

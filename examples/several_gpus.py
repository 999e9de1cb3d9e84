"""Training on several GPUs, or on several processes of a CPU, with PyTorch alone.

Run it with: torchrun --nproc-per-node 2 examples/several_gpus.py
On two hosts add, on each: --nnodes 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400
For recipes, `ripple train NAME --hardware.devices 2` does this; docs/training.md has several hosts.
"""

import os

import timm
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ripple_attention.models  # noqa: F401  (makes the names known to timm)

STEPS, BATCH = 5, 8  # images of one process


def train(device: torch.device) -> torch.nn.Module:
    """Trains a small model, and returns it without the wrapper of DDP."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = timm.create_model("ripple_tiny4_patch2_32", patch_size=8, num_classes=2).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # each process has its own images
    labels = torch.arange(BATCH, device=device) % 2
    images = torch.randn(BATCH, 3, 32, 32, device=device) + labels[:, None, None, None]
    for step in range(STEPS):
        loss = cross_entropy(parallel(images), labels)
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over the processes
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step + 1}: loss {mean:.3f} over {BATCH * world} images")
    return model


def main() -> None:
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    model = train(device)
    digest = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()
    digests = [torch.zeros_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    if dist.get_rank() == 0:
        verdict = "agree" if all(other == digest for other in digests) else "DIFFER"
        print(f"{len(digests)} processes ({dist.get_backend()}): weights {verdict}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

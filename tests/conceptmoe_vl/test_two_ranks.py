"""Invariant 6: two gloo ranks with a part of the batch each give the gradients of one with all of
it.
"""

from __future__ import annotations

import pytest
import torch

from tests.tiny import make_document, packed, tiny_model

PARITY = {"noise": "none", "image_mode": "grid", "ratio_loss_weight": 0.5}
PARITY_TEXT = {"balance_loss_weight": 0.1, "router_z_loss_weight": 0.05}


def parity_documents():
    return [make_document([4], 1), make_document([9], 2), make_document([3, "image", 5], 3)]


def one_rank(rank, folder, scope):
    """Rank 0 holds text alone, rank 1 one document with an image; gradients are averaged as DDP
    does.
    """
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = tiny_model(text=PARITY_TEXT, ratio_scope=scope, **PARITY).train()
    documents = parity_documents()
    supervised = 3 + 8 + 3 - 1 + 5
    part = packed(documents[:2] if rank == 0 else documents[2:], labels=True)
    out = model(**part, num_items_in_batch=supervised / 2)
    out.loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad / 2
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    if rank == 0:
        auxiliary = [out.ratio_loss, out.balance_loss, out.router_z_loss, out.chunks.ratio]
        torch.save(
            {"loss": loss / 2, "aux": [x.detach() for x in auxiliary], "grad": gradients},
            f"{folder}/out.pt",
        )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("scope", ["global", "modality", "sample"])
def test_two_ranks_equal_one(scope, tmp_path):
    """Invariant 6: averaged gradients of two ranks equal those of one with the whole batch."""
    processes = torch.multiprocessing.start_processes(
        one_rank, (str(tmp_path), scope), nprocs=2, join=False, start_method="fork"
    )
    model = tiny_model(text=PARITY_TEXT, ratio_scope=scope, **PARITY).train()
    out = model(**packed(parity_documents(), labels=True))
    out.loss.backward()
    while not processes.join(timeout=120):
        pass
    two = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.testing.assert_close(two["loss"], out.loss.detach(), atol=1e-6, rtol=1e-5)
    auxiliary = [out.ratio_loss, out.balance_loss, out.router_z_loss, out.chunks.ratio]
    for a, b in zip(two["aux"], auxiliary, strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-6, rtol=1e-5)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(
            two["grad"][name],
            parameter.grad,
            atol=1e-5 * scale + 1e-8,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )

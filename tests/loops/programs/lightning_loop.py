"""Lightning: a training step that calls parts of the module, accumulation, and validation.

usage: lightning_loop.py RESULT [mistake]
"""

import logging
import sys
import tempfile
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class AutoEncoder(lightning.LightningModule):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LeakyReLU(0.01))
        self.decoder = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LeakyReLU(slope), torch.nn.Linear(6, 8))
        self.losses: list[float] = []

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (inputs,) = batch
        return torch.nn.functional.mse_loss(self.decoder(self.encoder(inputs)), inputs)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.losses.append(self._loss(batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(result: str, mistake: str = "") -> None:
    lightning.seed_everything(2, verbose=False)
    model = AutoEncoder(slope=0.2 if mistake else 0.01)
    data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accumulate_grad_batches=2,
            limit_val_batches=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, data, data)
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(result).write_bytes(repr(model.losses).encode() + parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])

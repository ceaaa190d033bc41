"""Runs the training that conf/config.yaml describes: python train.py strategy=zero2 trainer.devices=4"""

from __future__ import annotations

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_zero.hydra_config import make_object, make_trainer


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    folder = HydraConfig.get().runtime.output_dir
    trainer = make_trainer(cfg, default_root_dir=folder)
    trainer.fit(make_object(cfg, "model"), datamodule=make_object(cfg, "data"), ckpt_path=cfg.ckpt_path)
    if trainer.is_global_zero:
        shown = ", ".join(f"{name} {float(value):.6g}" for name, value in trainer.callback_metrics.items())
        print(f"{shown}\nrun folder: {folder}", flush=True)
    metric = trainer.callback_metrics.get(cfg.optimized_metric)
    return None if metric is None else float(metric)  # for hparams_search=optuna


if __name__ == "__main__":
    main()

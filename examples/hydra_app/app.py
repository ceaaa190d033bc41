"""A user's own Hydra app with the groups of this package: python app.py strategy=zero2 trainer.devices=2"""

import hydra
import lightning as L
from omegaconf import DictConfig

from lightning_zero.hydra_config import make_object, make_trainer


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(cfg, default_root_dir=hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    module = make_object(cfg, "model")
    trainer.fit(module, datamodule=make_object(cfg, "data"))
    if trainer.is_global_zero:
        print(f"strategy {cfg.strategy.get('stage', 'ddp')}: loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()

"""The commands: ``lightning-zero``, Hydra, plan, doctor."""

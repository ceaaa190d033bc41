"""The command ``lightning-zero`` and its parts: Hydra, plan, doctor, init."""

"""ZeRO on ``deepspeed.initialize``."""

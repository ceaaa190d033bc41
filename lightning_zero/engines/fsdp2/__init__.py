"""ZeRO on ``torch.distributed.fsdp.fully_shard``."""

#!/usr/bin/env bash
# Trains Hugging Face GPT-2 from random weights under ZeRO stage 2.
# On a CPU, add +model.config.n_layer=2 +model.config.n_embd=64 +model.config.n_head=2 data.vocab_size=1024
set -euo pipefail
exec lightning-zero fit experiment=gpt2_zero2 "$@"

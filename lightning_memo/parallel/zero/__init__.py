"""ZeRO by FSDP2: what is sharded, and how it is sent."""
